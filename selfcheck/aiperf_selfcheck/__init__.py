"""Checks of pytest-aiperf itself against comparisons whose right answer is known."""
