"""Comparison of nightly runs of pytest-aiperf with earlier nights."""
