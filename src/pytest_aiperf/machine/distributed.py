"""The processes that share one measurement: a multi-GPU claim has one rank per GPU."""

import os
import sys
from typing import Any, Final

VARIABLE: Final = "PYTEST_AIPERF_RANKS"  #: Environment variable that holds a rank's job as JSON.


class RankGroup:
    """The ranks of a claim; this base class is a group of one process."""

    rank = 0
    count = 1

    def all(self, flag: bool) -> bool:
        """Return whether the flag is true in every rank, so that ranks leave a loop together."""
        return flag

    def max(self, figure: float) -> float:
        """Return the largest of all ranks' figures."""
        return figure

    def agree(self, number: int) -> bool:
        """Whether all ranks have passed the same number, of less than 2**53."""
        return self.max(float(number)) == -self.max(-float(number))

    def barrier(self) -> None:
        """Wait on the host until all ranks have called this."""

    def stream_barrier(self) -> None:
        """Make the current stream wait on the GPU for the streams of all ranks."""


class TorchRankGroup(RankGroup):
    """The ranks that torchrun started; they communicate through torch.distributed."""

    def __init__(self, device: str) -> None:
        """Join the group: arms communicate over NCCL, the harness over gloo."""
        import torch
        import torch.distributed as dist

        self._torch: Any = torch
        self._dist: Any = dist
        if device == "cuda":
            local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(local)
            dist.init_process_group("nccl", device_id=local)
            self._zero = torch.zeros(1, device=local)
        else:
            dist.init_process_group("gloo")
        # a separate group, because the harness's collectives must put no work on the GPU
        self._host_group = dist.new_group(backend="gloo")
        self.rank = int(dist.get_rank())
        self.count = int(dist.get_world_size())

    def all(self, flag: bool) -> bool:
        return self.max(0.0 if flag else 1.0) == 0.0

    def max(self, figure: float) -> float:
        value = self._torch.tensor([figure], dtype=self._torch.float64)
        self._dist.all_reduce(value, self._dist.ReduceOp.MAX, group=self._host_group)
        return float(value)

    def barrier(self) -> None:
        self.max(0.0)  # dist.barrier() would allocate GPU memory

    def stream_barrier(self) -> None:
        self._dist.all_reduce(self._zero)


def leave() -> None:
    """Leave the group, if this process has joined one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
