"""Reads hardware counters around one call, in this process, through CUPTI's range profiler."""

import contextlib
import ctypes
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.build.nvcc import default_cache, find_nvcc
from pytest_aiperf.errors import BuildError, CaptureFailed, ToolMissing, UsageError
from pytest_aiperf.model import Gpu
from pytest_aiperf.records.results import atomic_write, dumps, loads

NOT_PERMITTED: Final = (
    "the driver reserves GPU counters for administrators (ERR_NVGPUCTRPERM): load the nvidia "
    "module with NVreg_RestrictProfilingToAdminUsers=0, or give the container CAP_SYS_ADMIN"
)
IN_USE: Final = "another tool holds the GPU's counters: stop it (DCGM: dcgmi profile --pause)"
_REASONS: Final = {26: IN_USE, 35: NOT_PERMITTED, 40: NOT_PERMITTED}
"""Causes and remedies of CUPTI's statuses HARDWARE_BUSY and, on a GPU and on a virtual GPU,
INSUFFICIENT_PRIVILEGES."""
_BAD_NAMES: Final = (1, 17)  #: Statuses of an unknown metric: INVALID_PARAMETER, _METRIC_NAME.
_USER_RANGE: Final = 2  #: CUPTI_UserRange: from one call of the API to another, on all streams.
_USER_REPLAY: Final = 3  #: CUPTI_UserReplay: the caller repeats its work for each pass.
_FLUSHED_L2: Final = 3  #: Sizes of the L2 cache that are read to evict its content.

_TYPES: Final[Mapping[str, Any]] = {
    "pointer": ctypes.c_void_p, "text": ctypes.c_char_p, "size": ctypes.c_size_t,
    "int": ctypes.c_int, "uint8": ctypes.c_uint8, "uint16": ctypes.c_uint16,
    "uint32": ctypes.c_uint32,
}  # fmt: skip
_FUNCTIONS: Final = {
    "cuptiProfilerInitialize": "",
    "cuptiProfilerDeInitialize": "",
    "cuptiDeviceGetChipName": "size device, text chip",
    "cuptiProfilerHostInitialize": "int type, text chip, pointer availability, pointer host",
    "cuptiProfilerHostDeinitialize": "pointer host",
    "cuptiProfilerHostConfigAddMetrics": "pointer host, pointer metrics, size count",
    "cuptiProfilerHostGetConfigImageSize": "pointer host, size bytes",
    "cuptiProfilerHostGetConfigImage": "pointer host, size bytes, pointer image",
    "cuptiProfilerHostEvaluateToGpuValues": "pointer host, pointer image, size bytes, size index, "
    "pointer metrics, size count, pointer values",
    "cuptiRangeProfilerEnable": "pointer context, pointer profiler",
    "cuptiRangeProfilerDisable": "pointer profiler",
    "cuptiRangeProfilerGetCounterDataSize": "pointer profiler, pointer metrics, size count, "
    "size max_ranges, uint32 max_nodes, size bytes",
    "cuptiRangeProfilerCounterDataImageInitialize": "pointer profiler, size bytes, pointer image",
    "cuptiRangeProfilerSetConfig": "pointer profiler, size config_bytes, pointer config, "
    "size bytes, pointer image, int range, int replay, size max_ranges, uint16 levels, "
    "uint16 min_level, size pass_index, uint16 target_level",
    "cuptiRangeProfilerStart": "pointer profiler",
    "cuptiRangeProfilerPushRange": "pointer profiler, text name",
    "cuptiRangeProfilerPopRange": "pointer profiler",
    "cuptiRangeProfilerStop": "pointer profiler, size pass_index, size level, uint8 is_last_pass",
    "cuptiRangeProfilerDecodeData": "pointer profiler, size dropped",
}
"""The functions of CUPTI that are used, and the fields of the structure that each one takes, after
the two that all structures begin with: its size and a private pointer."""


def read(
    call: Callable[[], object],
    metrics: Sequence[str],
    device: Any,
    flush: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Read the metrics of everything that one call runs on the GPU of a ``CudaDevice``.

    The call runs once to warm up, then once per pass, and most sets of a few metrics need one pass.
    Each pass counts from an idle GPU to an idle GPU, so that kernels on all streams, from all
    threads and in CUDA graphs are included. ``flush`` runs before each pass, not counted. Metrics
    have CUPTI's names and units; one without a value, such as a ratio of two zeros, is left out.

    Raise ToolMissing if counters cannot be read on this machine, and CaptureFailed for an unknown
    metric. Clocks stay as they are, so that cycles and times vary as they do without a profiler.
    """
    import torch

    cupti = _load(torch.version.cuda)
    with device.current(), contextlib.ExitStack() as stack:
        call()
        device.synchronize()
        context = _current_context()
        cupti("cuptiProfilerInitialize")
        # the status of what ends the profiler is ignored: an error of the call would be hidden
        stack.callback(cupti.status, "cuptiProfilerDeInitialize")
        chip = cupti("cuptiDeviceGetChipName", device=torch.cuda.current_device()).chip
        host = stack.enter_context(_host(cupti, chip))
        config = _configuration(cupti, host, chip, metrics)
        profiler = cupti("cuptiRangeProfilerEnable", context=context).profiler
        stack.callback(cupti.status, "cuptiRangeProfilerDisable", profiler=profiler)
        names = {"metrics": _names(metrics), "count": len(metrics)}
        function = "cuptiRangeProfilerGetCounterDataSize"
        size = cupti(function, profiler=profiler, max_ranges=1, max_nodes=1, **names).bytes
        image = ctypes.create_string_buffer(size)
        data = {"bytes": size, "image": ctypes.addressof(image)}
        cupti("cuptiRangeProfilerCounterDataImageInitialize", profiler=profiler, **data)
        shape = {"range": _USER_RANGE, "replay": _USER_REPLAY, "max_ranges": 1}
        levels = {"levels": 1, "min_level": 1, "target_level": 1}
        configured = {"config": ctypes.addressof(config), "config_bytes": len(config)}
        function = "cuptiRangeProfilerSetConfig"
        cupti(function, profiler=profiler, **configured, **data, **shape, **levels)
        is_last_pass = False
        while not is_last_pass:
            if flush:
                flush()
            device.synchronize()
            cupti("cuptiRangeProfilerStart", profiler=profiler)
            cupti("cuptiRangeProfilerPushRange", profiler=profiler, name=b"call")
            call()
            device.synchronize()
            cupti("cuptiRangeProfilerPopRange", profiler=profiler)
            is_last_pass = cupti("cuptiRangeProfilerStop", profiler=profiler).is_last_pass
        cupti("cuptiRangeProfilerDecodeData", profiler=profiler)
        values = (ctypes.c_double * len(metrics))()
        results = {"values": ctypes.addressof(values)}
        cupti("cuptiProfilerHostEvaluateToGpuValues", host=host, **data, **names, **results)
    pairs = zip(metrics, values, strict=True)
    return {metric: value for metric, value in pairs if math.isfinite(value)}


def flusher(device: Any) -> Callable[[], object]:
    """Return a function that evicts all data from the L2 cache of a ``CudaDevice``'s GPU.

    It only reads: written lines would go to memory during the call, and be counted there.
    """
    import torch

    with device.current():
        numbers = torch.zeros(_FLUSHED_L2 * device.gpu.l2_bytes // 4, device=device.torch_device)
    evict: Callable[[], object] = numbers.max
    return evict


def key(claim: str, arm: str, code: str, metrics: Sequence[str], gpu: Gpu) -> str:
    """Return the cache key of an arm's metrics.

    ``code`` is the hash of the claim's code. Kernels change with the compiler's version, too, and
    those of libraries with torch's.
    """
    tools = [metadata.version("torch")]
    with contextlib.suppress(metadata.PackageNotFoundError):
        tools.append(metadata.version("triton"))
    with contextlib.suppress(BuildError):
        tools.append(find_nvcc()[1])
    parts = [claim, arm, code, gpu.key, gpu.driver, *tools, *sorted(metrics)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cached(key: str) -> dict[str, float] | None:
    """Return the values that were kept under a key; None if there are none."""
    path = _file(key)
    try:
        values = loads(path.read_text(encoding="utf-8"), path.name)
        valid = all(type(value) is float for value in values.values())
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return dict(values) if valid else None


def keep(key: str, values: Mapping[str, float]) -> None:
    """Keep values in the user's cache folder; without one, the next run reads them again."""
    with contextlib.suppress(UsageError):
        atomic_write(_file(key), dumps(dict(values), "counters"))


def _file(key: str) -> Path:
    return default_cache() / "counters" / f"{key}.json"


class _Cupti:
    """Calls functions of CUPTI, each with one structure, and raises ToolMissing if one fails."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, function: str, **values: Any) -> Any:
        status, parameters = self.status(function, **values)
        if status:
            text = ctypes.c_char_p()
            self._library.cuptiGetResultString(status, ctypes.byref(text))
            name = (text.value or b"an unknown error").decode()
            reason = _REASONS.get(status, f"{function} returned {status} ({name})")
            raise ToolMissing(f"CUPTI cannot read counters here: {reason}")
        return parameters

    def status(self, function: str, **values: Any) -> tuple[int, Any]:
        """Call a function; return its status and the structure with its results."""
        declarations = f"size own_size, pointer private, {_FUNCTIONS[function]}"
        pairs = [field.split() for field in declarations.split(",") if field.strip()]
        fields = [(name, _TYPES[kind]) for kind, name in pairs]
        structure = type(function, (ctypes.Structure,), {"_fields_": fields})
        last = getattr(structure, fields[-1][0])
        # CUPTI's size of a structure ends with its last field, without padding
        parameters: Any = structure(own_size=last.offset + last.size, **values)
        try:
            call = getattr(self._library, function)
        except AttributeError:
            raise ToolMissing(
                f"this CUPTI has no {function}: install torch for CUDA 12.6 or newer"
            ) from None
        return call(ctypes.byref(parameters)), parameters


def _load(cuda: str | None) -> _Cupti:
    """Load the CUPTI that torch's profiler uses: a process can have only one."""
    name = f"libcupti.so.{(cuda or '').partition('.')[0]}"
    try:
        return _Cupti(ctypes.CDLL(name))
    except OSError as error:
        raise ToolMissing(f"counters need CUPTI, which torch for CUDA brings: {error}") from None


def _current_context() -> int | None:
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return context.value


@contextlib.contextmanager
def _host(cupti: _Cupti, chip: bytes) -> Iterator[int]:
    """Create the object that schedules metrics and computes them from raw counters."""
    host = cupti("cuptiProfilerHostInitialize", chip=chip).host
    try:
        yield host
    finally:
        cupti.status("cuptiProfilerHostDeinitialize", host=host)


def _configuration(
    cupti: _Cupti, host: int, chip: bytes, metrics: Sequence[str]
) -> ctypes.Array[Any]:
    """Schedule the metrics; return the configuration of the GPU's counters."""
    add = "cuptiProfilerHostConfigAddMetrics"
    for metric in metrics:
        # one object per metric: an error has no name, and metrics added later need passes of theirs
        with _host(cupti, chip) as single:
            status, _ = cupti.status(add, host=single, metrics=_names([metric]), count=1)
        if status in _BAD_NAMES:
            raise CaptureFailed(
                f"{chip.decode()} has no counter {metric!r}: ncu --query-metrics lists the names, "
                "to which a suffix such as .sum belongs; launch__ figures are ncu's own"
            )
    cupti(add, host=host, metrics=_names(metrics), count=len(metrics))
    size = cupti("cuptiProfilerHostGetConfigImageSize", host=host).bytes
    image = ctypes.create_string_buffer(size)
    cupti("cuptiProfilerHostGetConfigImage", host=host, bytes=size, image=ctypes.addressof(image))
    return image


def _names(metrics: Sequence[str]) -> Any:
    texts = (ctypes.c_char_p * len(metrics))(*[metric.encode() for metric in metrics])
    return ctypes.cast(texts, ctypes.c_void_p)  # keeps the array alive
