"""Sorted ids, compressed by patched frame of reference (PFOR): encoder and decoder on the GPU.

A frame holds 1024 ids as the gaps between them, and the first gap counts from the frame's start.
Each frame has a bit width of its own. The gaps' low bits are packed in words of 32 bits, so that
a frame of width b takes 32 b words. A gap that needs more bits than the width is an exception:
its upper bits are stored apart, with its position, and are added ("patched") after unpacking. The
encoder chooses the width for which packed gaps and exceptions take the fewest bits together.

The decoder is one block per frame. It unpacks the gaps, patches the exceptions and computes the
prefix sum, which warps do with shuffles.
"""

import torch
import triton
import triton.language as tl

FRAME = 1024
"""Ids per frame, as one GPU block decodes them: 128 threads with eight gaps each."""

MAX_WIDTH = 21
"""Largest bit width: an exception has 21 bits for upper bits, beside 10 for its position."""

WORDS = 384
"""Words per frame, on average, for which there is room: so inputs of all seeds have one shape."""

EXCEPTIONS = 32
"""Exceptions per frame, on average, for which there is room."""


def encode(gaps: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compress frames of gaps; ``starts`` has the id before each frame's first one.

    Returns the words, the exceptions and the header. A frame's row of the header has the positions
    of its first word and its first exception, and its start. The last row has the ends.
    """
    count, device = len(gaps), gaps.device
    widths = torch.arange(1, MAX_WIDTH + 1, device=device)
    too_wide = torch.stack([(gaps >> width > 0).sum(1) for width in range(1, MAX_WIDTH + 1)])
    width = 1 + (FRAME * widths[:, None] + 32 * too_wide).argmin(0)

    first_word = _exclusive_sum(width * (FRAME // 32))
    bit = first_word[:-1, None] * 32 + torch.arange(FRAME, device=device) * width[:, None]
    low = (gaps & ((1 << width) - 1)[:, None]) << bit % 32  # 64 bits: parts of two words
    words = torch.zeros(count * WORDS, dtype=torch.int32, device=device)
    words.index_add_(0, (bit // 32).flatten(), low.int().flatten())  # the bits of gaps are disjoint
    words.index_add_(0, (bit // 32 + 1).flatten(), (low >> 32).int().flatten())

    high = gaps >> width[:, None]
    frame, position = high.nonzero(as_tuple=True)
    exceptions = torch.zeros(count * EXCEPTIONS, dtype=torch.int32, device=device)
    exceptions[: len(frame)] = (high[frame, position] << 10 | position).int()
    first_exception = _exclusive_sum((high > 0).sum(1))
    starts = torch.nn.functional.pad(starts, (0, 1))
    return words, exceptions, torch.stack([first_word, first_exception, starts], 1).int()


def _exclusive_sum(counts):
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


@triton.jit
def _decode(words, exceptions, header, out, FRAME: tl.constexpr):
    frame = tl.program_id(0).to(tl.int64)
    row = header + 3 * frame  # first word, first exception, start; the next row has the ends
    i = tl.arange(0, FRAME)
    first_word = tl.load(row)
    width = (tl.load(row + 3) - first_word) // (FRAME // 32)
    at = words + first_word + i * width // 32
    pair = tl.load(at).to(tl.uint32).to(tl.uint64)  # a gap may begin in one word, end in the next
    pair |= tl.load(at + 1).to(tl.uint32).to(tl.uint64) << 32
    gaps = (pair >> (i * width % 32).to(tl.uint64)).to(tl.int32) & ((1 << width) - 1)
    for e in range(tl.load(row + 1), tl.load(row + 4)):
        exception = tl.load(exceptions + e)
        gaps += tl.where(i == (exception & 1023), (exception >> 10) << width, 0)
    tl.store(out + frame * FRAME + i, tl.load(row + 2) + tl.cumsum(gaps, 0))


def send_plain(_words, _exceptions, _header, ids, out):
    """Copy ids that need no decoding."""
    out.copy_(ids, non_blocking=True)


def decode_on_gpu(words, exceptions, header, _ids, out):
    """Copy the compressed frames, without the unused room, to the GPU and decode them there."""
    end_of_words, end_of_exceptions, _ = header[-1].tolist()
    used = words[: end_of_words + 1], exceptions[:end_of_exceptions], header
    words, exceptions, header = (x.to(out.device, non_blocking=True) for x in used)
    _decode[(len(out),)](words, exceptions, header, out, FRAME=FRAME, num_warps=4)
