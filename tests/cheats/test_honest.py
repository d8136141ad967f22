"""No guard refuses an honest arm that looks like a cheat."""

import pytest

from tests.cheats import honest, honest_results, honest_timing
from tests.cheats.case import assert_honest

HONEST = {**honest.HONEST, **honest_results.HONEST, **honest_timing.HONEST}


@pytest.mark.parametrize("name", HONEST)
def test_it_passes(name):
    assert_honest(HONEST[name])


def test_there_are_enough():
    assert len(HONEST) >= 150
