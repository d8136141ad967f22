"""The processes that share one measurement: a claim of several GPUs has one a rank."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

VARIABLE: Final = "PYTEST_AIPERF_RANKS"
"""Environment variable that tells a rank, as JSON, what it is part of."""


class RankGroup:
    """What the ranks of a claim decide together; here one process, which agrees with itself."""

    rank = 0
    count = 1

    def all(self, told: bool) -> bool:
        """Whether every rank says so: loops that call an arm must end in all ranks at once."""
        return told

    def max(self, figure: float) -> float:
        """Return the largest of all ranks' figures."""
        return figure

    def barrier(self) -> None:
        """Wait on the host until all ranks are here."""

    def stream_barrier(self) -> None:
        """Make the current stream wait on the GPU until those of all ranks are here."""


class TorchRankGroup(RankGroup):
    """The ranks that torchrun started, over torch.distributed."""

    def __init__(self, device: str) -> None:
        """Join the others: NCCL moves what arms send, gloo what the harness says."""
        import torch
        import torch.distributed as dist

        self._torch: Any = torch
        self._dist: Any = dist
        if device == "cuda":
            local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(local)
            dist.init_process_group("nccl", device_id=local)
            self._mark = torch.zeros(1, device=local)
        else:
            dist.init_process_group("gloo")
        # apart from the arms' own group: asking must put nothing on the GPU
        self._host = dist.new_group(backend="gloo")
        self.rank = int(dist.get_rank())
        self.count = int(dist.get_world_size())

    def all(self, told: bool) -> bool:
        return self.max(0.0 if told else 1.0) == 0.0

    def max(self, figure: float) -> float:
        value = self._torch.tensor([figure], dtype=self._torch.float64)
        self._dist.all_reduce(value, self._dist.ReduceOp.MAX, group=self._host)
        return float(value)

    def barrier(self) -> None:
        self.max(0.0)  # not barrier(), which allocates on the GPU that the groups are bound to

    def stream_barrier(self) -> None:
        self._dist.all_reduce(self._mark)


def leave() -> None:
    """Leave the others, where this process has joined any."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
