"""How fast the GPUs of this machine reach each other: copies between two, collectives of all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.errors import InvalidMeasurement

NAMES: Final = ("p2p", "p2p_both", "all_reduce", "all_gather", "reduce_scatter")
_SIZE: Final = 1 << 30
_BLOCKS, _TIMES = 10, 4
_DEADLINE: Final = 120.0
_FOUND: Final = "found.json"


def measure(count: int) -> dict[str, float]:
    """Measure the first ``count`` visible GPUs, in processes of their own; bytes a second.

    Collectives give bus bandwidth: what each GPU sends and receives, whatever their number.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, str(count), folder]
        said = Path(folder, "said")
        with said.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            process.wait(_DEADLINE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # every rank
                process.wait()
        try:
            return dict(json.loads(Path(folder, _FOUND).read_text(encoding="utf-8")))
        except (OSError, ValueError) as why:
            lines = said.read_text(errors="replace").strip().splitlines() or ["nothing was said"]
            raise InvalidMeasurement(
                f"the links of {count} GPUs could not be measured (status {process.returncode}): "
                + lines[-1]
            ) from why


def bus_bytes(name: str, size: int, count: int) -> float:
    """Count the bytes that a GPU sends in a collective over ``size`` bytes in all."""
    part = size * (count - 1) / count
    return 2 * part if name == "all_reduce" else part


def _ranks(arguments: Sequence[str]) -> None:
    import torch.multiprocessing

    count, folder = arguments
    torch.multiprocessing.spawn(_rank, (int(count), folder), nprocs=int(count))


def _rank(rank: int, count: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    here = torch.device("cuda", rank)
    torch.cuda.set_device(here)
    found = _copies(torch) if rank == 0 and torch.cuda.can_device_access_peer(0, 1) else {}
    meeting = f"file://{folder}/meeting"  # the others wait there
    dist.init_process_group("nccl", meeting, rank=rank, world_size=count, device_id=here)
    elements = _SIZE // 2 // count * count
    whole = torch.randn(elements, device=here).bfloat16()
    part = whole[: elements // count].clone()
    calls = {  # the mean, so that values stay what they are
        "all_reduce": partial(dist.all_reduce, whole, dist.ReduceOp.AVG),
        "all_gather": partial(dist.all_gather_into_tensor, whole, part),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, dist.ReduceOp.AVG),
    }
    for name, call in calls.items():
        blocks = torch.tensor(_blocks(torch, call, [here]), device=here)
        dist.all_reduce(blocks, dist.ReduceOp.MAX)  # the slowest rank's
        found[name] = bus_bytes(name, whole.nbytes, count) / float(blocks.min())
    if rank == 0:
        Path(folder, _FOUND).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _copies(torch: Any) -> dict[str, float]:
    """Copy from the first GPU to the second, and both ways at once."""
    sides = [torch.device("cuda", i) for i in (0, 1)]
    bytes_on = partial(torch.randint, 255, (_SIZE,), dtype=torch.uint8)
    data = [[bytes_on(device=side) for side in sides] for _ in range(2)]
    streams = [[torch.cuda.Stream(side) for side in sides] for _ in range(2)]

    def copy(way: int) -> None:
        # a copy between GPUs waits for the current stream of each: every way has a pair of its own
        with torch.cuda.stream(streams[way][0]), torch.cuda.stream(streams[way][1]):
            data[way][1 - way].copy_(data[way][way], non_blocking=True)

    def both() -> None:
        copy(0)
        copy(1)

    one, two = (min(_blocks(torch, c, sides)) for c in (partial(copy, 0), both))
    return {"p2p": _SIZE / one, "p2p_both": 2 * _SIZE / two}


def _blocks(torch: Any, call: Callable[[], object], devices: Sequence[Any]) -> list[float]:
    """Return the seconds of one call in each block, from idle GPUs to idle GPUs."""
    found = []
    for _ in range(_BLOCKS):
        for device in devices:
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(_TIMES):
            call()
        for device in devices:
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - begun) / _TIMES)
    return found


if __name__ == "__main__":
    _ranks(sys.argv[1:])
