"""Reading one field of many particles from an array of its own beats reading it from structures.

The kernels compute `out = factor * charge` for 32 Mi particles of 16 floats, 64 bytes: one field of
16 is read. In an array of structures (AoS), the charges of neighboring particles are 64 bytes
apart. Memory transfers whole sectors of 32 bytes, and a lone sector costs a DRAM access of 64
bytes, so each 4-byte field costs as much as the whole particle. In a structure of arrays (SoA,
"soa"), or an array of structures of arrays of 32 ("aosoa"), the lanes of a warp read neighboring
floats: whole sectors. Both are measured against AoS, the first arm, and only the layout differs.
Neighboring floats can also be loaded 16 bytes at a time, which gains another 1.5x on an H200
("soa_vector", measured against "soa"): 7.9x over AoS. The groups of "aosoa" would allow that as
well, but no arm does it. "aosoa" takes 6 % longer than "soa" on an H200; why was not measured. The
library arm, torch.mul on the array of the field, is as fast as "soa_vector" and faster than the
rungs with 4-byte loads. Both reach 92 to 95 % of the copy rate; what takes the rest was not
measured.

The gain is limited by the bytes per particle: 64 read and 4 written against 4 and 4, which is 8.5x.
It shrinks with every further field that is used, and a kernel that uses all fields of each particle
gains nothing in bytes. Then an AoSoA keeps a particle's fields near each other. Converting between
layouts costs a pass over all fields, which is not timed: the data are assumed to stay in one
layout.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

CHARGE = 7  # position of the field in a particle, as in the kernels
FIELDS = 16
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
LAYOUT = [
    evidence.counter(SECTORS, max=0.13, per="baseline"),  # 4 sectors per warp, not 32
    evidence.counter("dram__bytes.sum", max=0.25, per="baseline"),
]
PROOF = {
    "aosoa": LAYOUT,
    "soa": LAYOUT,
    "soa_vector": [
        evidence.opcode("LDG.E.128", kernel="scale_soa_vector"),
        evidence.opcode("STG.E.128", kernel="scale_soa_vector"),
    ],
}

Particles = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, int, int]


def particles(bench: Bench) -> Particles:
    n = bench.size(2**25 - 5, check=13_315)  # the last group and the last vector are partial
    groups = -(-n // 32)
    soa = torch.randn(FIELDS, groups * 32, device=bench.device)
    aosoa = soa.view(FIELDS, groups, 32).transpose(0, 1).contiguous()
    aos = soa.T.contiguous()
    return aos, aosoa, soa, torch.empty(n, device=bench.device), 1.5, n, groups * 32


@pytest.mark.parametrize("rung", PROOF)
def test_aos_to_soa(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    scale = nvcc("ch07/structure_layout.cu")
    compare(
        baseline=scale["soa" if rung == "soa_vector" else "aos"],
        optimized=scale[rung],
        library=lambda aos, aosoa, soa, out, factor, n, _: torch.mul(
            soa[CHARGE, :n], factor, out=out
        ),
        against="previous rung" if rung == "soa_vector" else "idiomatic",
        inputs=particles,
        work=lambda aos, aosoa, soa, out, *_: Work(read=out.nbytes, written=out.nbytes),
        reference=lambda aos, aosoa, soa, out, factor, n, _: soa[CHARGE, :n].double() * factor,
        evidence=PROOF[rung],
    )
