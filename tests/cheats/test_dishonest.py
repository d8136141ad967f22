"""No wrong or dishonest arm passes on the fake device or under the host clock."""

import pytest

from tests.cheats import (
    dishonest,
    dishonest_contents,
    dishonest_effects,
    dishonest_objects,
    dishonest_results,
    dishonest_timing,
    dishonest_unusual,
)
from tests.cheats.case import assert_caught, assert_marked

CHEATS = {
    **dishonest.CHEATS,
    **dishonest_contents.CHEATS,
    **dishonest_effects.CHEATS,
    **dishonest_objects.CHEATS,
    **dishonest_results.CHEATS,
    **dishonest_timing.CHEATS,
    **dishonest_unusual.CHEATS,
}
MARKED = {
    **dishonest_contents.MARKED,
    **dishonest_effects.MARKED,
    **dishonest_objects.MARKED,
    **dishonest_results.MARKED,
    **dishonest_unusual.MARKED,
}


@pytest.mark.parametrize("name", CHEATS)
def test_it_is_caught(name):
    assert_caught(CHEATS[name])


@pytest.mark.parametrize("name", MARKED)
def test_it_is_marked_as_not_checked(name):
    assert_marked(MARKED[name])


def test_there_are_enough():
    assert len(CHEATS) >= 180
