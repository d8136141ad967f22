"""Worker processes keep a GPU fed that one process starves; preparing once halves the work.

By default a DataLoader prepares each batch in the process that trains, while the GPU waits: here a
photo takes about a millisecond to be shrunk and standardised, and a step of the model far less.
"workers" prepares batches in processes of their own, up to eight, which outlive the epoch and work
ahead; finished batches are pinned by a thread, so that their copy to the GPU waits for nobody.
"packed" prepares each photo once for the two times that it is shown, keeps the results as one
table, and gathers a batch in one call.

What the caller waits for an epoch (wall) is judged. Workers gain at most their number, and need as
many cores; a finished batch still passes through shared memory. Starting them takes longer than a
short epoch, hence persistent_workers; that is outside the clock. Packing is inside it, and gains at
most the number of looks at a photo: 2x here, nothing where a photo is shown once, and more with
each further epoch that finds the table. It takes the table's memory or disk, and random
augmentation cannot be packed.
"""

import pytest
import torch

from kernels.ch13 import photo_loaders
from pytest_aiperf import Bench, Compare, prepared, static


def album(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take photos, the order of an epoch that shows each twice, and a model."""
    count, side = bench.size(32, check=8), bench.size(128, check=32)
    shape, kind = (count, side, side, 3), {"device": bench.device, "dtype": torch.uint8}
    photos = torch.randint(0, 256, shape, **kind).cpu()
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


@pytest.mark.parametrize("rung", ARMS)
def test_dataloader_workers(compare: Compare, rung: str) -> None:
    compare(
        baseline=photo_loaders.in_process,
        optimized=ARMS[rung],
        inputs=album,
        reference=in_fp64,
        metric="wall",
        cache="warm",
    )
