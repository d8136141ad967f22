"""A vector addition with four elements per thread beats one with a single element per thread.

With one element per thread, a fully occupied SM has at most 2048 pairs of 4-byte loads in flight:
16 KiB. By Little's law, bandwidth is bytes in flight over latency, and fast memory takes more. With
four 4-byte loads per thread from each vector ("four"), up to four times as many bytes are in
flight, and a quarter as many blocks start and end. How much each of the two gains was not measured.
One float4 per thread ("vector") has as many bytes in flight, in a quarter of the instructions. It
takes the same time, because "four" reaches the memory bandwidth already: this rung claims parity.

torch.add, the library arm, is as fast as both rungs. At 99 % of the copy rate nothing is left to
gain. The limit is the memory bandwidth of two reads and a write. Where the bytes in flight saturate
memory already, there is less to gain: "four" gains 1.26x on an H200, and 1.10x on an H100, whose
slower memory needs fewer bytes in flight. Vectors that fit in the L2 cache may gain less, too.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = ["small_blocks", "four", "vector"]
REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
PROOF = {
    "four": [evidence.opcode("LDG.E", kernel="add_four", min=8)],  # in flight together
    "vector": [
        evidence.opcode("LDG.E.128", kernel="add_vector", min=2),
        evidence.opcode("STG.E.128", kernel="add_vector"),
        evidence.counter(REQUESTS, max=0.26, per="baseline"),
    ],
}


def vectors(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**27 - 5, check=13_315)  # three elements are left after the last whole vector
    a, b = torch.randn(n, device=bench.device), torch.randn(n, device=bench.device)
    return a, b, torch.empty_like(a), n


@pytest.mark.parametrize("rung", PROOF)
def test_vector_add_wide(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    add = nvcc("ch06/vector_add.cu")
    compare(
        baseline=add[LADDER[LADDER.index(rung) - 1]],
        optimized=add[rung],
        library=lambda a, b, out, n: torch.add(a, b, out=out),
        against="idiomatic" if rung == "four" else "previous rung",
        inputs=vectors,
        work=lambda a, b, out, n: Work(read=a.nbytes + b.nbytes, written=out.nbytes),
        reference=lambda a, b, out, n: a.double() + b.double(),
        evidence=PROOF[rung],
    )
