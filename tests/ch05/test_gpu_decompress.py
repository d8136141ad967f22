"""Sending compressed ids and decoding them on the GPU beats sending plain ids over PCIe.

The ids are the posting lists of a search index: for each term, the sorted numbers of the documents
that contain it. A codec stores the gaps between ids in frames of 1024, and packs a frame's gaps
with as many bits as it needs. The few gaps that need more bits are exceptions, stored apart. This
codec is called patched frame of reference (PFOR). PCIe is the slowest link of the ids' path to the
GPU, and compressed ids take about a quarter of its time. Decoding on the GPU adds little: one block
unpacks a frame, patches the exceptions and computes the prefix sum with warp shuffles.

In the baseline, the ids lie decoded in pinned memory and a single copy sends them. A decoder on the
CPU cannot deliver them faster than that, however many cores it uses. The limit is the ratio of
compression, 3.8 here. The decoding kernel takes 0.11 of the 0.8 ms of a call, so the gain is only
3.05x to 3.12x on H200s and an H100. The ratio follows from the data. By Zipf's law, the term of
rank r is in one of 2 r documents, and the 1,279 most frequent terms of 8.8 million documents have
33.5 million ids. Documents are numbered at random, so gaps are geometric. These are the hardest
gaps for a codec: it needs 8.3 bits per id. If similar documents get similar numbers, as in many
indexes, ids compress further.

Frames must be independent, as here by their starts, or blocks cannot decode in parallel. There is
no gain where the CPU needs the ids as well, or where they stay on the GPU. nvCOMP, NVIDIA's library
of codecs for GPUs, is what an expert tries first; it was not compared.
"""

import torch

from kernels.ch05 import gap_codec
from pytest_aiperf import Bench, Compare, evidence


def posting_lists(bench: Bench) -> tuple[torch.Tensor, ...]:
    """Draw gaps; return the compressed frames and the ids on the host, and a buffer for the ids.

    The full size is 128 MiB of ids, so that the few launches of a call take little of its time.
    Each list is shortened to whole frames.
    """
    count, frame = bench.size(32768, check=20), gap_codec.FRAME
    documents = 270 * count
    frames: list[int] = []  # of each list, by rank
    while sum(frames) < count:
        length = max(documents // (2 * len(frames) + 2) // frame, 1)
        frames.append(min(length, count - sum(frames)))
    per_list = torch.tensor(frames, device=bench.device)
    frequency = 1 / (2 * torch.arange(1, len(frames) + 1, device=bench.device))
    rate = -torch.log1p(-frequency).repeat_interleave(per_list)
    waits = torch.empty(count, frame, device=bench.device).exponential_()
    gaps = 1 + (waits / rate[:, None]).long()  # geometric, as documents are in random order

    first = per_list.cumsum(0) - per_list
    before = gaps.sum(1).cumsum(0) - gaps.sum(1)
    starts = before - before[first].repeat_interleave(per_list)  # lists begin at document 0
    ids = starts[:, None] + gaps.cumsum(1)
    parts = *gap_codec.encode(gaps, starts), ids.int()
    return *map(on_host, parts), torch.empty_like(ids, dtype=torch.int32)


def on_host(x):
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)


def bit_by_bit(words, exceptions, header, _ids, out):
    words, exceptions, header = (x.to(out.device).long() for x in (words, exceptions, header))
    first_word, first_exception, starts = header.T
    width = first_word.diff() // 32
    first_bit = 32 * first_word[:-1, None] + torch.arange(1024, device=out.device) * width[:, None]
    gaps = torch.zeros_like(first_bit)
    for k in range(int(width.max())):
        bit = first_bit + k
        gaps += (k < width)[:, None] * ((words[bit // 32] >> bit % 32 & 1) << k)
    frame = torch.arange(len(out), device=out.device).repeat_interleave(first_exception.diff())
    exceptions = exceptions[: len(frame)]
    gaps[frame, exceptions % 1024] += exceptions // 1024 * 2 ** width[frame]
    return starts[:-1, None] + gaps.cumsum(1)


def test_gpu_decompress(compare: Compare) -> None:
    compare(
        baseline=gap_codec.send_plain,
        optimized=gap_codec.decode_on_gpu,
        inputs=posting_lists,
        reference=bit_by_bit,
        metric="wall",
        cache="warm",
        evidence=[
            # 8.3 bits of 32
            evidence.copied_bytes("host to device", memory="pinned", max=0.28, per="baseline"),
            evidence.opcode("SHFL.UP", kernel="_decode"),  # the prefix sum
        ],
    )
