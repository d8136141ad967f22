"""Delta-coded sorted ids, four bits per gap: decoders for one CPU core (C) and the GPU (Triton).

A frame holds 1024 ids in 512 bytes, two gaps per byte with the earlier one in the low nibble. The
first gap counts from the frame's ``start``. An id is the start plus all gaps up to and
including its own.
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
"""Ids per frame, as one GPU block decodes them: 128 threads with eight gaps each."""

SLICE = 1024
"""Frames per decode and copy on the CPU: 4 MiB of ids, which the core's caches still hold."""

SOURCE = r"""
#include <cstdint>

constexpr int FRAME = 1024;

extern "C" void decode(const uint8_t* packed, const int32_t* starts, int32_t* ids, int64_t frames) {
    for (int64_t frame = 0; frame < frames; ++frame) {
        const uint8_t* pairs = packed + frame * (FRAME / 2);
        int32_t* out = ids + frame * FRAME;
        int32_t id = starts[frame];
        for (int i = 0; i < FRAME / 2; ++i) {
            const int first = pairs[i] & 15, both = first + (pairs[i] >> 4);
            out[2 * i] = id + first;  // off the dependent chain, which has one addition per pair
            out[2 * i + 1] = id += both;
        }
    }
}
"""


@triton.jit
def _decode(packed, starts, out, FRAME: tl.constexpr):
    frame = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, FRAME)
    pairs = tl.load(packed + frame * (FRAME // 2) + i // 2).to(tl.int32)
    gaps = (pairs >> 4 * (i % 2)) & 15
    tl.store(out + frame * FRAME + i, tl.load(starts + frame) + tl.cumsum(gaps, 0))


def send_plain(_packed, _starts, ids, out):
    """Copy ids that need no decoding."""
    out.copy_(ids, non_blocking=True)


def decode_on_gpu(packed, starts, _ids, out):
    """Copy the packed frames to the GPU and decode them there."""
    packed = packed.to(out.device, non_blocking=True)
    starts = starts.to(out.device, non_blocking=True)
    _decode[(len(out),)](packed, starts, out, FRAME=FRAME, num_warps=4)


@cache
def _library():
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "decode.cpp"), Path(folder, "decode.so")
        source.write_text(SOURCE)
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))  # the library stays loaded after its file is deleted


def _decode_slice(packed, starts, ids):
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (packed, starts, ids))
    _library().decode(*pointers, ctypes.c_int64(len(ids)))


def decode_on_cpu(_packed, _starts, _ids, out):
    """Decode slices into pinned memory; copy each to the GPU while the next one is decoded."""
    decoded = torch.empty_like(out, device="cpu", pin_memory=out.is_cuda)
    _library()

    def run(packed, starts, _ids, out):
        slices = [x.split(SLICE) for x in (packed, starts, decoded, out)]
        for frames, slice_starts, part, target in zip(*slices, strict=True):
            _decode_slice(frames, slice_starts, part)
            target.copy_(part, non_blocking=True)
        if out.is_cuda:
            torch.cuda.current_stream().synchronize()  # the next call overwrites `decoded`

    return run
