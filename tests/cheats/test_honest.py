"""No guard refuses an honest arm that looks like a cheat."""

import pytest

from pytest_aiperf.errors import ClaimNotMet
from tests.cheats import (
    honest,
    honest_contents,
    honest_effects,
    honest_objects,
    honest_results,
    honest_timing,
    honest_unusual,
)
from tests.cheats.case import assert_honest, measure_entry

HONEST = {
    **honest.HONEST,
    **honest_contents.HONEST,
    **honest_effects.HONEST,
    **honest_objects.HONEST,
    **honest_results.HONEST,
    **honest_timing.HONEST,
    **honest_unusual.HONEST,
}


@pytest.mark.parametrize("name", HONEST)
def test_it_passes(name):
    assert_honest(HONEST[name])


@pytest.mark.parametrize(
    "name",
    [
        *honest_contents.HONEST,
        *honest_effects.HONEST,
        *honest_objects.HONEST,
        *honest_unusual.HONEST,
    ],
)
def test_nothing_is_left_unchecked(name):
    result, problem = measure_entry(HONEST[name])
    assert problem is None or isinstance(problem, ClaimNotMet), result.message
    assert result.unchecked == ()


def test_there_are_enough():
    assert len(HONEST) >= 150
