"""Environment variables that change figures or builds, without values that identify someone."""

import re
from collections.abc import Mapping
from typing import Final

_VARIABLES: Final = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "NVCC_CCBIN"),
    *("NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE", "OMP_NUM_THREADS"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TRITON_INTERPRET", "PYTEST_AIPERF_CACHE"),
    *("NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISTRIBUTED_DEBUG", "TORCH_COMPILE_DISABLE"),
)
"""Environment variables that are recorded. A value that does not match ``_PLAIN`` is replaced."""
_PLAIN: Final = re.compile(r"[\d,:]{0,20}|INFO|WARN|VERSION|TRACE|DETAIL|OFF|LAZY|EAGER")
"""Values that identify nobody: numbers and keywords. Any other value becomes ``<set>``."""


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set and recorded, with ``<set>`` for a private value."""
    hidden = private(environ)
    return {
        name: "<set>" if name in hidden else environ[name] for name in _VARIABLES if name in environ
    }


def private(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values may identify someone or be a secret."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _VARIABLES or not _PLAIN.fullmatch(value)
    }
