"""One epoch of photos through a model, fed by two data loaders.

in_process   The process that runs the model prepares each batch when it is due.
workers      Persistent worker processes prepare batches ahead of the model.

Both pin their batches, so that the copies to the GPU are asynchronous. The model labels each patch
of 4 x 4 pixels by itself: an embedding, residual MLP blocks and a classifier, in bf16.
"""

import os
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import gelu, rms_norm
from torch.utils.data import DataLoader, Dataset, Sampler

BATCH = 8
"""Photos per batch."""

WORKERS = 12
"""Most worker processes. A core needs several times as long for a batch as an H200 does for a step
of the model, so far fewer would not keep up."""


class PatchModel(NamedTuple):
    """Weights of the model. Inputs are rows: a layer is ``x @ weight``."""

    embedding: torch.Tensor
    """Values of a patch (48) x width."""
    up: torch.Tensor
    """Layers x width x 4 width."""
    down: torch.Tensor
    """Layers x 4 width x width."""
    classifier: torch.Tensor
    """Width x classes."""

    def __call__(self, batch):
        """Return a score for each class and patch of photos (batch x side x side x 3)."""
        rows = batch.shape[1] // 4
        patches = batch.view(-1, rows, 4, rows, 4, 3).transpose(2, 3).reshape(-1, rows**2, 48)
        x = patches.to(self.embedding.dtype) @ self.embedding
        for up, down in zip(self.up, self.down, strict=True):
            x = x + gelu(rms_norm(x, x.shape[-1:]) @ up) @ down
        return rms_norm(x, x.shape[-1:]) @ self.classifier


class PreparedPhotos(Dataset):
    """Photos shrunk to a quarter of their side and standardized per color channel."""

    def __init__(self, photos):
        self.photos = photos.numpy()

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, i):
        side = len(self.photos[i]) // 4
        small = self.photos[i].reshape(side, 4, side, 4, 3).mean((1, 3), dtype=np.float32)
        return (small - small.mean((0, 1))) / small.std((0, 1))


class EpochOrder(Sampler):
    """The order of the next epoch, which is read when the epoch begins."""

    def __init__(self, order):
        self.order = order

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order.tolist())


def loader_of(photos, order, model, **options):
    pin_memory = model.embedding.is_cuda
    return DataLoader(
        PreparedPhotos(photos), BATCH, sampler=EpochOrder(order), pin_memory=pin_memory, **options
    )


def run_epoch(loader, model):
    batches = (batch.to(model.embedding.device, non_blocking=True) for batch in loader)
    return torch.cat([model(batch) for batch in batches])


def in_process(photos, order, model):
    return run_epoch(loader_of(photos, order, model), model)


def workers(photos, order, model):
    """Start the workers, which get the photos by fork, with one epoch."""
    count = min(WORKERS, len(os.sched_getaffinity(0)))
    options = {"num_workers": count, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = loader_of(photos, order, model, **options)
    run_epoch(loader, model)

    def run(_photos, _order, model):  # unused: the loader reads the order when an epoch begins
        return run_epoch(loader, model)

    return run
