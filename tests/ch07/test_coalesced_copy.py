"""A copy whose neighboring lanes access neighboring floats beats a copy with a stride.

The L1 and L2 caches transfer sectors of 32 bytes. Lanes that are 32 floats apart touch one sector
each and use 4 bytes of it: 8 times the sectors. Device memory transfers 64 bytes per access, two
sectors. By the time the next column needs them, the L2 has evicted them, so each float costs 64
bytes read and 64 bytes written. The copy moves 16 times the bytes, and takes 16 times as long on an
H200 and 18 times on an H100. Lanes on neighboring floats use whole accesses. cudaMemcpyAsync, the
library arm, is 1.5 times as fast as that on an H200 and 1.23 times on an H100: 4-byte loads do not
reach the speed of memory (test_vectorized_copy.py).

The baseline is naive because the stride is the subject. The effect needs data well beyond the L2,
which otherwise keeps the sectors until all of their bytes are used. The limit is the speed of
device memory, reading and writing. Neither arm reaches it: counting the bytes that DRAM really
moves, both run at 63 to 65 % of the rate of a copy on an H200. On an H100 the strided copy reaches
70 % and the coalesced one 80 %, hence the 18 times. Compared with a copy at full speed, the stride
costs 25x on an H200 and 23x on an H100.
"""

import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**27, check=13_315)  # the check size has whole chunks and a tail of 3 floats
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), n


SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"


def test_coalesced_copy(compare: Compare, nvcc: Nvcc) -> None:
    copy = nvcc("ch07/copy.cu")
    compare(
        baseline=copy["strided"],
        optimized=copy["coalesced"],
        library=copy["cuda_memcpy"],
        against="naive",
        inputs=floats,
        work=lambda a, out, n: Work(read=a.nbytes, written=out.nbytes),
        reference=lambda a, out, n: a,
        evidence=[
            evidence.counter(SECTORS, max=0.13, per="baseline"),  # 4 sectors per warp, not 32
            evidence.counter("dram__bytes.sum", max=0.07, per="baseline"),  # a 16th
        ],
    )
