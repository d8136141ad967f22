"""No guard refuses an honest arm that looks like a cheat."""

import pytest

from tests.cheats import (
    honest,
    honest_contents,
    honest_effects,
    honest_objects,
    honest_results,
    honest_timing,
    honest_unusual,
)
from tests.cheats.case import assert_honest

HONEST = {
    **honest.HONEST,
    **honest_contents.HONEST,
    **honest_effects.HONEST,
    **honest_objects.HONEST,
    **honest_results.HONEST,
    **honest_timing.HONEST,
    **honest_unusual.HONEST,
}


COMPLETE = {  # their claims leave nothing unchecked
    *honest_contents.HONEST,
    *honest_effects.HONEST,
    *honest_objects.HONEST,
    *honest_unusual.HONEST,
}


@pytest.mark.parametrize("name", HONEST)
def test_it_passes(name):
    result = assert_honest(HONEST[name])
    if name in COMPLETE:
        assert result.unchecked == ()


def test_there_are_enough():
    assert len(HONEST) >= 150
