"""Evidence is checked in compiled code, in counts of launches, and in counters."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_aiperf.build import nvcc, sass
from pytest_aiperf.errors import BuildError, UsageError
from pytest_aiperf.model import EvidenceKind, KernelRecord, Result, Trace, Work
from pytest_aiperf.rules import evidence
from pytest_aiperf.rules.evidence import (
    Compiled,
    Facts,
    broken,
    hold,
    not_looked_at,
)
from pytest_aiperf.schema import from_json, to_json
from tests.plugin.records import result

SASS = """
Fatbin elf code:
================
arch = sm_90a

Resource usage:
 Common:
  GLOBAL:0
 Function void copy<4>(float*):
  REG:26 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0

	code for sm_90a
		Function : void copy<4>(float*)
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;             /* 0x00000a00ff017b82 */
                                                                      /* 0x000fe20000000800 */
        /*0090*/              @!P0 LDG.E.128 R12, desc[UR4][R2.64] ;  /* 0x0000000000400947 */
        /*00a0*/             @!UPT UIADD3 URZ, URZ, URZ, URZ ;        /* 0x0000000000400947 */
        /*10a0*/                   LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ; /* 0x00 */
"""


def kernel(function, arch="sm_90a", registers=32, spills=0, **opcodes):
    record = KernelRecord("k.cu", arch, function, registers, spills, 0)
    return Compiled(record, {name.replace("_", "."): n for name, n in opcodes.items()})


CODE = (
    kernel("void copy<1>(float*)", LDG_E_128=1, EXIT=2),
    kernel("void copy<4>(float*)", registers=64, LDG_E_128=4, EXIT=1),
    kernel("void copy<4>(float*)", "sm_100a", registers=66, spills=8, LDG_E_128=4, EXIT=1),
)
FIGURES = {
    "baseline": {"launches": 40, "dram__bytes.sum": 800.0, "conflicts": 0, "peak memory": 100},
    "optimized": {
        "launches": 1,
        "dram__bytes.sum": 100.0,
        "conflicts": 3,
        "peak memory": 50,
        "page faults": 7,
        "idle": 0.374826,
        "sectors": 2_500_000,
    },
}
SM100 = "void copy<4>(float*) (k.cu, sm_100a)"
ARM = "the optimized arm"
FACTS = Facts(CODE, complete=True, figures=FIGURES, work=Work(read=40, written=40))


@pytest.mark.parametrize(
    "piece",
    [
        evidence.opcode("LDG.E.128"),
        evidence.opcode("LDG.E.128", "copy<4>", min=4, max=4),
        evidence.opcode("LDG.E"),
        evidence.opcode("L*.128"),
        evidence.opcode("LDL", max=0),
        evidence.opcode("LD", max=0),
        evidence.registers(max=66, kernel="copy<4>"),
        evidence.spills(max=8, kernel="copy<4>"),
        evidence.launches(max=1),
        evidence.launches(max=0.1, per="baseline"),
        evidence.counter("dram__bytes.sum", max=1.25, per="work"),
        evidence.counter("dram__bytes.sum", min=0.125, max=0.125, per="baseline"),
        evidence.peak_memory(max=0.5, per="baseline"),
    ],
)
def test_evidence_holds(piece):
    (finding,) = hold([piece], FACTS)
    assert finding.held
    assert finding.value is not None
    assert broken([finding]) == ""


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (
            evidence.opcode("UTMALDG", "copy<4>"),
            "void copy<4>(float*) (k.cu, sm_90a) has 0 UTMALDG; the claim states at least 1",
        ),
        (evidence.opcode("HGMMA"), "k.cu for sm_90a has 0 HGMMA; the claim states at least 1"),
        (
            evidence.opcode("LDG.E.128", "copy", min=4),
            "void copy<1>(float*) (k.cu, sm_90a) has 1 LDG.E.128; the claim states at least 4",
        ),
        (
            evidence.opcode("EXIT", max=1),
            "k.cu for sm_90a has 3 EXIT; the claim states at most 1",
        ),
        (
            evidence.registers(max=64, kernel="copy<4>"),
            f"{SM100} has 66 registers per thread; the claim states at most 64",
        ),
        (
            evidence.spills(),
            f"{SM100} has 8 bytes of spills per thread; the claim states at most 0",
        ),
        (
            evidence.launches(max=0),
            "the optimized arm has 1 launches per call; the claim states at most 0",
        ),
        (
            evidence.counter("dram__bytes.sum", max=0.1, per="baseline"),
            f"{ARM} has 0.125 times the baseline's dram__bytes.sum; the claim states at most 0.1",
        ),
        (
            evidence.counter("conflicts", max=0.1, per="baseline"),
            f"the baseline has 0, and {ARM} has 3 conflicts; the claim states at most 0.1",
        ),
        (
            evidence.page_faults(max=0),
            "the optimized arm has 7 page faults per call; the claim states at most 0",
        ),
        (
            evidence.counter("dram__bytes.sum", min=2, max=3, per="work"),
            f"{ARM} has 1.25 dram__bytes.sum per byte of work; the claim states at least 2",
        ),
        (
            evidence.counter("idle", max=0.25),
            f"{ARM} has 0.3748 idle; the claim states at most 0.25",
        ),
        (
            evidence.counter("sectors", max=2_000_000),
            f"{ARM} has 2,500,000 sectors; the claim states at most 2,000,000",
        ),
    ],
)
def test_evidence_that_fails_is_reported_with_figure_and_bound(piece, message):
    (finding,) = hold([piece], FACTS)
    assert not finding.held
    assert broken([finding]).startswith(message)


@pytest.mark.parametrize(
    "piece",
    [
        evidence.kernels(max=1),
        evidence.graph_breaks(),
        evidence.counter("l1", max=1, per="baseline"),
    ],
)
def test_evidence_without_a_figure_neither_holds_nor_fails(piece):
    (finding,) = hold([piece], FACTS)
    assert (finding.value, finding.held) == (None, None)
    assert broken([finding]) == ""
    assert not_looked_at([finding]).startswith(f"evidence was not looked at: {piece.kind}")


def test_the_reason_of_a_missing_figure_is_part_of_its_finding():
    piece, seen = evidence.counter("l1.sum", max=1), evidence.launches(max=1)
    facts = replace(FACTS, reasons={EvidenceKind.COUNTER: "counters are reserved"})
    findings = hold([piece, seen], facts)
    assert not_looked_at(findings) == (
        "evidence was not looked at: counter l1.sum (counters are reserved)"
    )
    assert not_looked_at(findings[1:]) == ""


# the same evidence on the baseline

TRACE = Trace(
    launches=2, kernels=4, copies=2, busy=8.0, span=10.0, names=("void copy<4>(float *)", "gemm"),
    counts=(3, 1), grids=(64, 0), total=12.0, copying=4.0, hidden=3.0,
    copied={"host to device (pinned)": 70, "host to device (pageable)": 30}, api_calls=9,
)  # fmt: skip


@pytest.mark.parametrize(
    ("piece", "value"),
    [
        (evidence.launches(max=1), 2),
        (evidence.kernels(max=1), 4),
        (evidence.kernel_name("copy"), 3),
        (evidence.kernel_name("e"), 1),
        (evidence.kernel_name("fused"), 0),
        (evidence.grid_size("copy", min=1), 64),
        (evidence.grid_size(min=1), 64),
        (evidence.grid_size("gemm", min=1), None),  # runs in a graph, whose trace has no grid
        (evidence.overlap(min=1), 1.5),
        (evidence.overlap(of="copies", min=1), 0.75),
        (evidence.copied_bytes("host to device", max=1), 100),
        (evidence.copied_bytes("host to device", memory="pageable", max=0), 30),
        (evidence.copied_bytes("device to host", max=1), 0),
        (evidence.api_calls(max=1), 9),
        (evidence.busy_share(min=1), 0.8),
    ],
)
def test_figures_are_read_from_the_trace_of_each_arm(piece, value):
    (finding,) = hold([piece], Facts(traces={"optimized": TRACE}))
    assert (finding.value, finding.baseline_value) == (value, None)
    (finding,) = hold([piece], Facts(traces={"optimized": TRACE, "baseline": TRACE}))
    assert (finding.value, finding.baseline_value) == (value, value)
    assert finding.baseline_held == finding.held


@pytest.mark.parametrize("piece", [evidence.kernel_name("x"), evidence.grid_size(min=1)])
def test_a_trace_without_all_names_has_no_figure_by_name(piece):
    (finding,) = hold([piece], Facts(traces={"optimized": replace(TRACE, kernels=5)}))
    assert finding.held is None


@pytest.mark.parametrize("piece", [evidence.overlap(min=1, of="copies"), evidence.api_calls(max=9)])
def test_a_trace_without_copies_or_api_calls_has_no_figure_of_them(piece):
    trace = replace(TRACE, copying=0.0, api_calls=None)
    (finding,) = hold([piece], Facts(traces={"optimized": trace}))
    assert finding.held is None


@pytest.mark.parametrize(
    ("piece", "baseline", "held"),
    [
        (evidence.launches(max=1), 40, False),
        (evidence.peak_memory(max=100), 100, True),
        (evidence.counter("dram__bytes.sum", max=1.25, per="work"), 10.0, False),
        (evidence.launches(max=0.1, per="baseline"), 1.0, False),
        (evidence.peak_memory(min=0.4, per="baseline"), 1.0, True),
    ],
)
def test_evidence_is_evaluated_on_the_baseline(piece, baseline, held):
    (finding,) = hold([piece], FACTS)
    assert finding.held
    assert (finding.baseline_value, finding.baseline_held) == (baseline, held)


def ran(*names):
    return replace(TRACE, names=names, counts=(1,) * len(names), grids=(1,) * len(names))


@pytest.mark.parametrize(
    ("piece", "baseline", "held"),
    [
        # the baseline's kernel has the same name, another name, or was not compiled here
        (evidence.opcode("LDG.E.128", "copy<1>"), (1, True), 1),
        (evidence.opcode("LDG.E.128", "copy<4>", min=4), (1, False), 4),
        (evidence.registers(max=64), (32, True), 64),
        (evidence.opcode("LDG.E.128", min=4), (1, False), 4),
    ],
)
def test_code_is_that_of_the_kernels_that_each_arm_launches(piece, baseline, held):
    code = CODE[:2]
    traces = {"optimized": ran("void copy<4>(float*)"), "baseline": ran("void copy<1>(float *)")}
    facts = Facts(code, code, complete=True, traces=traces)
    (finding,) = hold([piece], facts)
    assert (finding.value, finding.held) == (held, True)
    assert (finding.baseline_value, finding.baseline_held) == baseline
    both = replace(facts, traces=traces | {"baseline": ran(*[c.kernel.function for c in code])})
    (finding,) = hold([evidence.opcode("LDG.E.128", "copy<4>", min=4)], both)
    assert (finding.baseline_value, finding.baseline_held) == (4, True)
    others = replace(facts, traces=traces | {"baseline": ran("gemm")})
    (finding,) = hold([piece], others)
    assert (finding.value, finding.baseline_held) == (held, None)


def test_a_counter_of_one_kernel_needs_a_call_that_runs_no_other():
    piece = evidence.counter("conflicts", "copy", max=3)
    alone = replace(FACTS, traces={"optimized": ran("copy<1>", "copy<4>"), "baseline": TRACE})
    assert hold([piece], alone)[0].held
    assert hold([piece], alone)[0].baseline_value == 0
    (finding,) = hold([piece], replace(FACTS, traces={"optimized": ran("copy<1>", "memset")}))
    assert (finding.value, finding.held) == (None, None)
    assert "other kernels than copy" in finding.where


def test_a_count_that_is_a_lower_bound_can_fail_evidence_but_gives_no_ratio():
    facts = Facts(figures=FIGURES, at_least=True)
    (count, ratio) = hold(
        [evidence.launches(max=0), evidence.launches(max=0.1, per="baseline")], facts
    )
    assert "as far as the CPU can count" in broken([count])
    assert count.baseline_held is None
    assert ratio.value is None


def test_evidence_of_a_kernel_that_does_not_exist_is_a_usage_error():
    kernels = r"its kernels are void copy<1>\(float\*\), void copy<4>"
    with pytest.raises(UsageError, match=f"evidence of LDG: no kernel of this claim .*{kernels}"):
        hold([evidence.opcode("LDG", "copy<8>")], FACTS)
    with pytest.raises(UsageError, match=r"evidence of spills: no kernel of k\.cu for sm_100a has"):
        hold([evidence.spills(kernel="copy<1>")], FACTS)  # an #if removes copy<1> on sm_100a
    # without a GPU a missing kernel is no error: it may be compiled on a GPU only
    (finding,) = hold([evidence.opcode("LDG", "_softmax")], Facts(CODE))
    assert finding.value is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: evidence.counter("dram__bytes.sum"),
            r"counter\('dram__bytes.sum'\) needs a bound: min= or max=",
        ),
        (evidence.registers, r"registers\(\) needs a bound: min= or max="),
        (
            lambda: evidence.kernels(max=1, per="arm"),
            r"kernels\(per='arm'\): use 'baseline' or 'work'",
        ),
        (
            lambda: hold([evidence.peak_memory(max=1, per="work")], Facts(figures=FIGURES)),
            "needs work=",
        ),
        (lambda: evidence.registers(max="32"), r"registers\(max='32'\): give a finite number"),
        (lambda: evidence.overlap(min=math.nan), r"overlap\(min=nan\): give a finite number"),
        (lambda: evidence.overlap(min=1, of="kernels"), r"overlap\(of='kernels'\): use 'copies'"),
        (
            lambda: evidence.copied_bytes("htod", max=1),
            r"copied_bytes\('htod'\): use one of host to",
        ),
        (
            lambda: evidence.copied_bytes("host to device", memory="managed", max=1),
            r"copied_bytes\(memory='managed'\): use 'pageable' or 'pinned'",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("piece", "sentence"),
    [
        (
            evidence.overlap(min=1.5),
            "has 1.49999 overlap of all work; the claim states at least 1.5",
        ),
        (
            evidence.peak_memory(max=1234, per="baseline"),
            "has 1,234.4 times the baseline's bytes of peak memory; the claim states at most 1,234",
        ),
    ],
)
def test_a_figure_and_the_bound_that_it_misses_are_never_shown_as_one_number(piece, sentence):
    figures = {"optimized": {"peak memory": 1234.4}, "baseline": {"peak memory": 1.0}}
    traces = {"optimized": Trace(1, 1, 0, 1.0, 1.0, total=1.49999)}
    assert broken(hold([piece], Facts(traces=traces, figures=figures))) == (
        f"the optimized arm {sentence}"
    )


def test_bounds_may_be_numbers_of_numpy():
    piece = evidence.launches(min=np.float32(0.5), max=np.int64(3))
    assert json.loads(json.dumps(to_json(piece)))["max"] == 3
    assert evidence.launches(max=3).max == 3


def test_findings_are_part_of_the_record():
    record = result(evidence=hold([evidence.opcode("LDG"), evidence.kernels(max=1)], FACTS))
    assert from_json(Result, to_json(record)) == record


# SASS


def test_opcodes_and_resources_are_parsed_from_the_disassembly():
    (code,) = sass.parse(SASS).values()
    assert code.opcodes == {"LDC": 1, "LDG.E.128": 1, "UIADD3": 1, "LDG.E.128.CONSTANT": 1}
    assert (code.registers, code.stack, code.shared) == (26, 16, 1024)


def write_tool(folder: Path, lines: str) -> Path:
    folder.mkdir()
    tool = folder / "cuobjdump"
    tool.write_text(f"#!/bin/sh\n{lines}\n")
    tool.chmod(0o755)
    return folder / "nvcc"


@pytest.fixture
def only_beside_nvcc(monkeypatch):
    """Hide all disassemblers except the one next to the compiler."""
    monkeypatch.setattr(sass, "find_spec", lambda _: None)
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda _: None)
    monkeypatch.setenv("PATH", "/nowhere")


def test_a_binary_is_disassembled_once(tmp_path):
    code, entry = sass.parse(SASS), tmp_path / "new"
    assert sass.cached(entry, lambda: code) == code
    assert sass.cached(entry, lambda: pytest.fail("disassembled again")) == code
    (entry / "sass.json").write_text('{"copy": {"LDG.E": 1}}')  # an older format: disassemble again
    assert sass.cached(entry, lambda: code) == sass.cached(entry, dict) == code
    unwritable = Path("/dev/null/x")
    assert sass.cached(unwritable, lambda: code) == code


def test_an_error_of_the_disassembler_is_reported(tmp_path, only_beside_nvcc):
    failing = write_tool(tmp_path / "failing", "echo 'cuobjdump fatal: unknown arch' >&2; exit 1")
    (tmp_path / "sass.txt").write_text(SASS)
    working = write_tool(
        tmp_path / "working", f'while read l; do echo "$l"; done < {tmp_path}/sass.txt'
    )
    with pytest.raises(BuildError, match=r"unknown arch.*pytest-aiperf\[sass\]"):
        sass.disassemble(Path("x.so"), nvcc=str(failing))
    assert sass.disassemble(Path("x.so"), ["void copy<4>(float*)"], str(working))
    with pytest.raises(BuildError, match="prints no code for void other"):
        sass.disassemble(Path("x.so"), ["void other"], str(working))


@pytest.mark.parametrize("output", ["", "Function : f"])
def test_an_empty_disassembly_is_an_error(tmp_path, only_beside_nvcc, output):
    empty = write_tool(tmp_path / "empty", f"echo '{output}'")
    with pytest.raises(BuildError, match="prints no code"):
        sass.disassemble(Path("x.so"), nvcc=str(empty))


def test_without_a_disassembler_the_error_names_the_package(tmp_path, only_beside_nvcc):
    with pytest.raises(
        BuildError, match=r"there is no cuobjdump; install the extra pytest-aiperf\[sass"
    ):
        sass.disassemble(tmp_path / "x.so", nvcc=str(tmp_path / "nvcc"))


CU = """
template <int N> __global__ void copy(const float4* from, float4* to) {
  for (int k = 0; k < N; ++k) to[threadIdx.x + k * 256] = from[threadIdx.x + k * 256];
}
extern "C" int wide(const float *from, float *to, int n, cudaStream_t stream) {
  copy<4><<<1, 256, 0, stream>>>((const float4 *)from, (float4 *)to);
  return 0;
}
"""


@pytest.mark.parametrize("arch", ["sm90", "sm103", "sm121"])
def test_opcodes_of_every_architecture_are_counted_and_cached(tmp_path, monkeypatch, arch):
    (tmp_path / "wide.cu").write_text(CU)
    built = nvcc.build(tmp_path / "wide.cu", arch)
    ((name, opcodes),) = nvcc.opcode_counts(built).items()
    assert name == "void copy<4>(float4 const*, float4*)"
    assert opcodes["LDG.E.128"] == 4
    monkeypatch.setattr(subprocess, "run", lambda *_a, **_k: pytest.fail("disassembled again"))
    assert nvcc.opcode_counts(built) == {name: opcodes}


# whole runs: a fault fails its claim without a GPU

SPILL = """
__global__ void __launch_bounds__(1024, 2) crowded(const float *from, float *to, int n) {
  float held[96];
#pragma unroll
  for (int k = 0; k < 96; ++k) held[k] = from[k * n + threadIdx.x];
#pragma unroll
  for (int k = 0; k < 96; ++k) to[k * n + threadIdx.x] = held[95 - k] * held[k];
}
extern "C" int crowd(const float *from, float *to, int n, cudaStream_t stream) {
  crowded<<<1, 1024, 0, stream>>>(from, to, n);
  return 0;
}
"""


def test_wrong_opcodes_spills_and_registers_fail_claims_without_a_gpu(project):
    project.write("kernels/wide.cu", CU)
    project.write("kernels/spill.cu", SPILL)
    project.tests(
        """
import copy
import torch
from pytest_aiperf import evidence

def claim(compare, arm, *pieces):
    compare(baseline=copy.copy(arm), optimized=arm, evidence=pieces, reference=lambda x, to, n: x,
            inputs=lambda bench: (torch.rand(9), torch.empty(9), 9))

@pytest.mark.sm90
@pytest.mark.sm121
def test_right(compare, nvcc):
    claim(compare, nvcc("wide.cu")["wide"], evidence.opcode("LDG.E.128", "copy<4>", min=4))

@pytest.mark.sm90
def test_wrong_opcode(compare, nvcc):
    claim(compare, nvcc("wide.cu")["wide"], evidence.opcode("UTMALDG"))

@pytest.mark.sm90
def test_wrong_kernel(compare, nvcc):
    claim(compare, nvcc("wide.cu")["wide"], evidence.spills(kernel="copy<2>"))

@pytest.mark.sm90
def test_spill(compare, nvcc):
    claim(compare, nvcc("spill.cu")["crowd"], evidence.spills())

@pytest.mark.sm90
def test_registers(compare, nvcc):
    claim(compare, nvcc("spill.cu")["crowd"], evidence.registers(max=16, kernel="crowded"))
"""
    )
    run = project.run()
    kernels = "its kernels are void copy<4>(float4 const[*], *"
    run.stdout.fnmatch_lines(
        [
            "*kernels/wide.cu for sm_90a has 0 UTMALDG; the claim states at least 1",
            f"*no kernel of this claim has * in its name; {kernels}",
            "*crowded(*) (kernels/spill.cu, sm_90a) has * bytes of spills per thread; *",
            "*crowded(*) (kernels/spill.cu, sm_90a) has 32 registers per thread; *at most 16*",
            "*4 failed, 1 built*",
        ]
    )


def test_an_extra_launch_or_graph_break_fails_a_claim_without_a_gpu(project):
    project.tests(
        """
import torch
from pytest_aiperf import evidence

def vectors(bench):
    return (torch.randn(64),)

def claim(compare, arm, piece):
    compare(baseline=torch.neg, optimized=arm, inputs=vectors, evidence=[piece],
            reference=lambda x: -x.double())

def test_once(compare):
    claim(compare, lambda x: x.view(8, 8).neg().view(-1), evidence.launches(max=1))

def test_twice(compare):
    claim(compare, lambda x: (x * -1).add_(0), evidence.launches(max=1))

def test_kernels_of_a_compiled_arm_are_not_counted(compare):
    claim(compare, torch.compile(lambda x: (x * -1).add_(0)), evidence.kernels(max=1))

def test_whole(compare):
    claim(compare, torch.compile(torch.neg), evidence.graph_breaks())

def test_broken(compare):
    def neg(x):
        y = x * 1
        torch._dynamo.graph_break()
        return -y
    claim(compare, torch.compile(neg), evidence.graph_breaks())

def test_branch(compare):
    def neg(x):
        y = x * 1
        if y.sum() > 1000:
            y = y + 0
        return -y
    claim(compare, torch.compile(neg), evidence.graph_breaks())
"""
    )
    run = project.run()
    run.assert_outcomes(passed=3, failed=3)
    count = "the optimized arm, as far as the CPU can count, has 2 launches per call"
    run.stdout.fnmatch_lines(
        [
            f"*{count}; the claim states at most 1",
            *["*the optimized arm has 1 graph breaks; the claim states at most 0"] * 2,
        ]
    )


TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def double_tile(x, out, n, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

def double(x, times=1):
    out = torch.empty_like(x)
    for _ in range(times):
        double_tile[(1,)](x, out, x.numel(), TILE=1024)
    return out
"""


def test_triton_kernels_are_counted_and_compiled_without_a_gpu(project):
    project.write("own.py", TRITON)
    project.tests(
        """
import torch, own
from pytest_aiperf import evidence

def claim(compare, times, *pieces):
    compare(baseline=lambda x: x * 2, inputs=lambda bench: torch.randn(1024), evidence=pieces,
            optimized=lambda x: own.double(x, times), reference=lambda x: 2 * x.double())

def test_once(compare):
    claim(compare, 1, evidence.kernels(max=1))

def test_wrong_opcode(compare):
    claim(compare, 1, *(evidence.opcode(name, "double_tile") for name in ("LDG.E.128", "HGMMA")))

def test_twice(compare):
    claim(compare, 2, evidence.launches(max=1))

def test_unaligned(compare):
    compare(baseline=lambda x: x * 2, inputs=lambda bench: torch.randn(1001),
            evidence=[evidence.opcode("LDG.E.128")],
            optimized=own.double, reference=lambda x: 2 * x.double())
"""
    )
    run = project.run("-opythonpath=.")
    run.assert_outcomes(passed=1, failed=3)
    run.stdout.fnmatch_lines(
        [
            "double_tile (own.py, sm_90, compiled for n=1024) has 0 HGMMA; the claim *",
            "*has 2 launches per call; the claim states at most 1",
            "own.py for sm_90 (double_tile compiled for n=1001, which is no multiple of 16) has*",
        ]
    )
