"""Comparing a query with vectors of halves is almost twice as fast as with vectors of floats.

Nearest-neighbor search computes the distance of a query to every stored vector. That is one
subtraction, square and addition per element, far below the ridge of the roofline, so the bytes of
the elements set the time. Two bytes per element instead of four ("halves") halve it if as many
bytes stay in flight: each lane has eight loads of 16 bytes in flight in all arms, which are one
vector of floats or two of halves. A kernel that only replaces its float by a half per load also
halves its bytes in flight, and may gain nothing (ch08/bytes_in_flight). On H200s, "halves" takes 53
% of the time rather than 50. Both arms, with about 124 and 66 µs, take 7 to 8 µs longer than a read
of their bytes at 4.6 TB/s, and 10 to 12 in one session. That part does not halve; it may be the
start and the end of the kernel. The library arm, a kernel of torch.compile on the same halves,
takes 1.2 to 1.3 times as long as "halves" on H200s. On an H100 it is faster than both rungs: it
takes 3 % less than "halves" and 2 % less than "packed".

"halves" converts elements to fp32 when they are in registers, so nothing is lost but the precision
of the stored values. "packed" subtracts, squares and adds two halves per instruction (half2, HADD2
and HFMA2) instead: fewer instructions and rounded sums. Memory sets the time of both, so this rung
gains only 1 %. Packed arithmetic pays where arithmetic is the limit, for example with values in
shared memory.

The limit is a read of the halves. Vectors of all arms have the same values, those of the halves;
whether fp16 suffices for an application (its range ends at 65504) is a question of its own.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

LADDER = ["floats", "halves", "packed"]
PROOF = {
    "halves": evidence.counter("dram__bytes_read.sum", max=0.52, per="baseline"),
    "packed": evidence.counter("smsp__inst_executed.sum", max=0.8, per="baseline"),
}
Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]


def vectors(bench: Bench) -> Vectors:
    """Draw vectors and a query as halves, the same as floats, and make room for the distances."""
    n, length = bench.size(2**17 + 5, check=37), 1024
    halves = torch.randn(n, length, device=bench.device).half()
    query = torch.randn(length, device=bench.device).half()
    return halves.float(), query.float(), halves, query, torch.empty(n, device=bench.device), n


@torch.compile(dynamic=False)
def compiled(_floats, _query, halves, query, out, n):
    out.copy_((halves.float() - query.float()).square().sum(1))


def in_fp64(_floats, _query, halves, query, out, n):
    differences = (part.double() - query.double() for part in halves.split(8192))
    return torch.cat([part.square().sum(1) for part in differences])


@pytest.mark.parametrize("rung", PROOF)
def test_half2_distances(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    distances = nvcc("ch09/distances.cu")
    compare(
        baseline=distances[LADDER[LADDER.index(rung) - 1]],
        optimized=distances[rung],
        library=compiled,
        against="idiomatic" if rung == "halves" else "previous rung",
        inputs=vectors,
        work=lambda _floats, _query, halves, query, out, n: Work(
            read=halves.nbytes, written=out.nbytes, flops=3 * halves.numel(), dtype="fp32"
        ),
        reference=in_fp64,
        precision="fp16" if rung == "packed" else None,
        evidence=[PROOF[rung]],
    )
