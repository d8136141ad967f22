"""The course's own taste; everything that works belongs to the plugin."""
