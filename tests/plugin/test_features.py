"""The table of hardware features agrees with the assembler."""

import shutil
import subprocess

import pytest

from pytest_aiperf.machine import nvml
from pytest_aiperf.model import FEATURES

PTXAS = shutil.which("ptxas")
INSTRUCTIONS = {
    "fp8": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
    "{f0,f1,f2,f3}, {r0,r1,r2,r3}, {r0,r1}, {f0,f1,f2,f3};",
    "tma": "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[r0], [d0, {r1}], [r2];",
    "clusters": "barrier.cluster.arrive; barrier.cluster.wait;",
    "dsmem": "mapa.shared::cluster.u32 r0, r1, r2; ld.shared::cluster.u32 r3, [r0];",
    "pdl": "griddepcontrol.launch_dependents; griddepcontrol.wait;",
    "wgmma": "wgmma.fence.sync.aligned;",
    "tcgen05": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [r0], 32;",
    "fp4": "cvt.rn.satfinite.e2m1x2.f32 b0, f0, f1;",
}
"""One instruction per feature; that of fp4 converts to the tensor cores' 4-bit format."""

PTX = """
.version 8.8
.target {target}
.address_size 64
.visible .entry kernel() {{
    .reg .b8 b0;
    .reg .b32 r0, r1, r2, r3;
    .reg .b64 d0;
    .reg .f32 f0, f1, f2, f3;
    {instruction}
    ret;
}}
"""


@pytest.mark.skipif(PTXAS is None, reason="ptxas, a part of the CUDA toolkit, is missing")
@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm100", "sm103", "sm121"])
@pytest.mark.parametrize("name", FEATURES)
def test_ptxas_knows_a_feature_where_the_table_has_it(name, arch, tmp_path):
    target = nvml.nvcc_arch(arch)
    source = tmp_path / "kernel.ptx"
    source.write_text(PTX.format(target=target, instruction=INSTRUCTIONS[name]))
    done = subprocess.run(
        [PTXAS, f"-arch={target}", "-o", "/dev/null", source],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    has_feature = int(arch.removeprefix("sm")) in FEATURES[name]
    assert (done.returncode == 0) is has_feature, done.stderr
    if not has_feature:
        assert "not supported" in done.stderr or "requires" in done.stderr
