"""Stream-K beats a program per tile where a GEMM has one tile more than the GPU has SMs.

133 tiles of 128 x 256 on 132 SMs take two waves, and the second one consists of a single tile: for
half of the time, one SM works (wave quantization). Stream-K cuts work elsewhere than at the borders
of tiles: it lines up the k slices of all tiles and gives each SM the same number of them. A tile
that two SMs share costs a partial sum in fp32, which one SM writes to memory and the other adds.
test_tile_scheduler_host.py counts the same on a virtual clock, and split-K as well, which has no
kernel here. cuBLAS, the library arm, is faster still, by 13 % on H200s and 17 % on an H100. It is
free to choose its tiles: by the name of its kernel they are 192 x 192, so 13 x 10 = 130 of them, a
single wave without partial sums.

The limit is 2 waves over 133 / 132, 1.985x; H200s reach 1.86x to 1.90x and an H100 1.77x. The worst
case for whole tiles was chosen on purpose. The gain is smaller the fuller the last wave is and the
more waves there are. Where all waves are full, stream-K gains nothing.
"""

import pytest
import torch

from kernels.ch10 import persistent_matmul, stream_k
from pytest_aiperf import Bench, Compare, Work, evidence, prepared

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def matrices(bench: Bench) -> Matrices:
    # 19 x 7 tiles
    m, n, k = bench.size(2432, check=130), bench.size(1792, check=264), bench.size(8192, check=200)
    a = torch.randn(m, k, device=bench.device).half()
    b = torch.randn(n, k, device=bench.device).half()
    return a, b, a.new_empty(m, n)


@pytest.mark.gpu(min_sm=90, cpu=True)
def test_stream_k(compare: Compare) -> None:
    compare(
        baseline=persistent_matmul.descriptor,
        optimized=prepared(stream_k.stream_k),
        library=lambda a, b, out: torch.mm(a, b.T, out=out),
        inputs=matrices,
        work=lambda a, b, out: Work(
            read=a.nbytes + b.nbytes,
            written=out.nbytes,
            flops=2 * a.numel() * len(b),
            dtype="fp16",
        ),
        reference=lambda a, b, out: a.double() @ b.double().T,
        # the SM with the most work has one tile's slices and a partial sum instead of two tiles
        evidence=[evidence.counter("sm__cycles_active.max", max=0.6, per="baseline")],
    )
