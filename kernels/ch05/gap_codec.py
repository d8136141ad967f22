"""Sorted ids as gaps of four bits: decoders for the CPU (C, on all cores) and the GPU (Triton).

A frame is 1024 ids: its first gap counts from ``start``, and 512 bytes hold two gaps each, the
earlier one in the lower half. An id is the sum of all gaps up to its own.
"""

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl

FRAME = 1024
SLICE = 1024
"""Frames that are decoded, and then sent, at a time: 4 MiB of ids, for all cores' caches."""

SOURCE = r"""
#include <cstdint>

constexpr int FRAME = 1024;

// Frames are independent: each thread takes its share of them, and nobody waits before the end.
extern "C" void decode(const uint8_t* packed, const int32_t* starts, int32_t* ids, int64_t frames,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t frame = 0; frame < frames; ++frame) {
        const uint8_t* pairs = packed + frame * (FRAME / 2);
        int32_t* out = ids + frame * FRAME;
        int32_t id = starts[frame];
        for (int i = 0; i < FRAME / 2; ++i) {
            const int first = pairs[i] & 15, both = first + (pairs[i] >> 4);
            out[2 * i] = id + first;  // beside the chain of sums, which has one step a pair
            out[2 * i + 1] = id += both;
        }
    }
}
"""


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
def _library():
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "decode.cpp"), Path(folder, "decode.so")
        source.write_text(SOURCE)
        command = [compiler, "-O3", "-fopenmp", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))  # stays mapped when its file is gone


def _decode_slice(packed, starts, ids, threads):
    """Decode frames in C; OpenMP keeps its threads, so that a slice starts without making any."""
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (packed, starts, ids))
    _library().decode(*pointers, ctypes.c_int64(len(ids)), threads)


def decode_on_cpu(threads):
    """Decode slices into pinned memory, and send each while the next one is decoded."""

    def make(_packed, _starts, out):
        ids = torch.empty_like(out, device="cpu", pin_memory=out.is_cuda)
        _library()

        def run(packed, starts, out):
            slices = [x.split(SLICE) for x in (packed, starts, ids, out)]
            for frames, first, ready, part in zip(*slices, strict=True):
                _decode_slice(frames, first, ready, threads)
                part.copy_(ready, non_blocking=True)
            if out.is_cuda:
                torch.cuda.current_stream().synchronize()  # the pinned ids are used again

        return run

    return make
