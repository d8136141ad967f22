"""Preparing batches in workers, or once per photo, beats preparing them in the training process.

By default a DataLoader prepares each batch in the training process while the GPU waits: here
shrinking and standardizing a photo takes far longer than the model's step. "workers" prepares
batches ahead in up to eight persistent processes; a thread pins finished batches, so that their
copies to the GPU are asynchronous. "packed" prepares each photo once for the two times that the
epoch shows it, keeps the results in one table, and gathers a batch in one call. It pins its batches
as well; the evidence shows this, but not how often a photo is prepared, which nothing counts.

The claim is judged on wall time per epoch. Workers gain at most their number and need as many
cores; each batch still passes through shared memory. The step is so small that the GPU idles most
of the time in all arms. Starting the workers takes longer than a short epoch; with
persistent_workers it happens once, outside the timed region. Packing is inside it. Its gain is at
most the number of times that a photo is shown: 2x here by construction, nothing where a photo is
shown once, and more when later epochs reuse the table. The table costs memory or disk, and random
augmentation cannot be packed.
"""

import pytest
import torch

from kernels.ch13 import photo_loaders
from pytest_aiperf import Bench, Compare, evidence, prepared, static


def photo_set(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make photos, the order of an epoch that shows each twice, and a model."""
    count, side = bench.size(32, check=8), bench.size(128, check=32)
    shape, options = (count, side, side, 3), {"device": bench.device, "dtype": torch.uint8}
    photos = torch.randint(0, 256, shape, **options).cpu()
    order = torch.randperm(2 * count) % count
    model = torch.randn(3 * (side // 4) ** 2, 64, device=bench.device)
    return static(photos), static(order), model


def in_fp64(photos, order, model):
    count, side = photos.shape[:2]
    photos = photos.to(model.device).double()
    small = photos.view(count, side // 4, 4, side // 4, 4, 3).mean((2, 4))
    std, mean = torch.std_mean(small, (1, 2), correction=0, keepdim=True)
    return ((small - mean) / std).flatten(1)[order.to(model.device)] @ model.double()


ARMS = {"workers": prepared(photo_loaders.workers), "packed": photo_loaders.packed}
PINNED = evidence.copied_bytes("host to device", memory="pageable", max=0)
EVIDENCE = {
    # each of 8 batches wakes the thread that pins it and then the training loop
    "workers": [PINNED, evidence.context_switches(min=16)],
    "packed": [PINNED],
}


@pytest.mark.parametrize("rung", ARMS)
def test_dataloader_workers(compare: Compare, rung: str) -> None:
    compare(
        baseline=photo_loaders.in_process,
        optimized=ARMS[rung],
        inputs=photo_set,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=EVIDENCE[rung],
    )
