"""The machine: its GPUs, locks, supervised processes and ranks."""
