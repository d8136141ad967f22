"""No guard refuses an honest arm on a GPU: ``pytest --gpu tests/cheats``."""

import pytest

from tests.cheats.case import assert_honest
from tests.cheats.on_gpu import HONEST


@pytest.mark.parametrize("name", HONEST)
def test_it_passes(name, item, nvcc):
    assert_honest(HONEST[name], item, nvcc=nvcc)
