"""Find what a call returned and changed, and check it against the reference."""
