"""A one-shot all-reduce over symmetric memory beats NCCL on a small tensor.

Symmetric memory is mapped into every rank's address space. In a one-shot all-reduce each rank
signals, reads the other ranks' buffers over NVLink and adds them up, all in one kernel and one hop.
NCCL's ring algorithm and channels are built for bandwidth and take several dependent steps.

Both arms copy the tensor first: one-shot reads symmetric memory only, and `all_reduce` overwrites
its input. The copies are part of both times and hide part of the difference on the device. If the
input may be overwritten, NCCL needs no copy. Wall time also includes the host's work per call,
where one-shot gains more.

One-shot moves (ranks - 1) times the tensor into each rank; a ring moves 2 (ranks - 1) / ranks of
it, in dependent steps. With 2 ranks the bytes are equal. With 8 ranks one-shot moves 4 times as
many, and the ring wins for tensors above some megabytes.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from pytest_aiperf import Bench, Compare, evidence, prepared


def megabyte(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(bench.seed * 100 + dist.get_rank())
    x = torch.randn(bench.size(1 << 19, check=64), device=bench.device, dtype=torch.bfloat16)
    return x, torch.empty_like(x)


def nccl(x, out):
    out.copy_(x)
    dist.all_reduce(out)


@prepared
def one_shot(x, out):
    group = dist.group.WORLD.group_name
    shared = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    symmetric.rendezvous(shared, group)

    def run(x, out):
        shared.copy_(x)
        torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", group, out)

    return run


def sum_in_fp64(x, out):
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x)
    return torch.stack(gathered).double().sum(0)


@pytest.mark.gpu(count=2, cpu=False)
def test_symm_mem_all_reduce(compare: Compare) -> None:
    compare(
        baseline=nccl,
        optimized=one_shot,
        against="library",
        inputs=megabyte,
        reference=sum_in_fp64,
        metric=("device", "wall"),
        cache="warm",
        evidence=[evidence.kernel_name("one_shot_all_reduce")],
    )
