"""The course's own taste; everything that works belongs to the plugin."""

import pytest

pytest_plugins = ["pytester"]  # transcripts in tests/plugin; pytest takes it only from here


@pytest.hookimpl(tryfirst=True)  # before Hypothesis loads it
def pytest_configure(config: pytest.Config) -> None:
    """Know the profile of ``pytest tests/cheats tests/plugin --hypothesis-profile=long``."""
    if config.getoption("--hypothesis-profile", None):
        from hypothesis import HealthCheck, settings  # late: a worker would import it for 1.3 s

        settings.register_profile(
            "long",
            max_examples=12_500,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
