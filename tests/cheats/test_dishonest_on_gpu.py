"""No wrong or dishonest arm passes on a GPU: ``pytest --gpu tests/cheats``."""

import pytest

from pytest_aiperf.device.cuda import CudaDevice
from tests.cheats.case import assert_caught
from tests.cheats.on_gpu import CHEATS


@pytest.mark.parametrize("name", CHEATS)
def test_it_is_caught(name, gpu, nvcc):
    assert_caught(CHEATS[name], CudaDevice(gpu), nvcc=nvcc)
