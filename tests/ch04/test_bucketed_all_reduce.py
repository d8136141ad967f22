"""One all-reduce of a flat gradient bucket beats 250 all-reduces of small tensors.

An all-reduce costs the time of its bytes on the link plus a fixed cost per call (the alpha-beta
model): the host's work to start it, the synchronization of the ranks, and the steps of the
algorithm. A tensor of 64 KiB takes a fraction of a microsecond on NVLink, far less than the fixed
cost. In one flat buffer the same 16 MB pay that cost once. DistributedDataParallel calls this
gradient bucketing, Horovod tensor fusion.

"copied" copies the gradients into the bucket and back. Much of the time that remains is host time
again: both copies take lists of 250 tensors. In "views", the gradients are views of the bucket, as
in DistributedDataParallel with gradient_as_bucket_view, so that nothing is copied. The library arm
needs neither: torch's coalescing manager puts the 250 calls into one NCCL group, which NCCL runs as
one kernel. Both rungs beat it, because Python still makes its 250 calls one by one. The interval of
"views" is wide: most blocks of its calls take 0.10 to 0.16 ms per call, but a few up to 1.1; why
was not examined.

The limit is the link: each rank sends 2 (ranks - 1) / ranks times the bytes of the bucket. The gain
ends where the bytes of one tensor take longer than the fixed cost: a call takes 33 to 45 µs on two
H200s and 49 on two H100s, so by estimate from about ten megabytes on. There a bucket only delays
the reduction, which cannot begin before the bucket's last gradient is ready;
ch04/ddp_backward_overlap has several buckets for that reason.
"""

import pytest
import torch
import torch.distributed as dist

from pytest_aiperf import Bench, Compare, evidence


def rows(bench: Bench) -> torch.Tensor:
    torch.manual_seed(bench.seed * 100 + dist.get_rank())  # gradients differ between ranks
    count, size = bench.size(250, check=10), bench.size(16384, check=33)
    return torch.randn(count, size, device=bench.device)


def one_by_one(rows):
    gradients = rows.unbind()
    for gradient in gradients:
        dist.all_reduce(gradient)
    torch._foreach_div_(gradients, dist.get_world_size())


def copied(rows):
    gradients = rows.unbind()
    flat = torch.cat(gradients)
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    torch._foreach_copy_(gradients, flat.split([g.numel() for g in gradients]))


def views(rows):
    dist.all_reduce(rows)
    rows.div_(dist.get_world_size())


def coalesced(rows):
    gradients = rows.unbind()
    with dist._coalescing_manager():  # all_reduce_coalesced is deprecated
        for gradient in gradients:
            dist.all_reduce(gradient)
    torch._foreach_div_(gradients, dist.get_world_size())


def mean_in_fp64(rows):
    local = rows.double()
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return torch.stack(gathered).mean(0)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("rung", [copied, views], ids=["copied", "views"])
def test_bucketed_all_reduce(compare: Compare, rung) -> None:
    compare(
        baseline=one_by_one,
        optimized=rung,
        library=coalesced,
        inputs=rows,
        reference=mean_in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(max=0.1, per="baseline")],
    )
