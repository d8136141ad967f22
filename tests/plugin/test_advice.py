"""Each rule of advice: figures for which it holds, figures for which it does not, and its claim."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_aiperf.model import Limit, Profile, Trace
from pytest_aiperf.rules import advice
from pytest_aiperf.rules.roofline import diagnose, diagnose_profile

ROOT = Path(__file__).parents[2]

IDLE = {"dram share": 0.2, "sm share": 0.3}
OCCUPIED = IDLE | {"occupancy": 0.12, "theoretical occupancy": 0.125, "blocks": 9999, "SMs": 132}
LIMITS = {"block limit registers": 8.0, "block limit shared memory": 8.0, "block limit slots": 32.0}

# figures of ncu, what the advice says, and a change after which it no longer holds
COUNTERS = [
    (
        IDLE | {"blocks": 16.0, "SMs": 132.0},
        "16 blocks on 132 SMs: split the work further (see ch18/split_kv_decode)",
        {"blocks": 132.0},
    ),
    (
        IDLE | {"sectors per load": 4.0, "sectors per store": 32.0},
        (
            "32 sectors per load or store where 4 to 16 suffice: let neighboring lanes access "
            "neighboring addresses (see ch07/coalesced_copy)"
        ),
        {"sectors per store": 16.2},
    ),
    (
        {"l1 share": 0.9, "bank conflicts": 4.2e6},
        "4.2e+06 bank conflicts: pad or swizzle the tile (see ch06/bank_conflicts)",
        {"bank conflicts": 0.0},
    ),
    (
        IDLE | {"local bytes": 4 * 2.0**30, "dram bytes": 2.0**30},
        (
            "4.000 GiB of local memory accessed, 4 times the DRAM bytes: avoid spilled registers "
            "and arrays with computed indices (see ch06/launch_bounds_spills)"
        ),
        {"local bytes": 1e6},
    ),
    (
        IDLE | {"threads per instruction": 2.4},
        (
            "2.4 of 32 threads per warp are active: let a warp take one branch, or compact the "
            "work first (see ch08/threshold_predication)"
        ),
        {"threads per instruction": 31.0},
    ),
    (
        {"sm share": 0.93, "fma share": 0.93, "tensor share": 0.0},
        (
            "the tensor cores idle while the FMA units are 93 % busy: compute matrix products in "
            "tf32 or bf16 (see ch02/tf32_policy)"
        ),
        {"tensor share": 0.4},
    ),
    (
        OCCUPIED | LIMITS | {"block limit registers": 1.0},
        (
            "registers allow 1 blocks per SM, an occupancy of 12 %: use fewer per thread "
            "(see ch08/occupancy_block_size)"
        ),
        {"block limit registers": 64.0},
    ),
    (
        OCCUPIED | LIMITS | {"block limit shared memory": 1.0},
        "shared memory allow 1 blocks per SM",
        {"theoretical occupancy": 0.5},
    ),
    (OCCUPIED | LIMITS | {"block limit slots": 1.0}, "use larger blocks", {"sm share": 0.9}),
    (
        OCCUPIED | {"theoretical occupancy": 1.0},
        (
            "occupancy is 12 % where 100 % is possible: blocks are too few or uneven "
            "(see ch12/atomic_work_queue)"
        ),
        {"occupancy": 0.9},
    ),
    *(
        (IDLE | {f"stall {reason}": 9.0, "stall x": 1.0}, f"warps wait {words}", {"stall x": 10.0})
        for reason, words in {
            "long scoreboard": "for device memory: more loads in flight before the first use",
            "short scoreboard": "for shared memory: fewer, wider accesses",
            "mio throttle": "for shared memory's queue",
            "lg throttle": "for the load queue",
            "barrier": "at barriers",
            "wait": "for the previous instruction",
            "math pipe throttle": "for the arithmetic units",
            "gmma": "for the tensor cores",
        }.items()
    ),
]

TRACED = {"kernels": 300.0, "launches": 300.0, "copies": 0.0, "span": 1.0, "busy": 0.8}
COPYING = TRACED | {
    "copies": 3.0, "gaps": 0.2, "host copy time": 0.6,
    "host to device bytes": 2.0**30, "device to host bytes": 2.0**29,
}  # fmt: skip
# the same for figures of nsys and of PyTorch's profiler
TIMELINES = [
    (
        TRACED | {"synchronizations": 20.0},
        (
            "the host waits for the GPU 20 times, once per 15 launches: keep the values on the GPU "
            "that .item() and .cpu() fetch (see ch12/conditional_graph)"
        ),
        {"synchronizations": 3.0},
    ),
    (TRACED | {"synchronizations": 20.0}, "the host waits", {"busy": 0.95}),
    (
        TRACED | {"graph breaks": 2.0},
        (
            "2 graph breaks in compiled code: TORCH_LOGS=graph_breaks names them "
            "(see ch14/graph_break_removal)"
        ),
        {"graph breaks": 0.0},
    ),
    (
        TRACED | {"recompilations": 5.0},
        (
            "5 recompilations: TORCH_LOGS=recompiles names the guards; mark dimensions as dynamic, "
            "or pad to a few sizes (see ch16/piecewise_graphs)"
        ),
        {"recompilations": 1.0},
    ),
    (
        TRACED | {"kernels": 200_000.0},
        "2e+05 kernels of 4.0 µs each: fuse them (see ch01/batched_gemm)",
        {"kernels": 8_000.0},
    ),
    (
        TRACED | {"busy": 0.5, "gaps": 0.5, "long gaps": 0.2},
        "capture a graph or fuse (see ch12/graph_replay)",
        {"long gaps": 0.4},
    ),
    (
        TRACED | {"busy": 0.5, "gaps": 0.5, "long gaps": 0.4},
        (
            "80 % of the gaps are longer than 10 ms, which no graph closes: the program starts up, "
            "compiles or loads data; --nvtx RANGE captures only its steps "
            "(see ch13/dataloader_workers)"
        ),
        {"long gaps": 0.2},
    ),
    (
        COPYING,
        (
            "copy-bound: 60 % of the time in copies, 1.000 GiB host to device and 512.0 MiB device "
            "to host; keep data on the GPU, or copy from pinned memory while kernels run "
            "(see ch03/pinned_prefetch_stream)"
        ),
        {"host copy time": 0.2},
    ),
    (COPYING, "copy-bound", {"gaps": 0.7, "busy": 0.7, "span": 1.4}),
    (
        TRACED | {"busy": 0.5, "launches": 1.0},
        "fuse: it is one launch already (see ch09/elementwise_chain_fusion)",
        {"launches": 2.0},
    ),
    (
        TRACED | {"busy": 0.5, "launches": 1.0, "kernels": 1.0},
        "do more per launch (see ch01/batched_gemm)",
        {"busy": 0.8},
    ),
]


def of(tool, figures):
    return diagnose_profile(Profile(tool, "call", "", figures, kernels=("k",)), hint="look closer")


@pytest.mark.parametrize(("figures", "sentence", "change"), COUNTERS)
def test_counters_of_ncu_lead_to_advice(figures, sentence, change):
    assert sentence in of("ncu", figures)
    assert sentence not in of("ncu", figures | change)


@pytest.mark.parametrize(("figures", "sentence", "change"), TIMELINES)
@pytest.mark.parametrize("tool", ["nsys", "torch"])
def test_figures_of_a_timeline_lead_to_advice(tool, figures, sentence, change):
    assert sentence in of(tool, figures)
    assert not change or sentence not in of(tool, figures | change)


def test_a_busy_timeline_names_the_next_tool():
    assert of("nsys", TRACED) == "the GPU is busy 80 % of the time; look closer"
    assert of("memory", TRACED) == ""


def test_a_program_without_a_gpu_has_advice_about_its_compiler_only():
    host = {"operators": 900.0, "recompilations": 5.0, "synchronizations": 20.0}
    assert of("torch", host).startswith("5 recompilations")
    assert of("torch", {"operators": 900.0}) == ""


def test_advice_is_limited_to_the_most_important_rules():
    figures = OCCUPIED | {
        "blocks": 16, "sectors per load": 32.0, "threads per instruction": 8.0, "stall wait": 3.0,
    }  # fmt: skip
    _, *sentences = of("ncu", figures).split("; ")
    assert [sentence.partition(" ")[0] for sentence in sentences] == ["16", "32", "8"]


def test_an_arm_at_its_limit_needs_no_advice():
    counters = {"dram share": 0.95, "sectors per load": 32.0}
    limit = Limit("copy", 4.2e12, 4.28e12, "B/s", 0.98)
    assert diagnose(limit, None, 1e-3, counters).endswith("the copy rate; only fewer bytes help")


def test_a_trace_has_advice_about_one_cause_only():
    """Gaps, short kernels and a small grid have one cause here: launches."""
    trace = Trace(1, 1, 0, 1e-6, 1e-6, counts=(1,), grids=(16,), seconds=(1e-6,))
    limit = Limit("copy", 1e9, 4.28e12, "B/s", 0.01)
    assert "blocks" not in diagnose(limit, trace, 1e-5, sms=132)
    busy = replace(trace, busy=9e-6, seconds=(9e-6,))
    assert "16 blocks on 132 SMs" in diagnose(limit, busy, 1e-5, sms=132)


def test_every_rule_is_tested():
    """Two rules need a limit: test_roofline.py has their figures."""
    shown = [of("ncu", f) for f, _, _ in COUNTERS] + [of("nsys", f) for f, _, _ in TIMELINES]
    texts = "; ".join(shown)
    untested = [
        rule.sentence
        for rule in advice.RULES
        if not re.search(re.sub(r"\\\{.*?\\\}", ".*", re.escape(rule.sentence)), texts)
    ]
    assert len(untested) == 2
    assert all("limit share" in r.when for r in advice.RULES if r.sentence in untested)


def test_every_claim_that_advice_names_exists():
    files = {f"{file.parent.name}/{file.stem.removeprefix('test_')}"
             for file in ROOT.glob("tests/*/test_*.py")}  # fmt: skip
    assert {rule.claim for rule in advice.RULES} <= files
