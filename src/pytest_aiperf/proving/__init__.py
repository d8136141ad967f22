"""What the plugin says where the truth is known."""
