"""What this GPU can do: its limits, measured once and cached."""
