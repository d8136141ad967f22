"""One claim, whole: its inputs and arms, whether they agree, how they compare, and why."""
