"""Wider accesses put enough bytes in flight to copy at the speed of device memory.

By Little's law the rate is the bytes in flight over the latency. A full multiprocessor of threads
with one 4-byte load each has 8 KiB in flight, too little to cover the latency of fast memory; with
16-byte loads it has 32 KiB, and takes a quarter of the instructions. That is enough on an H200:
four such loads a thread put 128 KiB in flight and copy no faster, since memory is busy all the time
and more requests only wait longer.

The gain shrinks where memory is slower for each multiprocessor. Addresses must be multiples of 16.
The limit is cudaMemcpyAsync, which moves the same bytes.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**27, check=13_315)  # the check has chunks of every size and a tail of 3
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), n


REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
IN_FLIGHT = {"vector": 1, "vector_unrolled": 4}


@pytest.mark.parametrize("rung", IN_FLIGHT)
def test_vectorized_copy(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    copy, wide = nvcc("ch07/copy.cu"), IN_FLIGHT[rung]
    compare(
        baseline=copy["coalesced"],
        optimized=copy[rung],
        library=copy["cuda_memcpy"],
        against="idiomatic",
        inputs=floats,
        work=lambda a, out, n: Work(bytes=2 * a.nbytes),
        reference=lambda a, out, n: a,
        evidence=[
            evidence.opcode("LDG.E.128", f"copy_vectors<{wide}>", least=wide, most=wide),
            evidence.opcode("STG.E.128", f"copy_vectors<{wide}>", least=wide, most=wide),
            evidence.counter(REQUESTS, most=0.26, per="baseline"),
        ],
    )
