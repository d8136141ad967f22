"""Threads with several independent elements beat threads with one element each.

Load, eight dependent FMAs, store: within one element every instruction waits for the previous one.
With one element per thread a fully occupied SM has at most 2048 loads of 4 bytes in flight, 8 KiB,
too little to saturate fast memory. With four, a thread has four loads in flight before it needs the
first. The FMAs of one element also fill the latency of another's, but that hardly counts here: a
plain copy with one element per thread is hardly faster (ch07/vectorized_copy). The accesses are as
wide and as coalesced as before. More elements per thread are also fewer blocks to start and end;
how much of the gain that brings was not measured. The library arm is torch.compile of the
polynomial. On H200s it is always faster than "two". In all sessions but one it is as fast as "four"
and 3 % faster than "eight"; in that one it takes 9 % longer than "four", and why was not examined.

The limit is memory bandwidth. "four" reaches 97 % of the copy rate on an H200. "eight" is slower
than "four", by 3 % on an H200 and 1 % on an H100: once bandwidth is reached, more loads in flight
cannot help. What makes it slower was not measured; it is not occupancy, because its 22 registers
per thread still let 2048 threads fit an SM. Where one load per thread already saturates memory
(16-byte loads), there is nothing to gain; where memory is slower, there is less: 1.27x on an H100
against 1.58x on an H200.
"""

import math

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

ELEMENTS = {"two": 2, "four": 4, "eight": 8}


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**26 + 1000, check=13_315)  # with a remainder after the last whole chunk
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), n


def power_series(a, out, n):
    powers = torch.ones_like(a, dtype=torch.float64)
    total = powers.clone()
    for k in range(1, 9):
        total.add_(powers.mul_(a), alpha=1 / math.factorial(k))
    return total


@torch.compile(dynamic=False)
def horner(a, out, _n):
    y = 1 / math.factorial(8)
    for k in reversed(range(8)):
        y = y * a + 1 / math.factorial(k)
    out.copy_(y)


@pytest.mark.parametrize("rung", ELEMENTS)
def test_elementwise_ilp(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    evaluate = nvcc("ch06/elementwise_ilp.cu")
    compare(
        baseline=evaluate["one"],
        optimized=evaluate[rung],
        library=horner,
        inputs=floats,
        work=lambda a, out, n: Work(read=a.nbytes, written=out.nbytes, flops=16 * n, dtype="fp32"),
        reference=power_series,
        evidence=[
            # the loop over the remainder contains one more load
            evidence.opcode("LDG.E", kernel=rung.title(), min=ELEMENTS[rung] + 1),
            evidence.spills(),
        ],
    )
