"""A copy with 16-byte accesses per thread beats one with 4-byte accesses.

By Little's law, bandwidth is bytes in flight over latency. An SM holds up to 2048 threads. With one
4-byte load each they have 8 KiB in flight, too little to cover the latency of fast memory. With
16-byte loads they have 32 KiB, and need a quarter of the instructions. That is enough on an H200:
one such load per thread copies as fast as memory allows, and as fast as cudaMemcpyAsync, the
library arm. Both rungs are judged against the 4-byte copy. "vector_unrolled" makes a second change,
four such loads per thread, which gains nothing more: it is 5 % slower than "vector" and 4 % slower
than cudaMemcpyAsync (1.2 and 0.4 % on an H100).

The evidence shows wider and fewer accesses, which is what the title claims. Neither the latency nor
the bytes that are really in flight are measured. Wider accesses also mean fewer instructions, and
this claim does not separate the two (ch08/bytes_in_flight varies the loads per thread alone). The
gain shrinks where an SM's share of memory bandwidth is smaller. Addresses must be multiples of 16
bytes.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**27, check=13_315)  # the check size has whole chunks and a tail of 3 floats
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
        work=lambda a, out, n: Work(read=a.nbytes, written=out.nbytes),
        reference=lambda a, out, n: a,
        evidence=[
            evidence.opcode("LDG.E.128", f"copy_vectors<{wide}>", min=wide, max=wide),
            evidence.opcode("STG.E.128", f"copy_vectors<{wide}>", min=wide, max=wide),
            evidence.counter(REQUESTS, max=0.26, per="baseline"),
        ],
    )
