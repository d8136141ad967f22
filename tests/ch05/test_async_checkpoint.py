"""A training step that stages its checkpoint in pinned memory beats one that waits for the file.

`torch.save` copies each tensor from the GPU to pageable memory and writes it; the training stops
until the disk has everything. But the training need not wait for more than the copy: once the
weights are in the CPU's memory, the next update may overwrite them on the GPU. "staged" copies them
to pinned buffers that are reused, at the speed of the link, and a thread writes these buffers while
the training goes on. "overlapped" also hides the copy: the forward and backward pass only read the
weights, so a second stream copies them meanwhile, and only the update waits for an event. The
library arm, torch.distributed.checkpoint.async_save with cached staging, also reuses pinned buffers
and waits for the copy. Its step takes 1.24 to 1.31 times as long as that of "staged", and 1.8 to
2.0 times as long as that of "overlapped". What it does in the rest of the time was not measured.

The score is the time of a training step that takes a checkpoint of 67 million weights (268 MB); the
step itself is part of it. The other arms therefore stall for at least their difference to
"overlapped", which hides 67 to 83 % of its copy on H200s. The weights in the file must be bit for
bit those from before the update, although it runs while the file is written. All arms write a real
file in the folder for temporary files and end it with fsync; where that folder is in memory, the
baseline is much faster than on a disk. Only the baseline waits for the file within the step.

The price is a second copy of the weights in pinned memory on the host. A checkpoint must end before
the next one may use the buffers, so the disk still bounds their rate. By default, async_save keeps
no buffers and copies to new pageable memory, so that a step takes longer. "staged" changes two
things at once: it does not wait for the file, and it reuses pinned buffers. Where a step is shorter
than the copy, the rest of the copy is exposed.
"""

import pytest
import torch

from kernels.ch05 import checkpoints
from pytest_aiperf import Bench, Compare, evidence, prepared

STAGED, OVERLAPPED = prepared(checkpoints.staged), prepared(checkpoints.overlapped)
LIBRARY = prepared(checkpoints.library)
RUNGS = {
    "staged": (
        checkpoints.blocking,
        STAGED,
        "idiomatic",
        [
            evidence.busy_share(min=0.25),  # the GPU does not wait for the file
            evidence.copied_bytes("device to host", memory="pageable", max=0),
        ],
    ),
    "overlapped": (STAGED, OVERLAPPED, "previous rung", [evidence.overlap(min=0.5, of="copies")]),
}


def training(bench: Bench) -> tuple[torch.Tensor, list[torch.Tensor]]:
    rows, width = bench.size(8192, check=16), bench.size(2048, check=24)
    layers, options = bench.size(16, check=3), {"device": bench.device}
    weights = [torch.randn(width, width, **options) * width**-0.5 for _ in range(layers)]
    return torch.randn(rows, width, **options), weights


def in_fp64(x, weights):
    """Return the bits of the weights before the update, and the weights after it."""
    doubles = [w.double().requires_grad_() for w in weights]
    rows = x.double()
    for weight in doubles:
        hidden = rows / rows.pow(2).mean(1, keepdim=True).sqrt() @ weight
        rows = rows + hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    grads = torch.autograd.grad((rows * rows).sum() / len(rows), doubles)
    updated = [(w - checkpoints.RATE * g).detach() for w, g in zip(doubles, grads, strict=True)]
    return [w.cpu().view(torch.int32) for w in weights], updated


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("rung", RUNGS)
def test_async_checkpoint(compare: Compare, rung: str) -> None:
    baseline, optimized, against, proof = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        library=LIBRARY,
        against=against,
        inputs=training,
        reference=in_fp64,
        metric="score",
        precision="bf16",
        evidence=proof,
    )
