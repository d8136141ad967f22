"""One batched call beats 40 small GEMMs.

A 128x128x128 product fills a handful of a GPU's SMs for a few microseconds. In a loop the products
run one after another on one stream, so most of the chip idles and the fixed cost of a kernel (its
launch, its first loads from memory, its drain) is paid 40 times. One strided-batched call computes
all products in one grid: the cost is paid once and the SMs fill.

Device time is judged: it leaves out the gaps between launches, so the claim holds even where
launches are free, as in a CUDA graph. What an eager caller waits for (wall) is shown beside it.
The gain ends when one product fills the chip by itself (n of about 2048): then the batched call
has nothing left to fill.
"""

import torch

from pytest_aiperf import Bench, Compare, Work, evidence


def matrices(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, n = bench.size(40, check=3), bench.size(128, check=32)
    shape, kind = (batch, n, n), {"device": bench.device, "dtype": torch.bfloat16}
    return torch.randn(shape, **kind), torch.randn(shape, **kind), torch.empty(shape, **kind)


def one_by_one(a, b, out):
    for x, y, z in zip(a, b, out, strict=True):
        torch.mm(x, y, out=z)


def batched(a, b, out):
    torch.bmm(a, b, out=out)


def test_batched_gemm(compare: Compare) -> None:
    compare(
        baseline=one_by_one,
        optimized=batched,
        inputs=matrices,
        work=lambda a, b, out: Work(3 * a.nbytes, 2 * a.numel() * a.shape[-1], "bf16"),
        reference=lambda a, b, out: a.double() @ b.double(),
        metric=("device", "wall"),
        evidence=[evidence.launches(1), evidence.kernels(1)],
    )
