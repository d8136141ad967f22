"""Wide copies of a tile and its halo beat loads by element; TMA saves a little more.

A stencil computes each point of an array from its neighbors, here two on each side. A block that
computes a tile also loads its halo, the points around the tile that the stencil reads, and zeros
beyond the edges of the array. Loaded by hand, each thread computes the row and column of its
points, tests four edges, loads and stores: a dozen instructions for 2 bytes. In half precision that
takes longer than memory does: 43 % of the rate of a copy on an H200. "by_pair" loads two points at
a time. cp.async copies from device to shared memory without registers. "async_words" copies two
points at a time as well, and "async_vectors" eight, in a box that is widened to whole units of 16
bytes. With a tensor map, one thread requests that same box by its corner ("tensor_map"). The tensor
memory accelerator (TMA) computes the addresses, fills in zeros outside the array, and counts the
bytes on an mbarrier.

Each rung is measured against the one before it, and changes one thing: the width, the instruction,
the width again (such copies bypass the L1 cache as well), and who computes the addresses. On an
H200, "async_words" gains nothing over "by_pair": it saves the trip through registers, but has as
many addresses and tests. This rung claims parity. With 16-byte copies a thread has at most three
addresses to compute, and only those remain for TMA to save: a few percent. An H100 has slower
memory, and "by_pair" reaches 78 % of a copy there (59 % on an H200), so that less is left to gain.
"async_words" gains 8 % there (why was not examined) and "async_vectors" 1 %. All gains shrink with
wider elements (the same instructions, more bytes) and with more arithmetic. The limit is a copy,
and "tensor_map" reaches 82 % of it on an H200 and 88 % on an H100; what takes the rest was not
measured. Resident blocks that request their next tile before they wait for the current one were
slower when tried, probably because the other blocks of an SM hide that wait already. The library
arm is torch.compile of the same stencil; all rungs beat it. Row strides must be multiples of 16
bytes, for 16-byte copies and for the tensor map.
"""

import pytest
import torch
from torch.nn.functional import pad

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
LADDER = ["by_element", "by_pair", "async_words", "async_vectors", "tensor_map"]
PROOF = {
    "by_pair": [evidence.counter(REQUESTS, max=0.55, per="baseline")],  # half as many loads
    "async_words": [evidence.opcode("LDGSTS", kernel="heat_async_words")],
    "async_vectors": [evidence.opcode("LDGSTS*.128", kernel="heat_async_vectors")],
    "tensor_map": [
        evidence.opcode("UTMALDG.2D", kernel="heat_tensor_map"),
        evidence.opcode("LDGSTS", kernel="heat_tensor_map", max=0),  # no thread copies elements
    ],
}


def temperatures(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    # not a multiple of the tile, so edge tiles are partial; rows start at a sector of 32 bytes
    n = bench.size(8240, check=144)
    u = torch.randn(n, n, device=bench.device, dtype=torch.float16)
    return u, torch.empty_like(u), n


@torch.compile(dynamic=False)
def compiled(u, out, _n):
    p = pad(u.float(), (2, 2, 2, 2))
    near = p[1:-3, 2:-2] + p[3:-1, 2:-2] + p[2:-2, 1:-3] + p[2:-2, 3:-1]
    far = p[:-4, 2:-2] + p[4:, 2:-2] + p[2:-2, :-4] + p[2:-2, 4:]
    out.copy_(u + 0.1 * (4 / 3 * near - far / 12 - 5 * u.float()))


def in_fp64(u, out, n):
    p = pad(u.double(), (2, 2, 2, 2))
    near = p[1:-3, 2:-2] + p[3:-1, 2:-2] + p[2:-2, 1:-3] + p[2:-2, 3:-1]
    far = p[:-4, 2:-2] + p[4:, 2:-2] + p[2:-2, :-4] + p[2:-2, 4:]
    return u + 0.1 * (4 / 3 * near - far / 12 - 5 * u.double())


@pytest.mark.gpu(min_sm=90)
@pytest.mark.parametrize("rung", PROOF)
def test_tma_tensor_2d(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    step = nvcc("ch07/heat_step.cu")
    compare(
        baseline=step[LADDER[LADDER.index(rung) - 1]],
        optimized=step[rung],
        library=compiled,
        against="idiomatic" if rung == LADDER[1] else "previous rung",
        inputs=temperatures,
        work=lambda u, out, n: Work(
            read=u.nbytes, written=out.nbytes, flops=13 * u.numel(), dtype="fp32"
        ),
        reference=in_fp64,
        evidence=PROOF[rung],
    )
