"""Sending compressed bytes and decoding them on the GPU beats decoding on the CPU's cores.

Sorted ids (of documents, of neighbours in a graph) are kept as the gaps between them, four bits
each instead of 32. The CPU can decode them in all its cores, but then eight times the bytes cross
PCIe, the narrowest part of the way: at 55 GB/s these 32 MiB take 0.6 ms however fast the CPU is.
Sent as they are they take a tenth of that, and the GPU decodes them at the speed of its memory: a
block unpacks a frame of 1024 gaps and sums them up by shuffling partial sums between lanes.

The baseline is a good one: vector operations on all cores, slices that fit their caches, pinned
memory, and transfers that run while later slices are decoded. (Threads of Python's, a slice each,
were slower on 32 cores than one thread: they wait for one another's lock.) "one_thread" shows what
most start with. Frames must be independent, as here by their start, or a GPU has nothing to share
out. The gain ends with the ratio of compression, and where the CPU needs the ids as well.
"""

import os

import pytest
import torch

from kernels.ch05 import gap_codec
from pytest_aiperf import Bench, Compare, evidence, prepared

THREADS = {"all_threads": len(os.sched_getaffinity(0)), "one_thread": 1}


def frames(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, half = bench.size(8192, check=300), gap_codec.FRAME // 2
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
