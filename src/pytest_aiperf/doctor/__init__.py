"""Diagnose the machine, pack a bug report, remove this plugin's files."""
