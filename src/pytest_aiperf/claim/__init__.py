"""Checks, measures, explains and judges one claim."""
