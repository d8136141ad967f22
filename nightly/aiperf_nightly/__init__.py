"""Comparison of nightly runs of pytest-aiperf with the nights before them."""
