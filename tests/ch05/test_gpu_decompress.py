"""Sending compressed ids and decoding them on the GPU beats decoding them on the CPU's cores.

Sorted ids (of documents, of neighbours in a graph) are stored as the gaps between them, four bits
each instead of 32. If the CPU decodes them, eight times the bytes cross PCIe, the slowest link of
the path. Sent compressed, they take an eighth of the transfer time. Decoding on the GPU adds
little: one block unpacks a frame of 1024 gaps and computes their prefix sum with warp shuffles.

In the baseline a C loop decodes the frames on all cores into pinned memory, in slices; each slice's
transfer overlaps the decoding of later ones. "one_thread" decodes on one core and is the naive
form. Where PCIe limits both arms, the gain is the compression ratio, 8x. It is larger where the
cores decode more slowly than PCIe transfers. Frames must be independent, as here by their own
start, or neither cores nor blocks can decode in parallel. There is no gain where the CPU needs the
ids as well.
"""

import os

import pytest
import torch

from kernels.ch05 import gap_codec
from pytest_aiperf import Bench, Compare, evidence, prepared

THREADS = {"all_threads": len(os.sched_getaffinity(0)), "one_thread": 1}


def frames(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, half = bench.size(8192, check=20), gap_codec.FRAME // 2
    gaps = torch.randint(0, 16, (count, half, 2), device=bench.device, dtype=torch.uint8)
    sums = gaps.sum((1, 2), dtype=torch.int64)
    starts = (sums.cumsum(0) - sums).int()
    packed = gaps[..., 0] | gaps[..., 1] << 4
    out = torch.empty(count, gap_codec.FRAME, dtype=torch.int32, device=bench.device)
    return on_host(packed), on_host(starts), out


def on_host(x):
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)


def prefix_sums(packed, starts, out):
    packed = packed.to(out.device)
    gaps = torch.stack([packed % 16, packed // 16], 2).flatten().long()
    return (starts[0].item() + gaps.cumsum(0)).view(out.shape)


@pytest.mark.parametrize("baseline", THREADS)
def test_gpu_decompress(compare: Compare, baseline: str) -> None:
    compare(
        baseline=prepared(gap_codec.decode_on_cpu(THREADS[baseline])),
        optimized=gap_codec.decode_on_gpu,
        against="naive" if baseline == "one_thread" else "idiomatic",
        inputs=frames,
        reference=prefix_sums,
        metric="wall",
        cache="warm",
        # two copies and one kernel, which adds across lanes
        evidence=[evidence.launches(max=3), evidence.opcode("SHFL.UP", kernel="_decode")],
    )
