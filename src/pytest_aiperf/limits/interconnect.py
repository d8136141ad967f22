"""Measure the rates between GPUs: copies between two, collectives over all."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from pytest_aiperf.errors import InvalidMeasurement
from pytest_aiperf.machine.process_group import run_in_group

T = TypeVar("T")

NAMES: Final = ("p2p", "p2p_both", "all_reduce", "all_gather", "reduce_scatter")
"""Names of the measured rates."""
_SIZE: Final = 1 << 30  #: Bytes per copy or collective: large enough to make latency negligible.
_BLOCKS: Final = 10  #: Timed blocks per rate; the fastest counts.
_CALLS: Final = 4  #: Calls per block.
_DEADLINE_S: Final = 120.0
"""Time limit of the measuring processes: a collective waits forever if a rank is missing."""
RANKS_FILE: Final = "measured.json"  #: File to which rank 0 writes what was measured.


def measure(count: int) -> dict[str, float]:
    """Measure the rates between the first ``count`` visible GPUs, in bytes per second.

    One process per GPU measures. The rate of a collective is its bus bandwidth: the bytes per
    second that each GPU sends, which is comparable across GPU counts.
    """
    return measure_in_ranks(__name__, count, _DEADLINE_S, dict)


def measure_in_ranks(
    module: str, count: int, deadline_s: float, read: Callable[[Any], T], *options: str
) -> T:
    """Run a module that starts one process per GPU; return what ``read`` makes of its results.

    The module's arguments are the number of GPUs, a folder for :data:`RANKS_FILE`, and ``options``.

    Raises:
        InvalidMeasurement: The module left no results, or ``read`` refuses them.

    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, str(count), folder, *options]
        log = Path(folder, "log")
        status = run_in_group(command, log, deadline_s)
        try:
            return read(json.loads(Path(folder, RANKS_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError) as why:
            end = f"status {status}" if status is not None else f"killed after {deadline_s:g} s"
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise InvalidMeasurement(
                f"the links of {count} GPUs could not be measured ({end}): {lines[-1]}"
            ) from why


def bus_bytes(name: str, size: int, count: int) -> float:
    """Return the bytes that each GPU sends in a collective over ``size`` bytes."""
    part = size * (count - 1) / count
    return 2 * part if name == "all_reduce" else part


def _rank(rank: int, count: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    rates = _copies(torch) if rank == 0 and torch.cuda.can_device_access_peer(0, 1) else {}
    # the other ranks wait in init_process_group until rank 0 has measured the copies
    store = f"file://{folder}/store"
    dist.init_process_group("nccl", store, rank=rank, world_size=count, device_id=device)
    elements = _SIZE // 2 // count * count
    whole = torch.randn(elements, device=device).bfloat16()
    part = whole[: elements // count].clone()
    calls = {  # AVG, because repeated sums would overflow
        "all_reduce": partial(dist.all_reduce, whole, dist.ReduceOp.AVG),
        "all_gather": partial(dist.all_gather_into_tensor, whole, part),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, dist.ReduceOp.AVG),
    }
    for name, call in calls.items():
        blocks = torch.tensor(_blocks(torch, call, [device]), device=device)
        dist.all_reduce(blocks, dist.ReduceOp.MAX)  # the slowest rank counts
        rates[name] = bus_bytes(name, whole.nbytes, count) / float(blocks.min())
    if rank == 0:
        Path(folder, RANKS_FILE).write_text(json.dumps(rates), encoding="utf-8")
    dist.destroy_process_group()


def _copies(torch: Any) -> dict[str, float]:
    """Measure copies from the first GPU to the second, and in both directions at once."""
    devices = [torch.device("cuda", i) for i in (0, 1)]
    bytes_on = partial(torch.randint, 255, (_SIZE,), dtype=torch.uint8)
    data = [[bytes_on(device=device) for device in devices] for _ in range(2)]
    streams = [[torch.cuda.Stream(device) for device in devices] for _ in range(2)]

    def copy(source: int) -> None:
        # copy_ synchronizes with the current streams of both GPUs: with a pair of streams per
        # direction, the two copies can overlap
        with torch.cuda.stream(streams[source][0]), torch.cuda.stream(streams[source][1]):
            data[source][1 - source].copy_(data[source][source], non_blocking=True)

    def both() -> None:
        copy(0)
        copy(1)

    one_way_s, both_s = (min(_blocks(torch, c, devices)) for c in (partial(copy, 0), both))
    return {"p2p": _SIZE / one_way_s, "p2p_both": 2 * _SIZE / both_s}


def _blocks(torch: Any, call: Callable[[], object], devices: Sequence[Any]) -> list[float]:
    """Return the seconds per call of each block; the GPUs are idle before and after a block."""
    seconds = []
    for _ in range(_BLOCKS):
        for device in devices:
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(_CALLS):
            call()
        for device in devices:
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - begun) / _CALLS)
    return seconds


if __name__ == "__main__":
    import torch.multiprocessing

    torch.multiprocessing.spawn(_rank, (int(sys.argv[1]), sys.argv[2]), nprocs=int(sys.argv[1]))
