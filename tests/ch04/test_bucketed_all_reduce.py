"""One flat bucket of gradients is reduced faster than a thousand small tensors one by one.

An all-reduce costs its bytes over the link and what each call costs whatever its size: the host's
work to start it, finding the other ranks ready, the steps of the algorithm. At 64 KiB a tensor the
bytes take a fraction of a microsecond on NVLink, and a call takes 35. Most of that is the host's:
83 % of the baseline's time lies between kernels. Copied into one buffer, the same bytes pay once.

Both copies, into the bucket and back, are part of the optimized call, although the rows that stand
for the tensors here lie side by side already; frameworks save the second copy by letting gradients
be views of the bucket. What is left of the call is the host again, which lists a thousand tensors
for both copies: the link, the limit (bytes * 2 (ranks - 1) / ranks), needs 0.2 ms of its 3.4. The
gain ends where a tensor's bytes take longer than its call, from some tens of megabytes on; there a
bucket only delays the first byte.
"""

import pytest
import torch
import torch.distributed as dist

from pytest_aiperf import Bench, Compare, evidence


def rows(bench: Bench) -> torch.Tensor:
    torch.manual_seed(bench.seed * 100 + dist.get_rank())  # each rank has gradients of its own
    count, size = bench.size(1000, check=10), bench.size(16384, check=33)
    return torch.randn(count, size, device=bench.device)


def each(rows):
    gradients = rows.unbind()
    for gradient in gradients:
        dist.all_reduce(gradient)
    torch._foreach_div_(gradients, dist.get_world_size())


def bucket(rows):
    gradients = rows.unbind()
    flat = torch.cat(gradients)
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    torch._foreach_copy_(gradients, flat.split([g.numel() for g in gradients]))


def mean_in_fp64(rows):
    mine = rows.double()
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every).mean(0)


@pytest.mark.gpu(count=2)
def test_bucketed_all_reduce(compare: Compare) -> None:
    compare(
        baseline=each,
        optimized=bucket,
        inputs=rows,
        reference=mean_in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(most=0.1, per="baseline")],
    )
