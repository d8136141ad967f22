"""One epoch of photos through a model, fed by three data loaders.

in_process   The training process prepares each photo when its batch is due.
workers      Persistent worker processes prepare batches ahead of the model.
packed       Each photo is prepared once per epoch, however often the epoch shows it. The results
             form one table, and a batch is one gather from it.
"""

import os
from functools import cache
from itertools import cycle

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

BATCH = 8
"""Photos per batch."""

SHARED_SETS = 48
"""Photo sets in shared memory: up to 48 prepared arms can be alive at the same time."""


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


def run_epoch(loader, model):
    batches = (batch.to(model.device, non_blocking=True) for batch in loader)
    return torch.cat([batch.flatten(1) @ model for batch in batches])


def in_process(photos, order, model):
    return run_epoch(DataLoader(PreparedPhotos(photos), BATCH, sampler=order.tolist()), model)


@cache
def _worker_pool(shape, pin_memory):
    """Start the workers once. They read photos from memory shared with this process."""
    shared, indices = torch.zeros(SHARED_SETS, *shape, dtype=torch.uint8).share_memory_(), [0]
    loader = DataLoader(
        PreparedPhotos(shared.flatten(0, 1)),
        BATCH,
        sampler=indices,
        num_workers=min(8, len(os.sched_getaffinity(0))),
        multiprocessing_context="fork",
        persistent_workers=True,
        pin_memory=pin_memory,
    )
    return shared, indices, loader, cycle(range(SHARED_SETS))


def workers(photos, order, model):
    shared, indices, loader, set_numbers = _worker_pool(photos.shape, model.is_cuda)
    photo_set = next(set_numbers)
    shared[photo_set] = photos
    epoch_indices = (photo_set * len(photos) + order).tolist()

    def run(_photos, _order, model):
        indices[:] = epoch_indices  # the loader takes its batches from this list
        return run_epoch(loader, model)

    return run


def packed(photos, order, model):
    table = torch.from_numpy(np.stack(list(PreparedPhotos(photos))))
    batches = BatchSampler(order.tolist(), BATCH, drop_last=False)
    loader = DataLoader(table, batch_size=None, sampler=batches, pin_memory=model.is_cuda)
    return run_epoch(loader, model)
