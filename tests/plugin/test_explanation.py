"""After its timing a claim gets limits, traces, a diagnosis and findings of its evidence."""

import hashlib
import json
import mmap
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytest_aiperf import Score, Work, prepared
from pytest_aiperf.build.nvcc import Build
from pytest_aiperf.claim import explanation
from pytest_aiperf.claim.bound_claim import BoundClaim
from pytest_aiperf.claim.measure import check_claim, measure_claim
from pytest_aiperf.claim.sampler import Sampler
from pytest_aiperf.device.device import HostDevice
from pytest_aiperf.errors import (
    BuildError,
    CaptureFailed,
    ClaimNotMet,
    InvalidMeasurement,
    ToolMissing,
    UsageError,
)
from pytest_aiperf.model import (
    Expectation,
    Interval,
    KernelRecord,
    Metric,
    Mode,
    Outcome,
    Require,
)
from pytest_aiperf.rules import evidence, roofline
from pytest_aiperf.schema import to_json
from tests.fake_gpu import FAKE_GPU, Allocation, FakeDevice, Noise, spend
from tests.plugin.claims import a_claim, doubling
from tests.plugin.test_compare import BLANK, LoggingLock, a_context

WORK = Work(read=2e08, written=2e08)  # 4 TB/s at 100 us, 2 TB/s at 200 us
CEILINGS = {"copy": 4.28e12, "read": 4.5e12, "l2": 9e12}


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # set by the outer pytest run


def explained(**words):
    changes = {name: words.pop(name) for name in ("expectation", "device") if name in words}
    context = a_context(ceilings=CEILINGS, **changes)
    return measure_claim(a_claim(**{"work": lambda x: WORK} | words), context)


def twice(x):
    doubling(50)(x)
    return doubling(50)(x)


def test_both_arms_have_a_limit_a_trace_and_a_diagnosis():
    record, problem = explained()
    assert problem is None
    assert record.limits["optimized"].ceiling == "copy"
    assert record.limits["optimized"].share == pytest.approx(4 / 4.28, rel=0.02)
    assert record.limits["baseline"].share == pytest.approx(2 / 4.28, rel=0.02)
    assert record.traces["optimized"].kernels == 1
    assert record.diagnosis["optimized"].startswith("memory-bound: 9")
    assert record.notes == ()


def test_numbers_of_numpy_in_work_go_into_the_record():
    record, problem = explained(
        work=lambda x: Work(np.float32(8), np.int64(8), 2 * np.prod(x.shape), "fp32")
    )
    assert problem is None
    assert json.loads(json.dumps(to_json(record.work))) == {
        "read": 8.0, "written": 8.0, "flops": 128.0, "dtype": "fp32"
    }  # fmt: skip


def test_a_claim_without_work_has_traces_and_no_limit():
    record, _ = explained(work=None)
    assert (set(record.traces), record.limits) == ({"baseline", "optimized"}, {})


def test_faster_than_the_measured_limit_is_invalid_and_keeps_its_figures():
    record, problem = explained(work=lambda x: Work(read=2.3e08, written=2.3e08))
    assert isinstance(problem, InvalidMeasurement)
    assert record.outcome is Outcome.INVALID
    assert record.message.startswith("optimized: 4.")
    assert record.timing is not None


def test_a_required_share_is_compared_with_the_lower_end():
    measured = explained()[0]
    share = roofline.optimized_share(measured)
    assert share.value == measured.limits["optimized"].share
    assert 0.9 * share.value < share.low < share.value < share.high < 1.1 * share.value

    def requiring(share):
        return explained(expectation=Expectation(Require(share=share)))[0]

    assert requiring(0.9).outcome is Outcome.PASSED
    lost = requiring(0.99)
    assert lost.outcome is Outcome.FAILED
    assert lost.message.startswith("share of the limit 93% [93%, 93%]: its lower end is below the ")


@pytest.mark.parametrize("metric", ["device", ("memory", "device")])
def test_more_replicates_follow_if_only_noise_keeps_a_share_from_its_requirement(metric):
    arms = {"baseline": holding(200_000), "optimized": holding(100_000)}

    def requiring(share):
        return explained(**arms, metric=metric, expectation=Expectation(Require(share=share)))[0]

    share = requiring(0.5).limits["optimized"].share
    notes = {name: roofline.in_seconds(requiring(name)).notes for name in (0.5, share, 0.99)}
    undecided = ("undecided after 6 replicates, so more followed",)
    assert notes == {0.5: (), share: undecided, 0.99: ()}


def test_one_replicate_has_no_lower_end():
    one = explained()[0]
    timing = replace(one.timing, replicates=one.timing.replicates[:1])
    assert roofline.optimized_share(replace(one, timing=timing)).low == 0.0
    assert roofline.optimized_share(replace(one, limits={})) is None
    assert roofline.optimized_share(replace(one, timing=None)) is None


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (
            evidence.launches(max=1),
            "the optimized arm has 2 launches per call; the claim states at most 1",
        ),
        (evidence.kernels(max=1, per="baseline"), "has 2 times the baseline's kernels per call"),
    ],
)
def test_an_extra_launch_fails_a_claim_that_is_faster(piece, message):
    lost, problem = explained(optimized=twice, evidence=[piece])
    assert isinstance(problem, ClaimNotMet)
    assert (lost.outcome, lost.verdict) == (Outcome.FAILED, "FASTER")
    assert message in lost.message
    assert lost.evidence[0].value == 2
    held, problem = explained(evidence=[piece])
    assert problem is None
    assert held.evidence[0].held


def holding(size):
    def double(x):
        held = Allocation(size)
        spend(size * 1e-9)
        del held
        return x * 2

    return double


def test_peak_memory_is_that_of_each_arm():
    arms = {"baseline": holding(200_000), "optimized": holding(100_000), "work": None}
    held, problem = explained(**arms, evidence=[evidence.peak_memory(max=0.5, per="baseline")])
    assert problem is None
    assert held.evidence[0].value == 0.5
    _, problem = explained(**arms, evidence=[evidence.peak_memory(max=99_000)])
    assert "has 100,000 bytes of peak memory; the claim states at most 99,000" in str(problem)


def test_an_error_while_inspecting_an_arm_becomes_a_note():
    class Blind(FakeDevice):
        def trace(self, call, mode, *, cold):
            raise RuntimeError("CUPTI is taken\nby somebody")

    device = Blind(FAKE_GPU, replace(Noise.none(), white=0.001))
    record, problem = explained(device=device, evidence=[evidence.launches(max=1)])
    assert problem is None
    assert record.notes[0] == "baseline was not inspected: RuntimeError: CUPTI is taken"
    assert record.evidence[0].value is None


def inspected(record=None, lock=None, device=None, builds=(), **words):
    device = device or FakeDevice(FAKE_GPU, Noise.none())
    bound = BoundClaim(a_claim(**words), device, 1, full=True)
    record, lock = record or BLANK, lock or LoggingLock()
    inspection = explanation.Inspection([(bound, record)], lambda: None)
    inspection.locked(lock)
    (arms,) = inspection.arms
    return explanation.explain(bound, record, builds, CEILINGS, lock, inspected=arms)


def test_arms_are_prepared_together_with_other_claims_and_inspected_alone():
    def log(*pieces):
        lock = LoggingLock()
        record = inspected(lock=lock, evidence=pieces)
        assert [finding.held for finding in record.evidence] == [True] * len(pieces)
        return lock.log

    counter = evidence.counter("x.sum", min=0)
    memory = evidence.peak_memory(max=0)
    assert log(counter) == ["shared", "exclusive_gpu"]
    assert log(evidence.page_faults(min=0)) == ["shared", "exclusive_host"]
    assert log(counter, memory) == ["shared", "exclusive_gpu", "shared", "shared"]


def test_a_trace_has_the_state_of_the_timing():
    states = []

    class Watched(FakeDevice):
        def trace(self, call, mode, *, cold):
            states.append((mode, cold))
            return super().trace(call, mode, cold=cold)

    timed, _ = explained()
    for cache in ("cold", "warm"):
        inspected(timed, device=Watched(FAKE_GPU, Noise.none()), cache=cache)
    mode = timed.timing.mode
    assert mode is Mode.BACKLOG
    assert states == [(mode, True)] * 2 + [(mode, False)] * 2


@pytest.mark.parametrize(
    ("piece", "loaded"),
    [(evidence.launches(max=1), ["shared"]), (evidence.page_faults(min=0), [])],
)
def test_only_tracing_itself_needs_the_gpu_alone(piece, loaded):
    lock, seen = LoggingLock(), {"load": [], "trace": [], "read": []}

    class Watched(FakeDevice):
        def load_tracer(self):
            seen["load"].append(lock.held)

        def trace(self, call, mode, *, cold):
            seen["trace"].append(lock.held)
            read = super().trace(call, mode, cold=cold)

            def reading():
                seen["read"].append(lock.held)
                return read()

            return reading

    timed, _ = explained()
    inspected(timed, lock, device=Watched(FAKE_GPU, Noise.none()), evidence=[piece])
    assert seen["load"] == loaded
    assert seen["trace"] == [lock.log[1]] * 2
    assert lock.log[1].startswith("exclusive_")
    assert seen["read"] == [""] * 2


@pytest.mark.parametrize("piece", [evidence.busy_cores(max=0.5), evidence.peak_memory(max=1 << 40)])
def test_figures_of_the_host_are_not_read_where_other_processes_work(piece):
    def in_a_child(x):
        subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
        return x * 2

    (finding,) = inspected(device=HostDevice(), optimized=in_a_child, evidence=[piece]).evidence
    assert (finding.value, finding.held) == (None, None)
    assert finding.where == "processes that the arm has started do a part of the work"
    (finding,) = inspected(device=HostDevice(), evidence=[piece]).evidence
    assert finding.value is not None


def test_page_faults_of_started_processes_count():
    def in_a_child(x):
        subprocess.run([sys.executable, "-c", ""], check=True)
        return x * 2

    piece = evidence.page_faults(min=500)  # Python's start causes more
    (finding,) = inspected(device=HostDevice(), optimized=in_a_child, evidence=[piece]).evidence
    assert (finding.held, finding.baseline_held) == (True, False)


def test_counters_are_read_on_both_arms_and_kept_for_the_same_code(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(tmp_path))
    read = []

    class Counting(FakeDevice):
        def counters(self, call, metrics, *, cold):
            read.append(metrics)
            return super().counters(call, metrics, cold=cold)

    def finding(code, **words):
        record = replace(BLANK, gpu=FAKE_GPU, code=code)
        pieces = [evidence.counter("b.sum", max=0.5, per="baseline"), evidence.counter("a", min=1)]
        device = Counting(FAKE_GPU, Noise.none())
        return inspected(record, device=device, evidence=pieces, **words).evidence[0]

    first = finding("c0de")
    assert (first.value, first.held, first.baseline_held) == (pytest.approx(0.5), True, False)
    assert read == [["a", "b.sum"]] * 2
    assert finding("c0de") == first
    assert len(read) == 2
    finding("other")
    assert len(read) == 4
    finding("")
    finding("")  # code whose hash is not known is read every time
    assert len(read) == 8


@pytest.mark.parametrize("error", [ToolMissing("reserved"), CaptureFailed("no counter 'x'")])
def test_counters_that_cannot_be_read_are_a_note_and_leave_the_evidence_open(error):
    class Blind(FakeDevice):
        def counters(self, call, metrics, *, cold):
            raise error

    pieces = [evidence.counter("x", max=0), evidence.launches(max=1)]
    record = inspected(device=Blind(FAKE_GPU, Noise.none()), evidence=pieces)
    assert [finding.held for finding in record.evidence] == [None, True]
    assert record.evidence[0].where == str(error)
    assert record.notes == (f"counters were not read: {error}",)


def test_counters_of_a_claim_on_several_gpus_are_not_read():
    device = FakeDevice(FAKE_GPU, Noise.none())
    device.ranks = SimpleNamespace(count=2)
    record = inspected(device=device, evidence=[evidence.counter("x", max=0)])
    assert record.evidence[0].held is None
    assert "single GPU" in record.evidence[0].where


def test_page_faults_and_context_switches_of_both_arms():
    def fresh(x):
        mmap.mmap(-1, 1 << 24, flags=mmap.MAP_PRIVATE).write(b"x" * (1 << 24))
        return x * 2

    def wait(x):
        time.sleep(0.001)
        return x * 2

    pieces = [evidence.page_faults(max=0.5, per="baseline"), evidence.context_switches(min=1)]
    record = inspected(device=FakeDevice(None), baseline=fresh, optimized=wait, evidence=pieces)
    assert [finding.held for finding in record.evidence] == [True, True]
    assert record.evidence[1].baseline_value is not None


def test_busy_cores_are_the_cpu_seconds_per_second_of_a_call():
    def wait(x):
        time.sleep(0.05)
        return x * 2

    busy = []

    def compute(x):
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        hashlib.sha256(bytes(1 << 26)).digest()
        busy.append((time.process_time() - cpu_s) / (time.perf_counter() - wall_s))
        return x * 2

    pieces = [evidence.busy_cores(min=2, per="baseline"), evidence.busy_cores(max=0.1)]
    device = FakeDevice(None)
    record = inspected(device=device, baseline=wait, optimized=compute, evidence=pieces)
    assert [finding.held for finding in record.evidence] == [True, False]
    assert record.evidence[1].value == pytest.approx(busy[-1], rel=0.2)
    assert record.evidence[1].baseline_held


@pytest.mark.parametrize(
    ("piece", "undecided"),
    [(evidence.busy_cores(min=1_000), True), (evidence.launches(min=1_000), False)],
)
def test_noise_may_explain_busy_cores_as_well(piece, undecided):
    device = FakeDevice(FAKE_GPU, replace(Noise.none(), white=0.3))
    record, _ = explained(device=device, baseline=doubling(101), evidence=[piece])
    assert record.outcome is Outcome.FAILED
    assert record.message.startswith("undecided: ") == undecided
    assert "undecided: " in record.message
    assert f"at least {piece.min:,}" in record.message


def test_the_code_of_each_arm_is_found_by_the_kernels_that_it_launches():
    class Named(FakeDevice):
        def trace(self, call, mode, *, cold):
            traced = super().trace(call, mode, cold=cold)()
            name = "slow(float*)" if traced.busy > 1.5e-4 else "fast(float *)"
            return lambda: replace(traced, names=(name,))

    kernels = tuple(
        KernelRecord("k.cu", "sm_90a", f"{name}(float*)", registers, 0, 0)
        for name, registers in (("slow", 200), ("fast", 40), ("other", 255))
    )
    build = Build(Path("k.so"), Path("k.cu"), "sm_90a", (), kernels, "")
    pieces = [evidence.registers(max=64), evidence.spills()]
    record = inspected(device=Named(FAKE_GPU, Noise.none()), builds=[build], evidence=pieces)
    few, none = record.evidence
    assert (few.value, few.held, few.baseline_value, few.baseline_held) == (40, True, 200, False)
    assert (none.held, none.baseline_held) == (True, True)


def test_arms_with_a_score_are_traced_only_for_evidence():
    calls = []

    def scored(value):
        def arm(x):
            calls.append(value)
            spend(1e-4)
            return x * 2, Score(value, "req/s")

        return arm

    words = {
        "baseline": scored(1.0), "optimized": scored(2.0), "metric": "score", "work": None,
    }  # fmt: skip
    record, _ = explained(**words)
    assert (record.traces, record.limits, record.diagnosis) == ({}, {}, {})
    record, _ = explained(**words, evidence=[evidence.launches(max=1)])
    assert record.evidence[0].value == 1


def test_a_disturbed_metric_that_is_only_shown_becomes_a_note():
    class Unsteady(FakeDevice):
        def telemetry(self):
            return replace(super().telemetry(), event_reasons=0x20)

    device = Unsteady(FAKE_GPU, replace(Noise.none(), white=0.001))
    arms = {"baseline": holding(200_000), "optimized": holding(100_000), "work": None}
    record, problem = explained(**arms, metric=("memory", "wall"), device=device)
    assert problem is None
    assert (record.timing.metric, record.also) == (Metric.MEMORY, ())
    assert record.notes[0].startswith("wall is not shown: a round was disturbed 4 times")
    _, problem = explained(**arms, metric=("wall", "memory"), device=device)
    assert isinstance(problem, InvalidMeasurement)


def test_a_metric_that_is_only_shown_may_fail_before_it_is_timed(monkeypatch):
    def refuse(*_):
        raise InvalidMeasurement("an arm changed global settings")

    monkeypatch.setattr(Sampler, "prepare", refuse)
    arms = {"baseline": holding(200_000), "optimized": holding(100_000), "work": None}
    record, problem = explained(**arms, metric=("memory", "wall"), device=FakeDevice(None))
    assert problem is None
    assert record.notes == ("wall is not shown: an arm changed global settings",)


def test_limits_come_from_the_first_metric_in_seconds():
    arms = {"baseline": holding(200_000), "optimized": holding(100_000)}
    record, _ = explained(**arms, metric=("memory", "wall"))
    assert record.limits["optimized"].share == pytest.approx(4 / 4.28, rel=0.02)


# without a GPU


def test_prepared_arms_are_not_counted():
    """On the CPU, the kernels that a graph would replay cannot be counted."""
    arm = prepared(lambda x: lambda x: x * 1 * 2)
    words = {"inputs": lambda bench: torch.randn(4), "reference": lambda x: x + x}
    words |= {"baseline": lambda x: x + x, "evidence": [evidence.launches(max=1)]}
    device = FakeDevice(None)
    check_claim(a_claim(optimized=arm, **words), device, BLANK)
    with pytest.raises(ClaimNotMet, match="has 2 launches per call"):
        check_claim(a_claim(optimized=lambda x: x * 1 * 2, **words), device, BLANK)


def test_work_that_does_not_depend_on_the_inputs_is_not_counted():
    def arm(x):
        offsets = torch.arange(4).cumsum(0) * 2
        return x.view(2, 2).T.reshape(4) * offsets[0].add(2)

    from pytest_aiperf.claim.triton_launches import count

    found = count(arm, (torch.ones(4),))
    assert (found.launches, found.kernels) == (2, 1)  # reshape copies a transposed tensor
    assert count(np.negative, (np.ones(3),)).launches == 0


def test_triton_kernels_that_cannot_be_compiled_here_are_not_checked(monkeypatch):
    def refuse(*_):
        raise BuildError("no compiler")

    counted = explanation.triton_launches.Count(1, 1, [(None, (), {})])
    monkeypatch.setattr(explanation.triton_launches, "count", lambda *_: counted)
    monkeypatch.setattr(explanation.triton_build, "compile_for_targets", refuse)
    words = {"inputs": lambda bench: torch.randn(4), "evidence": [evidence.opcode("HGMMA", "k")]}
    check_claim(a_claim(**words), FakeDevice(None), BLANK)


def test_evidence_per_byte_needs_work():
    with pytest.raises(UsageError, match=r"dram__bytes\.sum per byte needs work="):
        a_claim(evidence=[evidence.counter("dram__bytes.sum", max=1, per="work")])


def test_the_fake_limits_show_in_the_table():
    from pytest_aiperf.report import terminal

    record, _ = explained(evidence=[evidence.launches(max=1), evidence.registers(max=32)])
    quiet, loud = (terminal.table([record], 140, verbosity=v) for v in (0, 1))
    assert "93 % copy" in quiet[2]
    assert "median share of the limit 93% (1 claim)" in quiet[3]
    assert not any("bound" in line for line in quiet)
    output = "\n".join(loud)
    assert "ch07/x: optimized: memory-bound: 93 % of the copy rate" in output
    assert "ch07/x: evidence: launches <= 1: 1 (baseline 1), condition" in output
    assert "ch07/x: evidence: registers <= 32: not looked at" in output
    assert isinstance(record.speedup, Interval)
