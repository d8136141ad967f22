"""Sorted ids as gaps of four bits: decoders for the CPU (in threads) and the GPU (Triton).

A frame is 1024 ids: its first gap counts from ``start``, and 512 bytes hold two gaps each, the
earlier one in the lower half. An id is the sum of all gaps up to its own.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

FRAME = 1024
SLICE = 64  # frames that a thread decodes at a time: 256 KiB of ids, which stay in a core's cache


@triton.jit
def _decode(packed, starts, out, FRAME: tl.constexpr):
    frame = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, FRAME)
    pairs = tl.load(packed + frame * (FRAME // 2) + at // 2).to(tl.int32)
    gaps = (pairs >> 4 * (at % 2)) & 15
    tl.store(out + frame * FRAME + at, tl.load(starts + frame) + tl.cumsum(gaps, 0))


def decode_on_gpu(packed, starts, out):
    """Send the frames as they are, and decode them where the ids are wanted."""
    packed = packed.to(out.device, non_blocking=True)
    starts = starts.to(out.device, non_blocking=True)
    _decode[(len(out),)](packed, starts, out, FRAME=FRAME, num_warps=4)


@cache
def _threads(count):
    # a thread is a core's: torch must not start more of them in each
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


def _decode_slice(packed, starts, out):
    ids = out.numpy()
    np.bitwise_and(packed, 15, out=ids[:, 0::2])
    np.right_shift(packed, 4, out=ids[:, 1::2])
    torch.cumsum(out, 1, dtype=torch.int32, out=out)  # NumPy's would keep Python's lock
    ids += starts[:, None]


def decode_on_cpu(threads):
    """Decode slices in threads, into pinned memory, and send each as soon as it is ready."""

    def make(_packed, _starts, out):
        ids = torch.empty_like(out, device="cpu", pin_memory=out.is_cuda)

        def run(packed, starts, out):
            arrays = [x.split(SLICE) for x in (packed, starts, ids)]
            tasks = [
                _threads(threads).submit(_decode_slice, frames.numpy(), first.numpy(), part)
                for frames, first, part in zip(*arrays, strict=True)
            ]
            for task, part, ready in zip(tasks, out.split(SLICE), arrays[2], strict=True):
                task.result()
                part.copy_(ready, non_blocking=True)
            if out.is_cuda:
                torch.cuda.current_stream().synchronize()  # the pinned ids are used again

        return run

    return make
