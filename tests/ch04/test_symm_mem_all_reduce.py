"""Two-shot all-reduce beats NCCL, which beats one-shot; where the host binds, one-shot beats NCCL.

In a tensor-parallel layer whose weight is split along its inner dimension (row-parallel), each rank
computes a partial sum of the whole output, and an all-reduce adds them up. Symmetric memory is
mapped into every rank's address space. If the GEMM writes its partial sum there, the other ranks
read it directly over NVLink, and nothing is copied. In a one-shot all-reduce each rank reads all
partial sums and adds them, in one kernel and one hop. In a two-shot one, each rank adds up one part
and writes the sum to all ranks: two hops, but fewer bytes if there are more than two ranks, and the
sum needs no other buffer.

The layer is the output projection of Llama 3 8B's attention, split over two GPUs: 8 tokens (64 KiB)
and 256 tokens (2 MiB) are steps of decoding, 4096 tokens (32 MiB) are a prefill. All arms run the
same GEMM, which is part of all times and brings the ratios closer to 1, and weights may stay in the
L2 cache; read from memory, they would add the same time to all. NCCL's GEMM writes to ordinary
memory, which NCCL reduces in place.

At 2 and 32 MiB device time is judged, as in a CUDA graph. The evidence is the name of the kernel
that reduces: it shows which one ran, not why it is faster. On two H200s, the kernel of two-shot
takes 15 µs for 2 MiB, and NCCL's 26; for 32 MiB they take 111 and 133. That is at most 302 GB/s in
each direction. The limit is the link, since on two ranks each sends as many bytes as the tensor
has, whichever algorithm runs; so a count of NVLink's bytes would not tell the arms apart. At 32
MiB, one-shot's kernel takes 191 µs on H200s and is the naive choice, since two-shot is the best
there; so NCCL is the optimized arm of this case. Possible reasons, not tested apart: like two-shot
it has at most 24 blocks, but half as many threads in each, and it only reads over the link, where
two-shot reads half of the bytes and writes half. One-shot was not measured at 2 MiB.

At 64 KiB the host is the limit, and wall time without a graph is judged: in three runs on two H200s
a call took 73, 81 and 105 µs with NCCL, and 35, 45 and 51 with one-shot, depending on how fast the
host launches. In a CUDA graph, which takes the host out of the loop, it takes 15 and 14 µs. For a
call, NCCL and PyTorch's process group make 14 calls of CUDA; one-shot makes two, one for the GEMM
and one for the sum. How much of the gain these calls are, and how much the Python code of
`dist.all_reduce` and the process group's own work, was not measured apart. A CUDA graph leaves no
sure winner: in an earlier run on two H100s, NCCL was a little faster in it. Nor is there a gain
where the GPU needs longer than the host. The device time is recorded beside.

NCCL 2.27 and later has such kernels, too, for buffers that are registered with it as symmetric
windows; they are not measured here. Kernels that reduce in the NVLink switch (multimem, NVLS) need
multicast memory, and are left out as well.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from pytest_aiperf import Bench, Compare, evidence, prepared


def projection(tokens: int):
    def inputs(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(bench.seed * 100 + dist.get_rank())  # each rank has its own shard
        rows, shard, width = bench.size(tokens, check=3), 2048, 4096
        options = {"device": bench.device, "dtype": torch.bfloat16}
        weight = torch.randn(shard, width, **options) * shard**-0.5
        return torch.randn(rows, shard, **options), weight

    return inputs


@prepared
def nccl(x, weight):
    out = x.new_empty(len(x), weight.shape[1])

    def run(x, weight):
        torch.mm(x, weight, out=out)
        dist.all_reduce(out)
        return out

    return run


def in_symmetric_memory(all_reduce: str):
    @prepared
    def arm(x, weight):
        operator = getattr(torch.ops.symm_mem, all_reduce)
        group = dist.group.WORLD.group_name
        partial_sum = symmetric.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)
        symmetric.rendezvous(partial_sum, group)

        def run(x, weight):
            torch.mm(x, weight, out=partial_sum)
            return operator(partial_sum, "sum", group)

        return run

    return arm


def in_fp64(x, weight):
    partial_sum = x.double() @ weight.double()
    gathered = [torch.empty_like(partial_sum) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, partial_sum)
    return torch.stack(gathered).sum(0)


one_shot = in_symmetric_memory("one_shot_all_reduce")
two_shot = in_symmetric_memory("two_shot_all_reduce_")  # in place
CASES = {  # tokens, baseline, optimized arm, text in the name of its kernel
    "two_shot-256": (256, nccl, two_shot, "two_shot_all_reduce"),
    "two_shot-4096": (4096, nccl, two_shot, "two_shot_all_reduce"),
    "nccl-4096": (4096, one_shot, nccl, "ncclDevKernel"),
}


@pytest.mark.gpu(count=2, cpu=False)
@pytest.mark.parametrize("case", CASES)
def test_symm_mem_all_reduce(compare: Compare, case: str) -> None:
    tokens, baseline, optimized, kernel = CASES[case]
    compare(
        baseline=baseline,
        optimized=optimized,
        against="naive" if optimized is nccl else "library",
        inputs=projection(tokens),
        reference=in_fp64,
        metric=("device", "wall"),
        cache="warm",
        evidence=[evidence.kernel_name(kernel)],
    )


@pytest.mark.gpu(count=2, cpu=False)
def test_symm_mem_all_reduce_wall(compare: Compare) -> None:
    compare(
        baseline=nccl,
        optimized=one_shot,
        against="library",
        inputs=projection(tokens=8),
        reference=in_fp64,
        metric=("wall", "device"),
        cache="warm",
        evidence=[evidence.api_calls(max=3)],  # the GEMM and one kernel that adds up
    )
