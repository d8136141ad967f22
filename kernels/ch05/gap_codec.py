"""Sorted ids as gaps of four bits: decoders for the CPU (on all cores) and the GPU (Triton).

A frame is 1024 ids: its first gap counts from ``start``, and 512 bytes hold two gaps each, the
earlier one in the lower half. An id is the sum of all gaps up to its own.
"""

import torch
import triton
import triton.language as tl

FRAME = 1024
SLICE = (
    1024  # frames that are decoded, and then sent, at a time: 4 MiB of ids, for all cores' caches
)


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


def _decode_slice(packed, starts, ids):
    """Decode frames with torch's own operations, which share the ids out among their threads."""
    pairs = ids.view(len(ids), FRAME // 2, 2)
    torch.bitwise_and(packed, 15, out=pairs[..., 0])
    torch.bitwise_right_shift(packed, 4, out=pairs[..., 1])
    torch.cumsum(ids, 1, dtype=torch.int32, out=ids)
    ids += starts[:, None]


def decode_on_cpu(threads):
    """Decode slices into pinned memory, and send each while the next one is decoded."""

    def make(_packed, _starts, out):
        ids = torch.empty_like(out, device="cpu", pin_memory=out.is_cuda)

        def run(packed, starts, out):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            slices = [x.split(SLICE) for x in (packed, starts, ids, out)]
            for frames, first, ready, part in zip(*slices, strict=True):
                _decode_slice(frames, first, ready)
                part.copy_(ready, non_blocking=True)
            torch.set_num_threads(before)
            if out.is_cuda:
                torch.cuda.current_stream().synchronize()  # the pinned ids are used again

        return run

    return make
