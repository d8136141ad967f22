"""A block that copies its next tiles while it computes beats one that loads, waits and computes.

A dynamic range compressor turns loud passages down: an envelope follows the level of a signal, fast
upwards and slowly downwards, and sets the gain. Each step compares the level with the envelope of
the step before, so the recurrence is not linear, and one thread computes one signal. 16,384 signals
of 4,000 samples (a quarter of a second at 16 kHz) make 128 blocks of 128 threads. An H200 has 132
SMs, so each runs one block of four warps at most. The samples of a signal are neighbors in memory:
a block copies tiles of 128 signals x 32 samples (16 KiB) to shared memory, coalesced, each thread
walks along its row of the tile, and the block writes the tile back.

"synchronous", the first baseline, is the usual form: load a tile into registers, store it to shared
memory, wait at a barrier, compute. Nothing is in flight while it computes, and no other block fills
the gap. At 4.2 TB/s, a tile and its result take 1 µs per SM; latency and compute come on top. With
cp.async and a second buffer (double buffering), "two_stages" copies the next tile while it
computes. That hides a part of the latency, but only one tile is in flight. "four_stages" has up to
three in flight, 48 KiB per SM: each copy has two more turns of the loop to arrive. Each rung is
measured against the one before it; tiles, grid and arithmetic are the same. The library arm
prefetches the next tile into registers, 32 per thread: the overlap of "two_stages" without
cp.async. What cp.async adds is room: a tile in flight takes shared memory instead of registers.

The limit is a copy. With several blocks per SM, one computes while another waits: more signals
leave less to gain, and stages can cost occupancy. Signals that are stored sample by sample need no
staging, and a linear filter has more threads if it is computed as a scan. With more arithmetic per
sample, the compute becomes the limit.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

ATTACK, RELEASE, SLOPE = 0.875, 255 / 256, -0.75  # as in the kernels
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
WAITING = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
LADDER = ["synchronous", "two_stages", "four_stages"]
PROOF = {
    "two_stages": [
        # one tile before the loop and one in it, eight copies per thread each
        evidence.opcode("LDGSTS*.128", kernel="compress_async<2>", min=16),
        # as many instructions, but warps compute for a part of the time that they waited
        evidence.counter(WAITING, max=0.9, per="baseline"),
    ],
    "four_stages": [
        # three tiles before the loop
        evidence.opcode("LDGSTS*.128", kernel="compress_async<4>", min=32),
        # the same loop, so any time that it saves is time that warps do not wait
        evidence.counter(WAITING, max=0.95, per="baseline"),
    ],
}


def signals(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    # the check ends within a block and within a tile
    count, samples = bench.size(16_384, check=133), bench.size(4000, check=332)
    loudness = 2 * torch.rand(count, 1, device=bench.device)  # a part stays below a level of 1
    x = torch.randn(count, samples, device=bench.device).mul_(loudness)
    return x, torch.empty_like(x), count, samples


def in_fp64(x, *_):
    envelopes = x.double().abs().T.contiguous()  # first the levels, one row per step
    envelope = torch.zeros_like(envelopes[0])
    for level in envelopes:
        rate = torch.where(level > envelope, 1 - ATTACK, 1 - RELEASE)
        envelope = level.copy_(envelope + rate * (level - envelope))
    return envelopes.clamp_(min=1).pow_(SLOPE).T * x


@pytest.mark.gpu(min_sm=80, shared_memory=72 * 2**10)
@pytest.mark.parametrize("rung", PROOF)
def test_async_copy_pipeline(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    # logarithm and power on the special function units: their error is below fp32's tolerance
    compress = nvcc("ch07/async_copy_pipeline.cu", ["--use_fast_math"])
    compare(
        baseline=compress[LADDER[LADDER.index(rung) - 1]],
        optimized=compress[rung],
        library=compress["registers"],
        against="idiomatic" if rung == LADDER[1] else "previous rung",
        inputs=signals,
        work=lambda x, out, *_: Work(
            read=x.nbytes, written=out.nbytes, flops=10 * x.numel(), dtype="fp32"
        ),
        reference=in_fp64,
        evidence=[
            *PROOF[rung],
            evidence.counter(OCCUPANCY, max=7),  # a condition: four of 64 warps in all rungs
            evidence.spills(kernel="compress_async"),
        ],
    )
