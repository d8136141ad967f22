"""A vector addition with 16 bytes per access beats one with one 4-byte element per thread.

With one element per thread, a fully occupied SM has 2048 pairs of 4-byte loads in flight: 16 KiB.
By Little's law, bandwidth is bytes in flight over latency, and fast memory takes more. One float4
per thread has four times the bytes in flight with a quarter of the instructions. Four 4-byte loads
per thread have as many bytes in flight without wide accesses (test_elementwise_ilp.py).

torch.add is the library arm. The limit is the memory bandwidth of two reads and a write. Where the
bytes in flight saturate memory already, or a vector fits in the L2 cache, there is less to gain.
"""

import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"


def vectors(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**27 - 5, check=13_315)  # three elements are left after the last whole vector
    a, b = torch.randn(n, device=bench.device), torch.randn(n, device=bench.device)
    return a, b, torch.empty_like(a), n


def test_vector_add_wide(compare: Compare, nvcc: Nvcc) -> None:
    add = nvcc("ch06/vector_add.cu")
    compare(
        baseline=add["small_blocks"],
        optimized=add["vector"],
        library=lambda a, b, out, n: torch.add(a, b, out=out),
        against="idiomatic",
        inputs=vectors,
        work=lambda a, b, out, n: Work(read=a.nbytes + b.nbytes, written=out.nbytes),
        reference=lambda a, b, out, n: a.double() + b.double(),
        evidence=[
            evidence.opcode("LDG.E.128", kernel="add_vector", min=2),
            evidence.opcode("STG.E.128", kernel="add_vector"),
            evidence.counter(REQUESTS, max=0.26, per="baseline"),
        ],
    )
