"""Lanes that take neighbouring floats use every byte that device memory moves.

Device memory moves sectors of 32 bytes. Lanes that are 32 floats apart touch a sector each and use
4 bytes of it; by the time the neighbours are due the sector has left the L2, so that the copy moves
8 times the bytes. That is not all: the H200 takes 15 times as long as with "coalesced", and sectors
alone do not explain the rest. Neighbouring lanes on neighbouring floats use whole sectors. The
stride itself is the subject here, hence the naive baseline.

The factor needs data well beyond the L2, which otherwise keeps the sectors until they are used up.
The limit is the speed of device memory, reading and writing; cudaMemcpyAsync shows what is to be
had, and 16-byte accesses (test_vectorized_copy.py) close the distance to it.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**27, check=13_315)  # the check has chunks of every size and a tail of 3
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), n


SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"


@pytest.mark.parametrize("rung", ["coalesced", "vector"])
def test_coalesced_copy(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    copy = nvcc("ch07/copy.cu")
    compare(
        baseline=copy["strided"],
        optimized=copy[rung],
        library=copy["cuda_memcpy"],
        against="naive",
        inputs=floats,
        work=lambda a, out, n: Work(bytes=2 * a.nbytes),
        reference=lambda a, out, n: a,
        evidence=[
            evidence.counter(SECTORS, most=0.13, per="baseline"),  # 4 of 32 a warp
            evidence.counter("dram__bytes.sum", most=1.05, per="work"),
        ],
    )
