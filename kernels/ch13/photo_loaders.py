"""One epoch of photos through a model, with three ways to prepare its batches.

in_process   The process that runs the model prepares each batch when it is due.
workers      Persistent worker processes prepare batches ahead of the model.
threads      Threads of the process that runs the model prepare batches ahead.

All pin their batches, so that the copies to the GPU are asynchronous. The model labels each patch
of a photo by itself: an embedding, residual MLP blocks and a classifier, in bf16.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch.nn.functional import gelu, interpolate, rms_norm
from torch.utils.data import DataLoader, Dataset, Sampler

BATCH = 32
"""Photos per batch."""

WORKERS = 12
"""Most workers. A core needs several times as long for a batch as an H200 does for a step of the
model, so far fewer would not keep up."""

SHRINK = 4
"""Side of a photo per side of what the model gets."""


class PatchModel(NamedTuple):
    """Weights of the model. Inputs are rows: a layer is ``x @ weight``."""

    embedding: torch.Tensor
    """Values of a square patch (3 colors) x width."""
    up: torch.Tensor
    """Layers x width x 4 width."""
    down: torch.Tensor
    """Layers x 4 width x width."""
    classifier: torch.Tensor
    """Width x classes."""

    def __call__(self, batch):
        """Return a score for each class and patch of photos (batch x 3 x side x side, uint8)."""
        side = math.isqrt(len(self.embedding) // 3)
        patches = batch.unfold(2, side, side).unfold(3, side, side)  # batch x 3 x rows x columns
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x = (patches / 127.5 - 1).to(self.embedding.dtype) @ self.embedding
        for up, down in zip(self.up, self.down, strict=True):
            x = x + gelu(rms_norm(x, x.shape[-1:]) @ up) @ down
        return rms_norm(x, x.shape[-1:]) @ self.classifier


class ShrunkPhotos(Dataset):
    """Photos (3 x side x side) shrunk as torchvision's Resize does, in 8-bit integers."""

    def __init__(self, photos):
        self.photos = photos

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, i):
        photo = self.photos[i].permute(2, 0, 1)[None]
        sides = [side // SHRINK for side in photo.shape[2:]]
        return interpolate(photo, sides, mode="bilinear", antialias=True)[0]


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
        ShrunkPhotos(photos), BATCH, sampler=EpochOrder(order), pin_memory=pin_memory, **options
    )


def run_epoch(batches, model):
    moved = (batch.to(model.embedding.device, non_blocking=True) for batch in batches)
    return torch.cat([model(batch) for batch in moved])


def in_process(photos, order, model):
    return run_epoch(loader_of(photos, order, model), model)


def worker_count():
    return min(WORKERS, len(os.sched_getaffinity(0)))


def workers(photos, order, model):
    """Start the workers, which get the photos by fork, with one epoch."""
    options = {"persistent_workers": True, "multiprocessing_context": "fork"}
    loader = loader_of(photos, order, model, num_workers=worker_count(), **options)
    run_epoch(loader, model)

    def run(_photos, _order, model):  # unused: the loader reads the order when an epoch begins
        return run_epoch(loader, model)

    return run


def threads(photos, _order, _model):
    """Start the threads. They run at the same time where an operator releases Python's lock."""
    dataset = ShrunkPhotos(photos)
    # an operator uses one core, as in a worker process
    pool = ThreadPoolExecutor(worker_count(), initializer=torch.set_num_threads, initargs=(1,))

    def batch_of(indices):
        return torch.stack([dataset[i] for i in indices.tolist()])

    def run(_photos, order, model):
        batches = pool.map(batch_of, order.split(BATCH))
        if model.embedding.is_cuda:
            batches = (batch.pin_memory() for batch in batches)
        return run_epoch(batches, model)

    return run
