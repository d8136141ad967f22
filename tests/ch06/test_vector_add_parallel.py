"""A vector addition by a grid of blocks beats one by a block, which beats one by a single thread.

A GPU is fast because thousands of threads wait for memory at the same time. A single thread uses
one lane of a single streaming multiprocessor (SM). On an H200 it takes 59 ns per element, far less
than one access to memory takes. A sector holds eight floats, so most likely the thread waits once
per eight elements (0.47 µs). The warps of a block of 1024 threads wait at the same time, so it
takes 0.42 µs per 1024 elements, about one such wait. The gain is 128x to 144x on H200s, not 1024x.
A grid of many such blocks uses all 132 SMs. It takes only about 6 µs, of which its start and its
end are most likely a large part: a gain of 71x to 75x. torch.add, the library arm, takes 22 % less
time than the grid on an H200 and 12 % less on an H100.

Each rung changes only the launch and the index of an element, and is measured against the one
before. The first two are naive: nobody would run them, but they show what a block and a grid are
for. The limit is memory bandwidth, which takes longer vectors and more loads in flight per thread
(test_vector_add_wide.py). These vectors are short, so that the single thread finishes.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = ["one_thread", "one_block", "grid"]
REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
PROOF = {
    # the 32 lanes of a warp load with one instruction
    "one_block": evidence.counter(REQUESTS, max=0.04, per="baseline"),
    "grid": evidence.grid_size(min=500),  # the baseline is one block
}


def vectors(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**20 + 3, check=5003)  # the last block is partly beyond the end
    a, b = torch.randn(n, device=bench.device), torch.randn(n, device=bench.device)
    return a, b, torch.empty_like(a), n


@pytest.mark.parametrize("rung", PROOF)
def test_vector_add_parallel(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    add = nvcc("ch06/vector_add.cu")
    compare(
        baseline=add[LADDER[LADDER.index(rung) - 1]],
        optimized=add[rung],
        library=lambda a, b, out, n: torch.add(a, b, out=out),
        against="naive",
        inputs=vectors,
        work=lambda a, b, out, n: Work(read=a.nbytes + b.nbytes, written=out.nbytes),
        reference=lambda a, b, out, n: a.double() + b.double(),
        evidence=[PROOF[rung]],
    )
