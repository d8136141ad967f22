"""The limits of this very GPU: measured once for each GPU, driver and torch, and kept on disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.build import nvcc
from pytest_aiperf.device.device import Device
from pytest_aiperf.errors import AiperfError, BuildError, UsageError
from pytest_aiperf.model import Gpu
from pytest_aiperf.records.results import atomic_write, dumps, loads
from pytest_aiperf.rules.datasheet import DATASHEET
from pytest_aiperf.rules.roofline import unit_of
from pytest_aiperf.rules.validity import round_problem
from pytest_aiperf.schema import to_json
from pytest_aiperf.text import si

from . import interconnect, microbenchmarks

DEVICE: Final = (
    *("copy", "read", "l2", "shared", "fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"),
    *("launch", "graph_launch"),
)
"""What claims need to know of their GPU."""
HOST: Final = ("h2d", "d2h", "h2d_pageable", "d2h_pageable")
LINKS: Final = interconnect.NAMES

SayLine = Callable[[str], object]

_KERNELS: Final = Path(__file__).with_name("ceilings.cu")


def known(
    clock: Device,
    names: Sequence[str] = DEVICE,
    say: SayLine = lambda _: None,
    *,
    fresh: bool = False,
) -> dict[str, float]:
    """Return the ceilings of a clock's GPU; what is not known yet, or ``fresh``, is measured.

    Bytes or operations a second, and the seconds of a launch; what cannot be measured here is
    left out. To be called with the GPU to oneself: measuring takes some ten seconds.
    """
    assert clock.gpu is not None
    measure = functools.partial(_measured, clock, say)
    return _kept([clock.gpu], names, measure, fresh, say)


def remembered(gpu: Gpu) -> dict[str, float]:
    """Return what is known of a GPU's ceilings; nothing is measured."""
    return _read(*_place([gpu]))


def known_links(
    gpus: Sequence[Gpu],
    say: SayLine = lambda _: None,
    *,
    fresh: bool = False,
) -> dict[str, float]:
    """Return how fast several GPUs reach each other; they are all the visible ones."""

    def measure(_: Sequence[str]) -> dict[str, float]:
        say(f"measuring the links of {len(gpus)} GPUs")
        return interconnect.measure(len(gpus))

    return _kept(gpus, LINKS, measure, fresh, say)


def _kept(
    gpus: Sequence[Gpu],
    names: Sequence[str],
    measure: Callable[[Sequence[str]], Mapping[str, float]],
    fresh: bool,
    say: SayLine,
) -> dict[str, float]:
    path, stands = _place(gpus)
    found = _read(path, stands)
    if missing := [name for name in names if fresh or name not in found]:
        found |= measure(missing)
        try:
            atomic_write(path, dumps({**stands, "ceilings": found}, "ceilings"))
        except UsageError as why:
            say(f"measured anew the next time: {why}")
    return {name: found[name] for name in names if name in found}


def _place(gpus: Sequence[Gpu]) -> tuple[Path, dict[str, str]]:
    """Return the file of GPUs' ceilings, and what these must have been measured with."""
    uuids = "+".join(gpu.uuid for gpu in gpus)
    if len(gpus) > 1:  # of many, a file's name would become too long
        uuids = f"{len(gpus)}-{hashlib.sha256(uuids.encode()).hexdigest()[:16]}"
    name = f"{uuids}-{gpus[0].driver}.json".replace("/", "_")
    # another torch brings another cuBLAS, and our own ways to measure change as well
    stands = {"torch": metadata.version("torch"), "methods": _methods()}
    return nvcc.default_cache() / "ceilings" / name, stands


def _read(path: Path, stands: Mapping[str, str]) -> dict[str, float]:
    """Read what is known; a file that is torn, or of another stand, says nothing."""
    try:
        content = loads(path.read_text(encoding="utf-8"), path.name)
        found = content.pop("ceilings")
        sound = all(type(figure) is float and figure > 0 for figure in found.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return dict(found) if sound and content == stands else {}


@functools.cache
def _methods() -> str:
    digest = hashlib.sha256()
    for file in (_KERNELS, Path(microbenchmarks.__file__), Path(interconnect.__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _measured(clock: Device, say: SayLine, names: Sequence[str]) -> dict[str, float]:
    import torch

    assert clock.gpu is not None
    clock.release()
    sizes = microbenchmarks.Sizes.of(clock.gpu, torch.cuda.mem_get_info()[0])
    ways = microbenchmarks.Microbenchmarks(clock, sizes, _kernels(clock.gpu, say)).ways
    found = {}
    for name in names:
        if name not in ways:
            continue
        say(f"measuring this GPU's ceilings: {name}")
        try:
            figure = _undisturbed(clock, ways[name]) or _undisturbed(clock, ways[name])
        except (RuntimeError, AiperfError) as why:  # it costs one ceiling, and no claim
            say(f"{name} is not measured: {str(why).partition(chr(10))[0]}")
            continue
        finally:
            clock.release()
        if figure:
            found[name] = figure
        else:
            say(f"{name} is not measured: the GPU was slowed down meanwhile")
    return found


def _undisturbed(clock: Device, way: Callable[[], float]) -> float | None:
    # the clock itself may change: it is higher under light work
    before = replace(clock.telemetry(), sm_mhz=None)
    figure = way()
    return None if round_problem(before, replace(clock.telemetry(), sm_mhz=None)) else figure


def _kernels(gpu: Gpu, say: SayLine) -> Mapping[str, Callable[..., object]] | None:
    try:
        kernels = nvcc.Nvcc([_KERNELS.parent], [gpu.arch])(_KERNELS.name)
    except BuildError as why:
        say(f"only what libraries reach is measured: {str(why).partition(chr(10))[0]}")
        return None
    return {name: kernels[name] for name in kernels}


def table(ceilings: Mapping[str, float], key: str) -> list[str]:
    """Lay ceilings out beside what the datasheet of a GPU key promises."""
    promised = DATASHEET.get(key, {})
    lines = [f"{'ceiling':<16}{'measured':>16}{'datasheet':>16}{'share':>8}"]
    for name, figure in ceilings.items():
        unit = unit_of(name)
        line = f"{name:<16}{si(figure, unit):>16}"
        if name in promised:
            share = f"{100 * figure / promised[name]:.0f} %"
            line += f"{si(promised[name], unit):>16}{share:>8}"
        lines.append(line)
    return lines


def record(gpu: Gpu, ceilings: Mapping[str, float]) -> dict[str, Any]:
    """Make ceilings into what is shared: what GPU it was, never which one."""
    about = {"gpu": to_json(replace(gpu, uuid="")), "torch": metadata.version("torch")}
    return {**about, "ceilings": dict(ceilings)}
