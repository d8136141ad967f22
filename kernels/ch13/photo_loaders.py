"""An epoch of photos through a model, from three loaders.

in_process   the process that trains prepares each photo when its batch is due.
workers      processes of their own prepare batches ahead, and outlive the epoch.
packed       each photo is prepared once, however often the epoch shows it, and kept in a table of
             which a batch is one gather.
"""

import os
from functools import cache
from itertools import cycle

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

BATCH = 8
ALBUMS = 48  # that the workers can serve at the same time


class Shrunk(Dataset):
    """Photos of a quarter of the side, standardised in each colour."""

    def __init__(self, photos):
        self.photos = photos.numpy()

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, i):
        side = len(self.photos[i]) // 4
        small = self.photos[i].reshape(side, 4, side, 4, 3).mean((1, 3), dtype=np.float32)
        return (small - small.mean((0, 1))) / small.std((0, 1))


def epoch(loader, model):
    batches = (batch.to(model.device, non_blocking=True) for batch in loader)
    return torch.cat([batch.flatten(1) @ model for batch in batches])


def in_process(photos, order, model):
    return epoch(DataLoader(Shrunk(photos), BATCH, sampler=order.tolist()), model)


@cache
def _crew(shape, pin_memory):
    """Start the workers, once: they read photos from memory that they share with this process."""
    shared, wanted = torch.zeros(ALBUMS, *shape, dtype=torch.uint8).share_memory_(), [0]
    loader = DataLoader(
        Shrunk(shared.flatten(0, 1)),
        BATCH,
        sampler=wanted,
        num_workers=min(8, len(os.sched_getaffinity(0))),
        multiprocessing_context="fork",
        persistent_workers=True,
        pin_memory=pin_memory,
    )
    return shared, wanted, loader, cycle(range(ALBUMS))


def workers(photos, order, model):
    shared, wanted, loader, albums = _crew(photos.shape, model.is_cuda)
    album = next(albums)
    shared[album] = photos
    places = (album * len(photos) + order).tolist()

    def run(_photos, _order, model):
        wanted[:] = places
        return epoch(loader, model)

    return run


def packed(photos, order, model):
    table = torch.from_numpy(np.stack(list(Shrunk(photos))))
    batches = BatchSampler(order.tolist(), BATCH, drop_last=False)
    loader = DataLoader(table, batch_size=None, sampler=batches, pin_memory=model.is_cuda)
    return epoch(loader, model)
