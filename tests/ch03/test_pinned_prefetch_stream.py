"""Prefetching batches on a second stream beats copying each batch before the model uses it.

Work on one stream runs in order: the model waits for its batch, then the copy engine waits for the
model, although the two are different units of the GPU. On a second stream, the copy of batch i + 1
overlaps the products of batch i. This is double buffering: two buffers alternate, and two events
per buffer keep the order. The model waits until its batch has arrived; the copy waits until the
model has used the buffer's previous batch.

The batches lie in pinned memory for both arms; copies from pageable memory do not overlap. Both
arms issue the same copies and kernels, so the gain is the idle time that overlap removes. The limit
is the sum of the two stages over the longer one: 2x where they take equally long. The first copy
and the last computation stay exposed, which leaves 16 / 9 for 8 batches if the stages are equal;
here the copies take 1.23 ms and the kernels 1.11. Where one stage dominates, hiding the other saves
little.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence, prepared

BATCHES, LAYERS = 8, 5


def pinned_batches(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = bench.size(2048, check=32), bench.size(2048, check=16)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    batches = torch.randn(BATCHES, rows, width, **options)
    layers = torch.randn(LAYERS, width, width, **options) * (2 / width) ** 0.5
    pinned = torch.empty_like(batches, device="cpu", pin_memory=True).copy_(batches)
    return pinned, layers, torch.empty_like(batches)


def model(x, layers, out):
    for layer in layers[:-1]:
        x = torch.relu(x @ layer)
    torch.matmul(x, layers[-1], out=out)


def one_stream(batches, layers, out):
    for batch, output in zip(batches, out, strict=True):
        model(batch.to(out.device, non_blocking=True), layers, output)


def prefetching(batches, layers, out):
    copy_stream = torch.cuda.Stream()
    buffers = [torch.empty_like(out[0]) for _ in range(2)]
    arrived = [torch.cuda.Event() for _ in buffers]
    used = [torch.cuda.Event() for _ in buffers]

    def run(batches, layers, out):
        compute = torch.cuda.current_stream()
        copy_stream.wait_stream(compute)
        for i, (batch, output) in enumerate(zip(batches, out, strict=True)):
            slot = i % 2
            with torch.cuda.stream(copy_stream):
                copy_stream.wait_event(used[slot])
                buffers[slot].copy_(batch, non_blocking=True)
                arrived[slot].record()
            compute.wait_event(arrived[slot])
            model(buffers[slot], layers, output)
            used[slot].record()

    return run


def in_fp64(batches, layers, out):
    x = batches.to(out.device).double()
    for number, layer in enumerate(layers.double(), 1):
        x = torch.einsum("brw,wv->brv", x, layer)
        if number < LAYERS:
            x = x.clamp(min=0)
    return x


@pytest.mark.gpu
def test_pinned_prefetch_stream(compare: Compare) -> None:
    compare(
        baseline=one_stream,
        optimized=prepared(prefetching),
        inputs=pinned_batches,
        reference=in_fp64,
        # 7 of 8 copies can overlap; tracing delays launches, so the bound is a single copy
        evidence=[evidence.overlap(of="copies", min=1 / BATCHES)],
    )
