"""pytest configuration of this repository; the plugin itself needs none."""

import pytest

pytest_plugins = ["pytester"]  # for tests/plugin; pytest accepts it in the root conftest only


@pytest.hookimpl(tryfirst=True)  # before Hypothesis loads the profile
def pytest_configure(config: pytest.Config) -> None:
    """Register the profile of ``pytest tests/cheats tests/plugin --hypothesis-profile=long``."""
    if config.getoption("--hypothesis-profile", None):
        from hypothesis import HealthCheck, settings  # late: the import costs each worker 1.3 s

        settings.register_profile(
            "long",
            max_examples=12_500,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
