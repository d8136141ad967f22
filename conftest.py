"""The course's own taste; everything that works belongs to the plugin."""

pytest_plugins = ["pytester"]  # transcripts in tests/plugin; pytest takes it only from here
