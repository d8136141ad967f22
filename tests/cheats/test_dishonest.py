"""No wrong or dishonest arm passes on the fake device or under the host clock."""

import pytest

from tests.cheats import dishonest, dishonest_results, dishonest_timing
from tests.cheats.case import assert_caught

CHEATS = {**dishonest.CHEATS, **dishonest_results.CHEATS, **dishonest_timing.CHEATS}


@pytest.mark.parametrize("name", CHEATS)
def test_it_is_caught(name):
    assert_caught(CHEATS[name])


def test_there_are_enough():
    assert len(CHEATS) >= 180
