"""Measure the limits of a GPU, once per driver and torch version, and keep them on disk."""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pytest_aiperf import text
from pytest_aiperf.build import nvcc
from pytest_aiperf.device.device import Device
from pytest_aiperf.errors import AiperfError, BuildError, UsageError
from pytest_aiperf.model import Gpu
from pytest_aiperf.records.results import atomic_write, dumps, loads
from pytest_aiperf.rules.roofline import DATASHEET, unit_of
from pytest_aiperf.rules.validity import round_problem
from pytest_aiperf.schema import to_json
from pytest_aiperf.text import percent, si

from . import interconnect, microbenchmarks

DEVICE: Final = (
    *("copy", "read", "l2", "shared", "fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"),
    *("launch", "graph_launch"),
)
"""GPU limits that the rooflines of claims use."""
HOST: Final = ("h2d", "d2h", "h2d_pageable", "d2h_pageable")
"""Limits of the transfers between host and GPU."""
LINKS: Final = interconnect.NAMES  #: Limits of the links between GPUs.
_REPEATED: Final = ("copy", "read")
"""Rates of device memory that are measured once more at the end; the higher rate is the limit. By
then, disturbances of some seconds, such as other programs that start on the GPU, have passed."""

ProgressLine = Callable[[str], object]  #: Callback that gets one line about the progress.

_KERNELS: Final = Path(__file__).with_name("ceilings.cu")


def get(
    device: Device,
    names: Sequence[str] = DEVICE,
    progress: ProgressLine = lambda _: None,
    *,
    fresh: bool = False,
) -> dict[str, float]:
    """Return the limits of a device's GPU; measure those missing, or all if ``fresh``.

    The units are bytes or operations per second, and seconds per launch. A limit that cannot be
    measured here is left out. Measuring takes about ten seconds and needs the exclusive lock.
    """
    assert device.gpu is not None
    measure = functools.partial(_measure, device, progress)
    return _get([device.gpu], names, measure, progress, fresh=fresh)


def cached(gpu: Gpu) -> dict[str, float]:
    """Return the limits of a GPU that are on disk; measure nothing."""
    return _read(*_location([gpu]))


def get_links(
    gpus: Sequence[Gpu], progress: ProgressLine = lambda _: None, *, fresh: bool = False
) -> dict[str, float]:
    """Return the link rates between ``gpus``, which must be all visible GPUs."""

    def measure(_: Sequence[str]) -> dict[str, float]:
        progress(f"measuring the links of {len(gpus)} GPUs")
        return interconnect.measure(len(gpus))

    return _get(gpus, LINKS, measure, progress, fresh=fresh)


def _get(
    gpus: Sequence[Gpu],
    names: Sequence[str],
    measure: Callable[[Sequence[str]], Mapping[str, float]],
    progress: ProgressLine,
    *,
    fresh: bool,
) -> dict[str, float]:
    path, versions = _location(gpus)
    ceilings = _read(path, versions)
    if missing := [name for name in names if fresh or name not in ceilings]:
        ceilings |= measure(missing)
        try:
            atomic_write(path, dumps({**versions, "ceilings": ceilings}, "ceilings"))
        except UsageError as why:
            progress(f"the limits are not kept: {why}")
    return {name: ceilings[name] for name in names if name in ceilings}


def _location(gpus: Sequence[Gpu]) -> tuple[Path, dict[str, str]]:
    """Return the file of these GPUs' limits, and the versions for which it is valid."""
    uuids = "+".join(gpu.uuid for gpu in gpus)
    if len(gpus) > 1:  # all UUIDs would make the file name too long
        uuids = f"{len(gpus)}-{hashlib.sha256(uuids.encode()).hexdigest()[:16]}"
    name = f"{uuids}-{gpus[0].driver}.json".replace("/", "_")
    # limits depend on torch, which brings its cuBLAS, and on the micro-benchmarks' code
    versions = {"torch": metadata.version("torch"), "methods": _benchmarks_hash()}
    return nvcc.default_cache() / "ceilings" / name, versions


def _read(path: Path, versions: Mapping[str, str]) -> dict[str, float]:
    """Read the limits in a file.

    Return {} if it is invalid, or was measured with another torch or other micro-benchmarks.
    """
    try:
        content = loads(path.read_text(encoding="utf-8"), path.name)
        ceilings = content.pop("ceilings")
        valid = all(type(rate) is float and rate > 0 for rate in ceilings.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return dict(ceilings) if valid and content == versions else {}


@functools.cache
def _benchmarks_hash() -> str:
    digest = hashlib.sha256()
    for file in (_KERNELS, Path(microbenchmarks.__file__), Path(interconnect.__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _measure(device: Device, progress: ProgressLine, names: Sequence[str]) -> dict[str, float]:
    assert device.gpu is not None
    device.release()
    sizes = microbenchmarks.Sizes.of(device.gpu, device.free_bytes())
    kernels = _kernels(device.gpu, progress)
    benchmarks = microbenchmarks.Microbenchmarks(device, sizes, kernels).benchmarks
    ceilings: dict[str, float] = {}
    for name in [name for name in (*names, *_REPEATED) if name in names]:
        if name not in benchmarks:
            continue
        progress(f"measuring this GPU's limits: {name}")
        run = benchmarks[name]
        try:
            rate = _run_undisturbed(device, run) or _run_undisturbed(device, run)
        except (RuntimeError, AiperfError) as why:  # the other limits can still be measured
            progress(f"{name} is not measured: {str(why).partition(chr(10))[0]}")
            continue
        finally:
            device.release()
        if rate:
            ceilings[name] = max(rate, ceilings.get(name, 0.0))
        elif name not in ceilings:
            progress(f"{name} is not measured: the GPU was throttled meanwhile")
    return ceilings


def _run_undisturbed(device: Device, benchmark: Callable[[], float]) -> float | None:
    """Run a micro-benchmark; return None if the GPU was throttled meanwhile."""
    # ignore the SM clock: even without throttling it changes with the load
    before = replace(device.telemetry(), sm_mhz=None)
    rate = benchmark()
    return None if round_problem(before, replace(device.telemetry(), sm_mhz=None)) else rate


def _kernels(gpu: Gpu, progress: ProgressLine) -> Mapping[str, Callable[..., object]] | None:
    try:
        kernels = nvcc.Nvcc([_KERNELS.parent], [gpu.arch])(_KERNELS.name)
    except BuildError as why:
        progress(f"only library calls are measured: {str(why).partition(chr(10))[0]}")
        return None
    return {name: kernels[name] for name in kernels}


def table(ceilings: Mapping[str, float], key: str) -> list[str]:
    """Return the lines of a table: limits beside the datasheet figures of a GPU key."""
    datasheet = DATASHEET.get(key, {})
    rows = [("limit", "measured", "datasheet", "share")]
    for name, rate in ceilings.items():
        unit, peak = unit_of(name), datasheet.get(name)
        cells = (si(peak, unit, 3), percent(rate / peak)) if peak else ("", "")
        rows.append((name, si(rate, unit, 3), *cells))
    return text.table(rows)


def record(gpu: Gpu, ceilings: Mapping[str, float]) -> dict[str, Any]:
    """Return limits as a record that can be published: with the GPU's model, not its UUID."""
    about = {"gpu": to_json(replace(gpu, uuid="")), "torch": metadata.version("torch")}
    return {**about, "ceilings": dict(ceilings)}
