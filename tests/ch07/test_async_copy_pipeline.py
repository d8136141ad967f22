"""A block that copies its next tiles while it computes beats one that loads, waits and computes.

The depth of the pipeline matters more than cp.async. On an H200, a synchronous kernel takes 244 µs,
"two_stages" 207 µs (1.18x) and "four_stages" 158 µs (1.31x more, 1.54x in all). The library arm
prefetches the next tile into registers without cp.async and takes 200 µs: it is faster than
"two_stages", which reaches 0.96 of its speed (why was not examined). "four_stages" is 1.26 times as
fast as the library arm.

A dynamic range compressor turns loud passages down: an envelope follows the level of a signal, fast
upwards and slowly downwards, and sets the gain. Each step compares the level with the envelope of
the step before, so the recurrence is not linear, and one thread computes one signal. 16,384 signals
of 4,000 samples (a quarter of a second at 16 kHz) make 128 blocks of 128 threads. An H200 has 132
SMs, so each runs one block of four warps at most. The samples of a signal are neighbors in memory:
a block copies tiles of 128 signals x 32 samples (16 KiB) to shared memory, coalesced, each thread
walks along its row of the tile, and the block writes the tile back.

"synchronous", the first baseline, is the usual form: load a tile into registers, store it to shared
memory, wait at a barrier, compute. No load is in flight while it computes. Each of 125 tiles takes
2.0 µs; at the speed of a copy it would take 1.0 µs. "two_stages" has a second buffer (double
buffering) and copies one tile with cp.async while it computes: 1.7 µs. "four_stages" has up to
three tiles in flight, 48 KiB per SM, so a copy has two more turns of the loop to arrive: 1.3 µs.
Tiles, grid and arithmetic are the same. Stalls on device memory (long scoreboard), per issued
instruction, fall to 0.63 and then to 0.44 of that; stalls at barriers were not counted. Occupancy
is 6 % in all rungs.

The limit is a copy: the rungs reach 50, 59 and 77 % of its speed, the library arm 61 %. What binds
"four_stages" was not examined. Three tiles in registers would take 96 per thread, which fits here,
and blocks of one warp would put four on each SM, one of which could compute while others wait:
neither was measured. More signals leave less to gain, and stages can cost occupancy. Signals that
are stored sample by sample need no staging; a linear filter has more threads if computed as a scan.
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
        # cp.async needs no stores to shared memory; fewer instructions alone would raise this ratio
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
