"""Whether a machine is fit to measure, what it is, and what we left on it."""
