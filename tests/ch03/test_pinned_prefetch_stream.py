"""Batches copied on a stream of their own arrive while the model works on the one before.

Work on one stream runs in order: the model waits for its batch, then the copy engine waits for the
model, although the two are different parts of the GPU and neither needs the other. On a second
stream the copy of batch i + 1 runs beside the products of batch i. Two buffers take turns, and two
events a buffer keep the order: the model waits until its batch has arrived, the copy until the
buffer's last batch has been used.

The batches lie in pinned memory for both arms; from pageable memory nothing can overlap. Both arms
launch the same copies and kernels, so that the time saved is waiting alone: the GPU's, since a slow
host would show in the faster arm only. The limit is sum over maximum of the two stages: 2x where
they take about as long, as here, and less with few batches, since the first copy and the last
computation stay uncovered: 16 / 9 for these 8. Where one stage dominates, hiding the other saves
little.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence, prepared

BATCHES, LAYERS = 8, 5


def pinned_batches(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = bench.size(2048, check=32), bench.size(2048, check=16)
    kind = {"device": bench.device, "dtype": torch.bfloat16}
    batches = torch.randn(BATCHES, rows, width, **kind)
    layers = torch.randn(LAYERS, width, width, **kind) * (2 / width) ** 0.5
    pinned = torch.empty_like(batches, device="cpu", pin_memory=True).copy_(batches)
    return pinned, layers, torch.empty_like(batches)


def model(x, layers, out):
    for layer in layers[:-1]:
        x = torch.relu(x @ layer)
    torch.matmul(x, layers[-1], out=out)


def one_stream(batches, layers, out):
    for batch, answer in zip(batches, out, strict=True):
        model(batch.to(out.device, non_blocking=True), layers, answer)


def prefetching(batches, layers, out):
    copies = torch.cuda.Stream()
    buffers = [torch.empty_like(out[0]) for _ in range(2)]
    arrived = [torch.cuda.Event() for _ in buffers]
    used = [torch.cuda.Event() for _ in buffers]

    def run(batches, layers, out):
        here = torch.cuda.current_stream()
        copies.wait_stream(here)
        for i, (batch, answer) in enumerate(zip(batches, out, strict=True)):
            turn = i % 2
            with torch.cuda.stream(copies):
                copies.wait_event(used[turn])
                buffers[turn].copy_(batch, non_blocking=True)
                arrived[turn].record()
            here.wait_event(arrived[turn])
            model(buffers[turn], layers, answer)
            used[turn].record()

    return run


def in_fp64(batches, layers, out):
    answers = torch.empty_like(out, dtype=torch.float64)
    model(batches.to(out.device).double(), layers.double(), answers)
    return answers


@pytest.mark.gpu
def test_pinned_prefetch_stream(compare: Compare) -> None:
    compare(
        baseline=one_stream,
        optimized=prepared(prefetching),
        inputs=pinned_batches,
        reference=in_fp64,
        # holds that the work is equal, no more: what is saved is waiting
        evidence=[evidence.launches(most=1, per="baseline")],
    )
