"""A copy whose neighbouring lanes access neighbouring floats beats a copy with a stride.

Device memory transfers sectors of 32 bytes. Lanes that are 32 floats apart touch one sector each
and use 4 bytes of it. By the time the next column needs the sector, the L2 has evicted it, so the
copy moves at least 8 times the bytes. Lanes on neighbouring floats use whole sectors. A slowdown
beyond 8x has further causes (such as reading a partly written sector before it is written back)
that this claim does not separate; the counter of DRAM bytes shows how much traffic there is.

The baseline is naive because the stride is the subject. The effect needs data well beyond the L2,
which otherwise keeps the sectors until all of their bytes are used. The limit is the speed of
device memory, reading and writing. cudaMemcpyAsync, the library arm, shows what is possible, and
16-byte accesses (test_vectorized_copy.py) come close to it.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**27, check=13_315)  # the check size has whole chunks and a tail of 3 floats
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
        work=lambda a, out, n: Work(read=a.nbytes, written=out.nbytes),
        reference=lambda a, out, n: a,
        evidence=[
            evidence.counter(SECTORS, max=0.13, per="baseline"),  # 4 sectors per warp, not 32
            evidence.counter("dram__bytes.sum", max=1.05, per="work"),
        ],
    )
