"""A training step that begins with a checkpoint of its weights, saved in four ways.

blocking    torch.save to a file, and fsync: the step waits until the file is on the disk.
staged      The weights are copied to pinned buffers; a thread writes these while the step runs.
overlapped  The copy, too, runs beside the forward and backward pass, on a stream of its own. Only
            the update, which overwrites the weights, waits for it.
library     torch.distributed.checkpoint.async_save, which copies to pinned buffers that are reused
            and waits for that, as "staged" does. (DefaultStager could overlap the copy, but in
            torch 2.11 it cannot be reused: https://github.com/pytorch/pytorch/issues/183413.)

Each returns the bits of the weights in the file, the time of the step, and updates the weights.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.nn.functional import gelu, rms_norm

from pytest_aiperf import Score

RATE = 0.01

_writer = cache(lambda: ThreadPoolExecutor(1))


class Blocking:
    def start(self, weights, folder):
        write(weights, folder)

    def wait_for_copy(self):
        """Before the update: wait until the weights have been copied."""

    def wait_for_file(self):
        """After the step: wait until the file is on the disk."""

    def load(self, folder):
        return torch.load(folder / "weights.pt", map_location="cpu")


def write(tensors, folder):
    path = folder / "weights.pt"
    torch.save(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # without it, the file may still be in the page cache only


class InBackground(Blocking):
    def __init__(self, weights, *, overlaps):
        self.on_gpu, self.overlaps = weights[0].is_cuda, overlaps
        self.buffers = [
            torch.empty(w.shape, dtype=w.dtype, pin_memory=self.on_gpu) for w in weights
        ]
        if self.on_gpu:
            self.stream, self.copied = torch.cuda.Stream(), torch.cuda.Event()

    def start(self, weights, folder):
        if self.on_gpu:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream if self.on_gpu else None):
            for buffer, weight in zip(self.buffers, weights, strict=True):
                buffer.copy_(weight, non_blocking=True)
        if self.on_gpu:
            self.copied.record(self.stream)
        if self.on_gpu and not self.overlaps:
            self.copied.synchronize()
        self.file = _writer().submit(self._write, folder)

    def _write(self, folder):
        if self.on_gpu:
            self.copied.synchronize()
        write(self.buffers, folder)

    def wait_for_copy(self):
        if self.on_gpu:
            torch.cuda.current_stream().wait_event(self.copied)

    def wait_for_file(self):
        self.file.result()


class AsyncSave(Blocking):
    def __init__(self, weights):
        # the cache keeps buffers, pinned, for the next checkpoint
        self.stager = BlockingAsyncStager(cache_staged_state_dict=weights[0].is_cuda)
        self.stager.stage(named(weights))

    def start(self, weights, folder):
        self.state = named(weights)
        options = {"async_stager": self.stager, "no_dist": True}
        self.file = distributed_checkpoint.async_save(self.state, checkpoint_id=folder, **options)

    def wait_for_file(self):
        self.file.result()

    def load(self, folder):
        loaded = {name: torch.empty_like(w, device="cpu") for name, w in self.state.items()}
        distributed_checkpoint.load(loaded, checkpoint_id=folder, no_dist=True)
        return list(loaded.values())


def named(weights):
    return {str(i): weight for i, weight in enumerate(weights)}


def step_with(checkpoint):
    def step(x, weights):
        with TemporaryDirectory() as name:
            folder = Path(name)
            gradients(x, weights)  # the first call loads kernels and allocates memory
            synchronize(x)
            start = time.perf_counter()
            checkpoint.start(weights, folder)
            grads = gradients(x, weights)
            checkpoint.wait_for_copy()
            for weight, grad in zip(weights, grads, strict=True):
                weight.sub_(grad, alpha=RATE)
            synchronize(x)
            milliseconds = 1e3 * (time.perf_counter() - start)
            checkpoint.wait_for_file()
            bits = [w.view(torch.int32) for w in checkpoint.load(folder)]
        return bits, Score(milliseconds, "ms", "lower")

    return step


def gradients(x, weights):
    leaves = [w.detach().requires_grad_() for w in weights]
    with torch.autocast(x.device.type, torch.bfloat16):
        for weight in leaves:
            x = x + gelu(rms_norm(x, x.shape[-1:]) @ weight)
    return torch.autograd.grad(x.square().sum(1).mean(), leaves)


def synchronize(x):
    if x.is_cuda:
        torch.cuda.synchronize()


blocking = step_with(Blocking())


def staged(_x, weights):
    return step_with(InBackground(weights, overlaps=False))


def overlapped(_x, weights):
    return step_with(InBackground(weights, overlaps=True))


def library(_x, weights):
    return step_with(AsyncSave(weights))
