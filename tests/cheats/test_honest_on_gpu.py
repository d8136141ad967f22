"""No guard refuses an honest arm on a GPU: ``pytest --gpu tests/cheats``."""

import pytest

from pytest_aiperf.device.cuda import CudaDevice
from tests.cheats.case import assert_honest
from tests.cheats.on_gpu import HONEST


@pytest.mark.parametrize("name", HONEST)
def test_it_passes(name, gpu, nvcc):
    assert_honest(HONEST[name], CudaDevice(gpu), nvcc=nvcc)
