"""No guard refuses an honest arm that looks like a cheat."""

import pytest

from tests.cheats.case import assert_honest
from tests.cheats.honest import HONEST


@pytest.mark.parametrize("name", HONEST)
def test_it_passes(name):
    assert_honest(HONEST[name])


def test_there_are_enough():
    assert len(HONEST) >= 60
