"""Sending compressed bytes and decoding them on the GPU beats decoding on the CPU's cores.

Sorted ids (of documents, of neighbours in a graph) are kept as the gaps between them, four bits
each instead of 32. The CPU can decode them in all its cores, but then eight times the bytes cross
PCIe, the narrowest part of the way: at 55 GB/s these 32 MiB take 0.6 ms however fast the CPU is.
Sent as they are they take an eighth of that, which binds the optimized call; the GPU's decoding
adds little: a block unpacks a frame of 1024 gaps and sums them up by shuffling partial sums between
lanes.

The baseline is a good one: a loop in C over the frames, shared out among all cores, into pinned
memory, in slices whose transfer runs while later ones are decoded. With cores enough PCIe binds it,
and it can be no faster. "one_thread" is what most start with: one core decodes, and that core binds
it. Frames must be independent, as here by their start, or neither cores nor GPU have anything to
share out. The gain ends with the ratio of compression, and where the CPU needs the ids as well.
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


def running_sums(packed, starts, out):
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
        reference=running_sums,
        metric="wall",
        cache="warm",
        # two copies and a kernel, which sums up across lanes
        evidence=[evidence.launches(most=3), evidence.opcode("SHFL.UP", kernel="_decode")],
    )
