"""Quantizing to int8 on the GPU before a copy to the host beats copying fp32 and quantizing there.

A host that stores int8 (embeddings for a search index, an offloaded KV cache) needs a quarter of
the bytes that fp32 has, and PCIe is the slowest link on their way. Quantized on the GPU, each row
crosses it as codes of one byte per value and one fp32 scale. Both arms run the same PyTorch
operations with the same rounding, so the codes are equal to the last bit; only their place differs.
On the host, torch.compile fuses the operations into one loop with a thread per core.

The claim is judged on wall time until the codes are in pinned host memory. In traces on H200s the
copies take 2.4 to 2.6 and 0.6 ms, in proportion to their bytes, and the kernels of the GPU 0.4 ms.
So the copy of fp32 alone takes more than twice as long as the optimized arm in all. The rest of the
gain is the host's arithmetic, and depends on its cores: copy and arithmetic together took 6 ms
beside an H100, and 5 to 22 ms beside H200s, half of it or more for the arithmetic. A loop that
reads and writes 150 GB/s would take 1.1 ms, which leaves 3.5x. Copying and quantizing in parts
would hide the arithmetic behind the copy: at best the copy alone is left, and the gain falls to
2.3x to 2.5x on an H200. That is not measured here. The GPU runs each operation as a kernel of its
own; fused, they would take less, but the copy outweighs them. The gain ends where the host needs
the full precision, and shrinks for fp16 and bf16 to half.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence, prepared

WIDTH = 1024
RECIPROCAL = 1 / 127
"""Codes are at most 127. A product, because "/ 127" is one on a GPU only, and rounds otherwise."""


def embeddings(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw embeddings on the device; make pinned buffers for their codes and scales."""
    x = torch.randn(bench.size(32768, check=10), WIDTH, device=bench.device)
    codes = torch.empty(x.shape, dtype=torch.int8, pin_memory=True)
    return x, codes, torch.empty(len(x), 1, pin_memory=True)


def quantize(x):
    """Return int8 codes, and the scale of each row."""
    scales = x.abs().amax(1, keepdim=True) * RECIPROCAL
    return (x / scales).round_().to(torch.int8), scales


@torch.compile(dynamic=False)
def store_quantized(x, codes, scales):
    for out, result in zip((codes, scales), quantize(x), strict=True):
        out.copy_(result)


def on_host(x, _codes, _scales):
    buffer = torch.empty_like(x, device="cpu", pin_memory=True)

    def run(x, codes, scales):
        buffer.copy_(x)
        store_quantized(buffer, codes, scales)

    return run


def on_gpu(x, codes, scales):
    for out, result in zip((codes, scales), quantize(x), strict=True):
        out.copy_(result, non_blocking=True)
    torch.cuda.current_stream().synchronize()


def exact(x, codes, scales):
    """Compute in fp64: rounded to fp32, these are the correctly rounded product and quotient."""
    largest = torch.maximum(x.max(1).values, -x.min(1).values)
    scales = (largest.double() * torch.tensor(RECIPROCAL).double()).float()[:, None]
    quotients = torch.cat([(part.double() / s.double()).float() for part, s in parts(x, scales)])
    return torch.round(quotients).to(torch.int8), scales


def parts(*tensors):
    return zip(*(tensor.split(4096) for tensor in tensors), strict=True)


@pytest.mark.gpu
def test_quantize_before_copy(compare: Compare) -> None:
    compare(
        baseline=prepared(on_host),
        optimized=on_gpu,
        inputs=embeddings,
        reference=exact,
        metric="wall",
        evidence=[evidence.copied_bytes("device to host", max=0.26, per="baseline")],
    )
