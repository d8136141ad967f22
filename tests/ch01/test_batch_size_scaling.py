"""The same 2,048 samples take less time in batches of 256 than in batches of 32.

Each batch reads all weights: 537 MB in bf16, many times the L2 cache. A batch of 32 multiplies each
weight 32 times, 32 operations per byte. The tensor cores need some 175 for each byte that memory
delivers, so they wait for weights, and the time of a batch hardly depends on its size. Twice the
samples per batch halve the number of batches and therefore the time, until a batch has so many
samples that the products take longer than reading the weights.

All sizes are judged against 32, a typical batch of a server that answers requests as they come. The
price of larger batches is latency, because the first sample waits for the last. If reading the
weights were all that counts, 64, 128 and 256 would be 2, 4 and 8 times as fast as 32. On H200s they
are 1.9, 3.7 and 5.6 to 5.9 times as fast: at 256 the call runs at 80 % of the tensor cores' rate
and takes longer than reading the weights. Products are 94 % of its kernels' time. An H100 has the
same tensor cores, but its memory delivers two thirds of the bytes per second, so it comes closer to
8: 7.1 times. The bytes read per sample fall with each size. On an H200, the call with batches of 32
reads its weights at 3.5 TB/s, three quarters of the rate of memory. Gaps between kernels take
almost a tenth of its time.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Work, evidence

BASELINE = 32
SIZES = (64, 128, 256)


def samples(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    width, layers = bench.size(8192, check=24), bench.size(4, check=2)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    weights = torch.randn(layers, width, width, **options) * (2 / width) ** 0.5
    return torch.randn(bench.size(2048, check=512), width, **options), weights


def in_batches_of(size):
    def run(x, weights):
        outputs = []
        for batch in x.split(size):
            for weight in weights:
                batch = torch.relu_(batch @ weight)  # noqa: PLW2901  each layer replaces it
            outputs.append(batch)
        return torch.cat(outputs)

    return run


ARMS = {size: in_batches_of(size) for size in (BASELINE, *SIZES)}


def in_fp64(x, weights):
    x = x.double()
    for weight in weights:
        x = (x @ weight.double()).clamp(min=0)
    return x


@pytest.mark.parametrize("rung", SIZES)
def test_batch_size_scaling(compare: Compare, rung: int) -> None:
    compare(
        baseline=ARMS[BASELINE],
        optimized=ARMS[rung],
        inputs=samples,
        work=lambda x, weights: Work(
            read=x.nbytes + weights.nbytes,
            written=x.nbytes,
            flops=2 * len(x) * weights.numel(),
            dtype="bf16",
        ),
        reference=in_fp64,
        cache="warm",  # makes no difference: each batch streams many times the L2 capacity
        evidence=[
            # weights are read once per batch; activations add a little
            evidence.counter("dram__bytes_read.sum", max=1.2 * BASELINE / rung, per="baseline")
        ],
    )
