"""The course's own taste; everything that works belongs to the plugin."""

pytest_plugins = ["pytester"]  # transcripts in tests/plugin; pytest takes it only from here

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # who only measures needs none
    pass
else:
    # pytest tests/cheats tests/plugin --hypothesis-profile=long
    settings.register_profile(
        "long",
        max_examples=12_500,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
