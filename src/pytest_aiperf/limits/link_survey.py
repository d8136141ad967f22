"""Measure the links of a machine in detail: each pair of GPUs, and collectives from KiB to GiB."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pytest_aiperf import text
from pytest_aiperf.schema import from_json, to_json
from pytest_aiperf.text import si

from .interconnect import RANKS_FILE, bus_bytes, measure_in_ranks

COPY_BYTES: Final = 256 << 20  #: Bytes of a copy whose rate counts: latency is negligible.
SIZES: Final = tuple(1 << bits for bits in range(10, 31, 4))
"""Bytes of a collective, from 1 KiB, where latency counts, to 1 GiB, where bandwidth counts."""
_BLOCKS: Final = 5  #: Timed blocks per figure; the fastest counts.
_LARGE_BYTES: Final = 16 << 20  #: Above this size a call takes much longer than its launch.
_CALLS: Final = 20  #: Calls per block up to that size: in a queue, launches overlap with work.
_LARGE_CALLS: Final = 4  #: Calls per block above that size.
_DEADLINE_S: Final = 300.0
"""Time limit of the measuring processes: a collective waits forever if a rank is missing."""

Matrix = tuple[tuple[float, ...], ...]  #: A row per GPU, and a column per GPU.


@dataclass(frozen=True, slots=True)
class LinkSurvey:
    """Rates and latencies that were measured between the GPUs of a machine."""

    rates: Matrix
    """Bytes per second of a copy from the GPU of the row to that of the column; 0 on the diagonal,
    which is no link."""
    copy_bytes: int  #: Bytes of these copies.
    latencies: Matrix
    """Seconds from the call of a copy of 4 bytes until the host has waited for it."""
    collectives: Mapping[str, Mapping[str, float]]
    """Seconds per call of each collective, by its bytes."""


def survey(
    count: int,
    backend: str = "nccl",
    *,
    sizes: Sequence[int] = SIZES,
    copy_bytes: int = COPY_BYTES,
) -> LinkSurvey:
    """Measure the links between the first ``count`` visible GPUs, with one process per GPU.

    With another backend than NCCL, the processes measure copies and messages on the host.
    """
    options = json.dumps([backend, list(sizes), copy_bytes])
    read = partial(from_json, LinkSurvey)
    return measure_in_ranks(__name__, count, _DEADLINE_S, read, options)


def lines(found: LinkSurvey) -> list[str]:
    """Return tables of a survey: rates and latencies of pairs, times and rates of collectives."""
    names = [f"GPU {i}" for i in range(len(found.rates))]
    shown = []
    for title, matrix, unit in (
        (f"copies of {si(found.copy_bytes, 'B')} from row to column", found.rates, "B/s"),
        ("latency of a copy of 4 bytes, with the host's wait for it", found.latencies, "s"),
    ):
        rows = [["", *names]]
        for name, row in zip(names, matrix, strict=True):
            rows.append([name, *(si(figure, unit, 3) if figure else "-" for figure in row)])
        shown += ["", title, *text.table(rows)]
    heads = [cell for name in found.collectives for cell in (name, "bus")]
    rows = [["bytes", *heads]]
    for size in next(iter(found.collectives.values()), {}):
        cells = [si(int(size), "B")]
        for name, seconds in found.collectives.items():
            rate = bus_bytes(name, int(size), len(names)) / seconds[size]
            cells += [si(seconds[size], "s", 3), si(rate, "B/s", 3)]
        rows.append(cells)
    title = f"collectives over {len(names)} GPUs: time per call, and bytes that each GPU sends"
    return [*shown, "", title, *text.table(rows)]


def _rank(rank: int, count: int, folder: str, options: str) -> None:
    import torch
    import torch.distributed as dist

    backend, sizes, copy_bytes = json.loads(options)
    on_gpu = backend == "nccl"
    devices = [torch.device("cuda", i) if on_gpu else torch.device("cpu") for i in range(count)]
    if on_gpu:
        torch.cuda.set_device(devices[rank])
    rates, latencies = _pairs(torch, devices, copy_bytes) if rank == 0 else ((), ())
    # the other ranks wait in init_process_group until rank 0 has measured the pairs
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=count)
    collectives: dict[str, dict[str, float]] = {}
    for size in sizes:
        elements = size // 4 // count * count
        whole = torch.randn(elements, device=devices[rank])
        part = whole[: elements // count].clone()
        calls = {  # the maximum, because sums would overflow
            "all_reduce": partial(dist.all_reduce, whole, dist.ReduceOp.MAX),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, dist.ReduceOp.MAX),
        }
        for name, call in calls.items():
            number = _CALLS if size <= _LARGE_BYTES else _LARGE_CALLS
            blocks = torch.tensor(_blocks(torch, call, devices[rank:][:1], number))
            blocks = blocks.to(devices[rank])
            dist.all_reduce(blocks, dist.ReduceOp.MAX)  # the slowest rank counts
            collectives.setdefault(name, {})[str(whole.nbytes)] = float(blocks.min())
    if rank == 0:
        found = to_json(LinkSurvey(rates, copy_bytes, latencies, collectives))
        Path(folder, RANKS_FILE).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _pairs(torch: Any, devices: Sequence[Any], copy_bytes: int) -> tuple[Matrix, Matrix]:
    """Measure the rate and the latency of copies between each two devices, both ways."""

    def best_s(source: int, target: int, size: int, calls: int) -> float:
        pair = [devices[source], devices[target]]
        data = torch.randint(255, (size,), dtype=torch.uint8, device=pair[0])
        copied = torch.empty(size, dtype=torch.uint8, device=pair[1])
        return min(_blocks(torch, lambda: copied.copy_(data, non_blocking=True), pair, calls))

    n = range(len(devices))
    rates = tuple(
        tuple(copy_bytes / best_s(a, b, copy_bytes, _LARGE_CALLS) if a != b else 0.0 for b in n)
        for a in n
    )
    # one call per block: in a queue, copies would hide each other's latency
    return rates, tuple(tuple(best_s(a, b, 4, 1) if a != b else 0.0 for b in n) for a in n)


def _blocks(
    torch: Any, call: Callable[[], object], devices: Sequence[Any], calls: int
) -> list[float]:
    """Return the seconds per call of each block, after one that warms up; GPUs idle in between."""
    seconds = []
    for _ in range(_BLOCKS + 1):
        _synchronize(torch, devices)
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        _synchronize(torch, devices)
        seconds.append((time.perf_counter() - begun) / calls)
    return seconds[1:]


def _synchronize(torch: Any, devices: Sequence[Any]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


if __name__ == "__main__":
    import torch.multiprocessing

    arguments = (int(sys.argv[1]), *sys.argv[2:])
    torch.multiprocessing.spawn(_rank, arguments, nprocs=int(sys.argv[1]))
