"""A histogram with counters per block, and then per lane, beats one with a single set of counters.

All additions of a GPU to 256 counters in device memory meet at a few slices of the L2 cache. With
counters per block in shared memory ("shared"), each SM adds on its own, and blocks add up their
counts once at the end. Then 16-byte loads ("vector") keep more bytes in flight and take a sixteenth
of the load and loop instructions; which of the two gains more was not measured. What is left is
mostly the additions. The 32 lanes of a warp add at the same time, each to the counter of its own
byte. These counters lie in random banks of shared memory, and lanes that meet in a bank wait for
each other. With one copy of all counters per lane, each copy in a bank of its own, almost no
conflicts are left ("per_lane"). CUB, the library arm, is faster than "shared", 4 % slower than
"vector" and slower than "per_lane".

Each rung is measured against the one before it; the first baseline is naive. Its calls take either
132 or 276 ms, even within one replicate; why was not examined. Hence the wide interval of "shared".
The limit is one read of the bytes. They are uniformly distributed; skewed bytes, which meet at
fewer counters, are not measured here. The copies take 32 KiB per block for 256 counters, so there
is no room for copies of thousands of counters. On short inputs, clearing and adding up the copies
may cost more than the conflicts.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = ["global", "shared", "vector", "per_lane"]
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
PROOF = {
    "shared": evidence.opcode("ATOMS", kernel="histogram_shared"),
    "vector": evidence.opcode("LDG.E.128", kernel="histogram_vectors<PerBlock>"),
    "per_lane": evidence.counter(CONFLICTS, max=0.2, per="baseline"),
}


def random_bytes(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**30 - 5, check=100_003)  # with a remainder after the last whole vector
    values = torch.randint(256, (n,), dtype=torch.uint8, device=bench.device)
    return values, torch.empty(256, dtype=torch.int32, device=bench.device), n


def exact(values, bins, n):
    parts = (torch.bincount(part.int(), minlength=256) for part in values.split(2**26))
    return sum(parts).int()


@pytest.mark.parametrize("rung", PROOF)
def test_histogram_privatized(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    histogram = nvcc("ch07/histogram.cu")
    compare(
        baseline=histogram[LADDER[LADDER.index(rung) - 1]],
        optimized=histogram[rung],
        library=histogram["cub_histogram"],
        against="naive" if rung == "shared" else "previous rung",
        inputs=random_bytes,
        work=lambda values, bins, n: Work(read=values.nbytes, written=bins.nbytes),
        reference=exact,
        evidence=[PROOF[rung]],
    )
