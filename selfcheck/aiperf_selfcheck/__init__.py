"""Checks of pytest-aiperf against comparisons and times whose right answer is known."""
