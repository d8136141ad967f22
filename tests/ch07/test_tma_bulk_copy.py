"""Asynchronous copies beat a warp that loads and stores; bulk copies are as fast from one thread.

To saturate device memory, an SM needs tens of kilobytes in flight. A single warp with eight 16-byte
loads per lane has 4 KiB, and each load takes registers. cp.async ("async") writes to shared memory,
so a ring of stages has room for 128 KiB in flight without registers. But the warp still issues
three instructions per 16 bytes and lane: copy, load and store. A bulk copy ("bulk") moves 16 KiB
with one instruction of one thread. The tensor memory accelerator (TMA) computes the addresses and
counts the bytes on an mbarrier, a barrier in shared memory. The thread announces there how many
bytes will come, and waits for them. A second bulk copy writes them back. cudaMemcpyAsync, the
library arm, fills all SMs and is faster than both rungs: a kernel that only copies needs no bulk
copies.

The grid is the same in all rungs: one block of 32 threads per SM. It is small on purpose, like the
producer warp of a warp-specialized kernel, so the first baseline is naive. Each rung is measured
against the one before it. "async" brings the gain: its ring keeps up to 124 KiB in flight, and its
stores no longer wait for a whole batch of loads. Which of the two gains more was not measured.
"bulk" has a ring of the same size and is as fast on an H200, and 6 % faster on an H100. It needs a
ninth of the instructions, which leaves the other issue slots to the other warps of such a kernel.
The limit is a copy, of which the rungs reach nine tenths ("bulk" 95 % on an H100); what keeps a
single block per SM from the rest was not measured. Addresses and sizes must be multiples of 16
bytes.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

INSTRUCTIONS = "smsp__inst_executed.sum"
LADDER = ["loads", "async", "bulk"]
PROOF = {
    "async": [evidence.opcode("LDGSTS*.128", kernel="copy_async")],
    "bulk": [
        evidence.opcode("UBLKCP", kernel="copy_bulk", min=2),  # in and out
        evidence.counter(INSTRUCTIONS, max=0.2, per="baseline"),
    ],
}


def floats(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    # a last stage that is not full, and three floats that are no whole vector
    n = bench.size(2**27 + 1003, check=13_315)
    a = torch.randn(n, device=bench.device)
    return a, torch.empty_like(a), n


@pytest.mark.gpu(features="tma", shared_memory=128 * 2**10)
@pytest.mark.parametrize("rung", PROOF)
def test_tma_bulk_copy(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    copy = nvcc("ch07/bulk_copy.cu")
    compare(
        baseline=copy[LADDER[LADDER.index(rung) - 1]],
        optimized=copy[rung],
        library=copy["cuda_memcpy"],
        against="naive" if rung == LADDER[1] else "previous rung",
        inputs=floats,
        work=lambda a, out, n: Work(read=a.nbytes, written=out.nbytes),
        reference=lambda a, out, n: a,
        evidence=PROOF[rung],
    )
