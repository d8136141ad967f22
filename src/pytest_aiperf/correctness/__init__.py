"""What a call returned and changed, and whether it is right."""
