"""No wrong or dishonest arm passes on the fake device or under the host clock."""

import pytest

from tests.cheats.case import assert_caught
from tests.cheats.dishonest import CHEATS


@pytest.mark.parametrize("name", CHEATS)
def test_it_is_caught(name):
    assert_caught(CHEATS[name])


def test_there_are_enough():
    assert len(CHEATS) >= 60
