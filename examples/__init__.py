"""Programs that use pytest-aiperf as a library."""
