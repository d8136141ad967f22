"""No wrong or dishonest arm passes on a GPU: ``pytest --gpu tests/cheats``."""

import pytest

from tests.cheats.case import assert_caught
from tests.cheats.on_gpu import CHEATS


@pytest.mark.parametrize("name", CHEATS)
def test_it_is_caught(name, item, nvcc):
    assert_caught(CHEATS[name], item, nvcc=nvcc)
