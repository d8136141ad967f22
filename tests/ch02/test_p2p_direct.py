"""Sending a tensor to another GPU over NVLink beats staging it in pinned host memory.

Each GPU sends 256 MiB to the next and receives as much. "staged" goes the way that is open where
GPUs cannot reach each other: a copy into pinned host memory that both processes have mapped, and a
second one from there. So all bytes cross PCIe twice, one direction after the other: at 55 GB/s
each way, that is 9.8 ms. NCCL lets the GPUs write into each other's memory, both at once. Over the
NVLink of an H200, a copy in one direction reaches 392 GB/s, and copies in both directions at once
773 GB/s together, so 0.7 ms are the limit.

Nothing waits on the host in either arm: one-element all-reduces keep the ranks in step, in the
order of the stream. A staging copy in chunks could overlap both directions of PCIe and take half as long;
that is not a rung. Nor does the comparison hold for GPUs that are connected by PCIe alone, where
direct copies cross it once instead of twice.
"""

import os
from functools import cache

import pytest
import torch
import torch.distributed as dist

from pytest_aiperf import Bench, Compare, evidence, prepared


def message(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw what this rank sends; make room for what it receives."""
    torch.manual_seed(bench.seed * 100 + dist.get_rank())
    x = torch.randn(bench.size(2**26, check=1000), device=bench.device)
    return x, torch.empty_like(x)


def neighbours() -> tuple[int, int]:
    """Return the ranks to send to and to receive from."""
    rank, count = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % count, (rank - 1) % count


@cache
def host_buffers(count: int, pinned: bool) -> list[torch.Tensor]:
    """Return host memory for ``count`` floats of each rank, mapped by all of them."""
    own = os.memfd_create("staging")
    os.ftruncate(own, 4 * count)
    files: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(files, f"/proc/{os.getpid()}/fd/{own}")
    buffers = [torch.from_file(name, shared=True, size=count) for name in files]
    dist.barrier()  # all have opened it
    os.close(own)
    for buffer in buffers if pinned else ():
        status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
        torch.cuda.check_error(int(status))
    return buffers


@prepared
def staged(x, _out):
    buffers = host_buffers(len(x), x.is_cuda)
    _, source = neighbours()
    token = x.new_zeros(1)

    def run(x, out):
        buffers[dist.get_rank()].copy_(x, non_blocking=True)
        dist.all_reduce(token)  # all have copied theirs
        out.copy_(buffers[source], non_blocking=True)
        dist.all_reduce(token)  # nobody reads any more what the next call overwrites

    return run


def direct(x, out):
    target, source = neighbours()
    operations = [dist.P2POp(dist.isend, x, target), dist.P2POp(dist.irecv, out, source)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()


def sent_by_the_source(x, _out):
    everything = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, x)
    return everything[neighbours()[1]]


@pytest.mark.gpu(count=2)
def test_p2p_direct(compare: Compare) -> None:
    compare(
        baseline=staged,
        optimized=direct,
        inputs=message,
        reference=sent_by_the_source,
        evidence=[
            evidence.copied_bytes("device to host", max=0),
            evidence.copied_bytes("host to device", max=0),
        ],
    )
