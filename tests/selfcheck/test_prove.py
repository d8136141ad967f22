"""The self-check computes its figures correctly and detects the faults of a fake device."""

import contextlib
import dataclasses
import json
import math
import random
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest
from aiperf_selfcheck import checks, ground_truth, other_timers
from aiperf_selfcheck import record as records
from aiperf_selfcheck.checks import Scale, fit
from aiperf_selfcheck.ground_truth import Comparison, HeatedDevice, Workbench
from aiperf_selfcheck.other_timers import Case, Judgement

from pytest_aiperf.build.launcher import Kernels
from pytest_aiperf.build.nvcc import build
from pytest_aiperf.claim.stopping_rule import StoppingRule
from pytest_aiperf.cli import main
from pytest_aiperf.errors import AiperfError, InvalidMeasurement, UsageError, WrongResult
from pytest_aiperf.model import Interval, Mode, Verdict
from tests.fake_gpu import CEILINGS, FAKE_GPU, FakeDevice, Fault, Noise, RepeatingDevice, spend

ROOT = Path(__file__).parents[2]
TINY = Scale(runs=2, aa=8, power=4, ladders=4, drift=1, repeat=3, cases=4)
TIMES = {"copy": 60e-6, "gemm": 200e-6, "softmax": 65e-6, "add": 5e-6}
FIXED_REPLICATES = StoppingRule(
    target_half_width=0,
    min_replicates=16,
    max_replicates=16,
    rounds_per_replicate=5,
    time_budget_s=9,
)
CALM = Noise(white=0.0005, tail=0, drift=0, ramp=0, throttle_per_s=0, layout=0.0005, jump_chance=0)


def numbers(bench):
    return (np.random.default_rng(bench.seed).random(64),)


def arm_of(seconds):
    def arm(x):
        spend(seconds)
        return -x

    return arm


def block_timer(workbench):
    """Return a stand-in for other timers: the median of ten blocks of the device."""

    def timer(call):
        block = workbench.device.block([call] * 10, Mode.PLAIN)
        return statistics.median(block.run() for _ in range(10)) / 10

    return timer


class Cache:
    """An L2 for the fake device, which keeps the buffers that were read last."""

    def __init__(self, size=32 << 20):
        self.size, self.buffers = size, {}

    def sweep(self, size):
        def call():
            is_warm = self.buffers.pop(id(call), 0) == size
            self.buffers[id(call)] = size
            while sum(self.buffers.values()) > self.size:
                del self.buffers[next(iter(self.buffers))]
            spend(1e-6 + size / (7e12 if is_warm else 4e12))

        return call


def workbench(noise=CALM, seed=1, **changes):
    device = RepeatingDevice(FAKE_GPU, noise, seed=seed)
    spins, seeds = [], iter(range(100, 200))

    def timed_spin(seconds):
        spins.append(seconds)
        spend(seconds)

    def pop_mean_spin_s():
        mean = statistics.fmean(spins) if spins else 0.0
        spins.clear()
        return mean

    def heat():
        device._wander = 0.03  # a slowdown that decays over time, as when a GPU cools

    def measure_in_new_process():
        return checks.one(workbench(noise, next(seeds)), TINY)["ratio"]

    fields = {
        "device": device,
        "kinds": {name: (numbers, arm_of(seconds)) for name, seconds in TIMES.items()},
        "claim": (numbers, arm_of(200e-6), arm_of(100e-6)),
        "spin": spend,
        "timed_spin": timed_spin,
        "pop_mean_spin_s": pop_mean_spin_s,
        "empty": lambda: spend(1e-6),
        "sweep": Cache().sweep,
        "read_limit": lambda: CEILINGS["read"],
        "heat": heat,
        "measure_in_new_process": measure_in_new_process,
        "progress": ground_truth.no_progress,
        "random": random.Random(seed),
        "rest_s": 0.0,
    }
    return Workbench(**{**fields, **changes})


# figures


def test_a_fit_recovers_slope_and_both_constants():
    truths, calls = [500e-6, 500e-6, 1e-3, 0.1], [250, 25, 1, 1]
    measured = [1.0005 * t + 0.5e-6 * n + 2e-6 for t, n in zip(truths, calls, strict=True)]
    slope, per_call, per_block = fit(truths, calls, measured)
    assert slope == pytest.approx(1.0005, abs=1e-7)
    assert per_call == pytest.approx(0.5e-6, rel=1e-3)
    assert per_block == pytest.approx(2e-6, rel=1e-2)


def test_the_longest_spin_does_not_dominate_the_fit():
    # in an unweighted fit, an error of 0.1 % in it would shift the constant by microseconds
    truths = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    slope, per_call, _ = fit(
        truths, [1] * 5, [t + 1e-6 + (1e-4 if t == 0.1 else 0) for t in truths]
    )
    assert slope == pytest.approx(1, abs=5e-4)
    assert per_call == pytest.approx(1e-6, abs=2e-8)


def test_one_constant_where_all_blocks_have_equally_many_calls():
    truths = [1e-3, 2e-3, 5e-3]
    slope, per_call, per_block = fit(truths, [1, 1, 1], [t + 3e-6 for t in truths])
    assert (slope, per_call, per_block) == (pytest.approx(1), pytest.approx(3e-6), 0.0)


def comparison(verdict, ratio, half_width=0.004, **deviations):
    interval = Interval(ratio - half_width, ratio, ratio + half_width)
    return Comparison(verdict, interval, 0.5, **deviations)


def test_figures_of_identical_arms():
    comparisons = [
        comparison(Verdict.SAME, 1.0, replicate_sd=0.003, round_sd=0.001),
        comparison(Verdict.FASTER, 1.031, replicate_sd=0.004, round_sd=0.001),
        comparison(Verdict.SLOWER, 0.97, half_width=0.002, replicate_sd=0, round_sd=0.001),
        comparison(Verdict.INCONCLUSIVE, 1.029, replicate_sd=0, round_sd=0.001),
        Comparison(None, None, 1.0),
    ]
    figures = checks.aggregate(comparisons)
    assert (figures["comparisons"], figures["refused"], figures["false_alarms"]) == (5, 1, 2)
    assert figures["beyond_3_percent"] == 2  # 1.031 and 1 / 0.97
    assert figures["without_1"] == 3
    assert figures["half_width"] == pytest.approx(0.004, rel=0.05)
    assert figures["replicate_sd"] == pytest.approx(0.0025)
    assert figures["round_sd"] == pytest.approx(0.001)
    assert figures["seconds_each"] == pytest.approx(0.6)


def test_figures_exist_where_all_comparisons_are_refused():
    assert checks.aggregate([Comparison(None, None, 1.0)])["half_width"] is None


def test_judgements_are_scored():
    judgements = [
        Judgement(1.0, Verdict.SAME, 1.001, 1.0),
        Judgement(1.0, Verdict.FASTER, 1.05, 1.0),
        Judgement(1.05, Verdict.FASTER, 1.05, 2.0),
        Judgement(1.05, Verdict.SLOWER, 0.96, 2.0),
        Judgement(1.05, Verdict.INCONCLUSIVE, 1.05, 2.0),
        Judgement(1.05, None, None, 4.0),
    ]
    figures = other_timers.score(judgements)
    errors = [math.log(1.001), math.log(1.05), 0.0, math.log(0.96 / 1.05), 0.0]
    assert (figures["identical"], figures["different"]) == (2, 4)
    # one false alarm on identical arms, one verdict in the wrong direction
    assert (figures["false_alarms"], figures["seen"]) == (2, 1)
    assert figures["bias"] == pytest.approx(statistics.fmean(errors))
    assert figures["error"] == pytest.approx(statistics.fmean(map(abs, errors)))
    assert figures["worst"] == pytest.approx(-errors[3])
    assert figures["seconds_each"] == 2.0


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.021, "FASTER"), (1.019, "SAME"), (0.981, "SAME"), (0.979, "SLOWER")],
)
def test_a_ratio_without_interval_is_judged_by_a_threshold(ratio, verdict):
    assert other_timers.by_threshold(ratio) == verdict


def test_deviations_between_replicates_and_between_rounds():
    from_rounds, from_layout = (
        ground_truth.compare(
            FakeDevice(FAKE_GPU, noise, seed=3), numbers, (arm_of(1e-4),) * 2, 0.0,
            FIXED_REPLICATES, 7,
        )
        for noise in (
            Noise(**{**dict.fromkeys(Noise.__slots__, 0.0), "white": 0.004}),
            Noise(**{**dict.fromkeys(Noise.__slots__, 0.0), "layout": 0.004}),
        )
    )  # fmt: skip
    # not 0.004 * sqrt(2), because each arm's time is the mean of two blocks
    assert from_rounds.round_sd == pytest.approx(0.004, rel=0.3)
    assert from_rounds.replicate_sd < from_rounds.round_sd
    assert from_layout.replicate_sd == pytest.approx(0.004 * math.sqrt(2), rel=0.4)
    assert from_layout.round_sd < 1e-6


# on the fake device


def test_spins_are_timed_correctly():
    figures = checks.spin(workbench(Noise.none()), TINY)
    for mode in ("graph", "backlog", "plain"):
        assert figures[mode]["slope"] == pytest.approx(1, abs=1e-6)
        assert figures[mode]["a_call_us"] == pytest.approx(0, abs=1e-4)
    assert figures["host_clock"] == pytest.approx(1)


def test_wrong_block_times_are_detected():
    class WrongTimes(FakeDevice):
        def run(self, calls, mode, layout, keep):
            seconds, last = super().run(calls, mode, layout, keep)
            return 1.002 * seconds + 1e-6 * len(calls), last

    figures = checks.spin(workbench(device=WrongTimes(FAKE_GPU, Noise.none())), TINY)
    assert figures["graph"]["slope"] == pytest.approx(1.002, abs=1e-4)
    assert figures["graph"]["a_call_us"] == pytest.approx(1, abs=0.01)
    graph, *_, host = records.rows({"spin": figures})
    assert graph.is_met is False
    assert host.is_met is False


def test_equal_arms_of_a_ladder_are_timed_apart():
    arm = arm_of(1e-4)
    device = FakeDevice(FAKE_GPU, CALM)
    ladder, timing = ground_truth.time_ladder(
        device, numbers, [arm] * 5, ground_truth.SHORT, 7, "cold"
    )
    assert len(ladder.arms) == 5
    assert all(len(r.seconds) == 5 for p in timing.replicates for r in p.rounds)


def test_the_arms_of_a_ladder_are_compared_with_the_first():
    arms = [arm_of(100e-6 * (1 + slower)) for slower in (0, 0.1, 0.2, 0, -0.1)]
    device = FakeDevice(FAKE_GPU, CALM)
    compared = ground_truth.compare_ladder(device, numbers, arms, 0.01, ground_truth.SHORT, 7)
    assert [c.ratio.value for c in compared] == [
        pytest.approx(ratio, rel=0.005) for ratio in (1 / 1.1, 1 / 1.2, 1, 1 / 0.9)
    ]
    assert [c.verdict for c in compared] == ["SLOWER", "SLOWER", "SAME", "FASTER"]
    assert len({c.seconds for c in compared}) == 1


def test_a_refused_ladder_refuses_each_of_its_comparisons():
    device = FakeDevice(FAKE_GPU, CALM, [Fault(0, "throttle", blocks=10_000)])
    arms = [arm_of(1e-4)] * 5
    compared = ground_truth.compare_ladder(device, numbers, arms, 0.01, ground_truth.SHORT, 7)
    assert [(c.verdict, c.ratio) for c in compared] == [(None, None)] * 4


def test_an_arm_of_a_ladder_that_returns_other_values_is_refused():
    arms = [arm_of(1e-4)] * 4 + [lambda x: spend(1e-4) or x]
    with pytest.raises(WrongResult):
        ground_truth.compare_ladder(
            FakeDevice(FAKE_GPU, CALM), numbers, arms, 0.01, ground_truth.SHORT, 7
        )


def test_spins_in_a_ladder_are_timed_correctly():
    figures = checks.spin_ladder(workbench(Noise.none()), TINY)
    assert figures["arms"] == len(figures["calls"]) == 5
    assert figures["calls"][0] > 4 * figures["calls"][-1]  # a slow arm has fewer calls per block
    assert figures["graph"]["over_us"] == [0] * 5
    [row] = records.rows({"spin_ladder": figures})
    assert row.check == "spin kernels of 20 µs to 5 ms, graph mode, ladders of 5 arms"
    assert row.is_met


@pytest.mark.parametrize(("slope", "per_call_s"), [(1.002, 0), (1, 1e-6)])
def test_wrong_times_in_a_ladder_are_detected(slope, per_call_s):
    class WrongTimes(FakeDevice):
        def run(self, calls, mode, layout, keep):
            seconds, last = super().run(calls, mode, layout, keep)
            return slope * seconds + per_call_s * len(calls), last

    figures = checks.spin_ladder(workbench(device=WrongTimes(FAKE_GPU, Noise.none())), TINY)
    assert figures["graph"]["slope"] == pytest.approx(slope, abs=1e-4)
    assert figures["graph"]["a_call_us"] == pytest.approx(per_call_s * 1e6, abs=0.01)
    assert [row.is_met for row in records.rows({"spin_ladder": figures})] == [False]


def test_a_clock_that_slows_down_steadily_does_not_bias_the_times_of_a_ladder(monkeypatch):
    slower = 1.0

    def spin(seconds):
        spend(slower * seconds)

    def time_ladder(*args):
        nonlocal slower
        slower = 1.01
        timed = ground_truth.time_ladder(*args)
        slower = 1.02
        return timed

    bench = workbench(Noise.none())
    timed_spin = bench.timed_spin
    bench.spin, bench.timed_spin = spin, lambda seconds: timed_spin(slower * seconds)
    monkeypatch.setattr(checks, "time_ladder", time_ladder)
    assert checks.spin_ladder(bench, TINY)["graph"]["slope"] == pytest.approx(1, abs=1e-6)


def test_a_block_that_runs_again_counts_once():
    class RunsAgain(FakeDevice):
        def run(self, calls, mode, layout, keep):
            for call in calls:  # as if the first run's blocking kernel was too short
                call()
            return super().run(calls, mode, layout, keep)

    figures = checks.spin(workbench(device=RunsAgain(FAKE_GPU, Noise.none())), TINY)
    assert figures["backlog"]["slope"] == pytest.approx(1, abs=1e-6)


def test_the_floor_is_the_time_of_an_empty_kernel():
    assert checks.floor(workbench(Noise.none()), TINY) == pytest.approx(dict.fromkeys(Mode, 1.0))


def test_rotated_inputs_are_as_cold_as_flushed_ones():
    figures = checks.flush(workbench(Noise.none()), TINY)
    assert figures["sets"] >= 3
    assert figures["as_cold_as_flushed"] == pytest.approx(1)
    assert figures["rotated_us"] == pytest.approx(1 + figures["bytes"] / 4e12 * 1e6)
    assert figures["warm_of_limit"] == pytest.approx(7 / 4.5)
    assert [row.is_met for row in records.rows({"flush": figures})] == [True]


def test_a_rotation_that_stays_in_the_cache_is_detected():
    figures = checks.flush(workbench(Noise.none(), sweep=Cache(200 << 20).sweep), TINY)
    assert figures["as_cold_as_flushed"] < 0.1
    assert [row.is_met for row in records.rows({"flush": figures})] == [False]


def test_all_modes_time_a_copy_alike():
    figures = checks.modes(workbench(Noise.none()), TINY)
    assert set(figures["us"]) == set(Mode)
    assert figures["us"]["graph"] == pytest.approx(60)
    assert figures["apart"] == pytest.approx(0)


def test_identical_arms_give_no_false_alarm(record):
    figures = record["parts"]["aa"]
    assert (figures["comparisons"], figures["false_alarms"], figures["confirmed"]) == (8, 0, 0)
    assert {kind: f["comparisons"] for kind, f in figures["kinds"].items()} == dict.fromkeys(
        TIMES, 2
    )
    assert 0 < figures["floor"] < 0.02
    figures = record["parts"]["aa_ladder"]
    assert (figures["comparisons"], figures["false_alarms"], figures["confirmed"]) == (16, 0, 0)
    assert (record["parts"]["aa"]["arms"], figures["arms"]) == (2, 5)


def test_a_false_alarm_is_measured_again(monkeypatch):
    rules = []

    def compare_ladder(_device, _inputs, _arms, _noise_floor, rule, *_):
        rules.append(rule)
        is_alarm = rule is ground_truth.SHORT or len(rules) < 3
        return [comparison(Verdict.FASTER if is_alarm else Verdict.SAME, 1.04)]

    monkeypatch.setattr(checks, "compare_ladder", compare_ladder)
    figures = checks.aa(workbench(cached_noise_floor=0.0), Scale(2, 3, 0, 0, 0, 0, 0))
    assert (figures["false_alarms"], figures["confirmed"]) == (3, 1)
    assert rules == [ground_truth.SHORT, ground_truth.STANDARD] * 3


def test_only_the_rung_with_the_same_verdict_is_a_confirmed_alarm(monkeypatch):
    faster, same, slower = (
        comparison(Verdict.FASTER, 1.04), comparison(Verdict.SAME, 1.0),
        comparison(Verdict.SLOWER, 0.96),
    )  # fmt: skip
    ladders = iter([[faster, slower, same, same], [faster, faster, faster, same]])
    monkeypatch.setattr(checks, "compare_ladder", lambda *_: next(ladders))
    figures = checks.aa_ladder(workbench(cached_noise_floor=0.0), Scale(2, 0, 0, 1, 0, 0, 0))
    counts = (figures["comparisons"], figures["false_alarms"], figures["confirmed"])
    assert counts == (4, 2, 1)


def test_an_error_keeps_the_comparisons_before_it(monkeypatch):
    ladders = iter([[comparison(Verdict.SAME, 1.0)]] * 2)
    monkeypatch.setattr(checks, "compare_ladder", lambda *_: next(ladders))
    figures = checks.aa(workbench(cached_noise_floor=0.0), Scale(2, 3, 0, 0, 0, 0, 0))
    assert (figures["comparisons"], figures["broken"]) == (2, "StopIteration: ")
    first = records.rows({"aa": figures})[0]
    assert first.measured.endswith("; stopped by StopIteration: ")
    assert not first.is_met


@pytest.mark.parametrize("kind", TIMES)
def test_a_slowdown_has_the_given_share(kind):
    bench = workbench(Noise.none())
    slow, fast = ground_truth.calibrate_slowdown(bench, bench.kinds[kind])(0.02)
    x = np.ones(3)
    slow_s, fast_s = (
        bench.device.block([lambda arm=arm: arm(x)], Mode.PLAIN).run() for arm in (slow, fast)
    )
    assert slow_s / fast_s == pytest.approx(1.02, abs=1e-5)


def test_a_spin_without_effect_is_refused():
    bench = workbench(Noise.none(), spin=lambda _: None)
    with pytest.raises(InvalidMeasurement, match="did not slow its arm by 5 %"):
        ground_truth.calibrate_slowdown(bench, bench.kinds["copy"])


def test_slowdowns_of_either_arm_are_detected(record):
    figures = record["parts"]["power"]
    assert {"0.005", "0.01", "0.02", "0.05"} < set(figures)
    assert (figures["0.05"]["seen"], figures["0.05"]["of"], figures["0.05"]["wrong"]) == (4, 4, 0)
    assert figures["0.02"]["seen"] == 4
    assert figures["0.05"]["mean"] == pytest.approx(0.05, abs=0.005)


def test_a_slowdown_of_any_arm_of_a_ladder_is_detected_and_of_no_other(monkeypatch):
    bench = workbench()
    monkeypatch.setattr(bench, "random", random.Random(1))
    positions = iter([*range(5)] * 2)  # the baseline, then each of the other arms; per slowdown
    monkeypatch.setattr(bench.random, "randrange", lambda stop: next(positions) if stop == 5 else 7)
    figures = checks.power_ladder(bench, dataclasses.replace(TINY, ladders=5))
    for share in ("0.02", "0.05"):
        f = figures[share]
        assert (f["of"], f["seen"], f["wrong"], f["equal"], f["false_alarms"]) == (8, 8, 0, 12, 0)
        assert f["mean"] == pytest.approx(float(share), abs=0.004)
    rows = records.rows({"power_ladder": figures})
    assert [row.is_met for row in rows] == [True] * 4
    assert rows[1].check == "false alarms, one arm 2.0 % slower, ladders of 5 arms"
    figures["0.02"] |= {"false_alarms": 1}
    figures["0.05"] |= {"wrong": 1}
    rows = records.rows({"power_ladder": figures})
    assert [row.is_met for row in rows] == [True, False, False, True]


def test_ladders_of_noisy_identical_arms_give_no_false_alarm():
    """With a noise floor of 0, an interval that misses 1 by 0.1 % is a false alarm."""
    bench = workbench(Noise(), seed=4, cached_noise_floor=0.0)
    figures = checks.aa_ladder(bench, dataclasses.replace(TINY, ladders=20))
    assert figures["comparisons"] == 80
    # up to 1.9 % of the intervals miss 1 (see StoppingRule): more than 5 of 80 hardly ever do, and
    # of these hardly ever more than one misses it twice (the time budget decides about the noise)
    assert figures["false_alarms"] <= figures["without_1"] <= 5
    assert figures["confirmed"] <= 1


def test_heating_disturbs_medians_in_sequence_but_no_paired_rounds():
    noise = dataclasses.replace(CALM, drift=1e-4, drift_s=0.003)
    figures = checks.drift(workbench(noise), Scale(2, 0, 0, 0, 4, 0, 0))
    heated = figures["heated"]
    assert heated["comparisons"] == 8
    assert (heated["ours"]["false_alarms"], heated["ours"]["refused"]) == (0, 0)
    assert heated["sequential"]["sd"] > heated["ours"]["sd"]
    assert heated["slower_after_heat"] > 0.005
    assert figures["cold"]["slower_after_heat"] is None


def test_only_timed_blocks_are_heated_and_half_of_them():
    heats = []
    fake = FakeDevice(FAKE_GPU, Noise.none())
    device = HeatedDevice(fake, lambda: heats.append(1), random.Random(2))
    for _ in range(20):
        device.block([lambda: "last"], Mode.WALL).run()
    assert not heats
    block = device.block([lambda: "last" if spend(1e-6) is None else None], Mode.GRAPH)
    for _ in range(100):
        block.run()
    assert block.kept == "last"
    assert 30 < len(heats) < 70
    assert device.effect() == pytest.approx(0)


def test_one_claim_is_measured_in_several_processes(record):
    figures = record["parts"]["repeat"]
    assert figures["processes"] == 3
    assert figures["ratio"] == pytest.approx(2, rel=0.01)
    assert 0 < figures["sd"] < 0.01


def test_the_harness_and_other_timers_judge_the_same_cases():
    bench = workbench(cached_noise_floor=0.0)
    cases = (Case(5e-6), Case(5e-6, 0.05), Case("copy", condition="heated"), Case("copy", 0.05))
    timers = {"blocks": block_timer(bench), "blind": lambda _: 1.0}
    figures = other_timers.head_to_head(bench, cases, timers)
    assert set(figures["ways"]) == {"ours", "blocks", "blind"}
    assert figures["ways"]["ours"]["seen"] == 2
    assert figures["ways"]["ours"]["false_alarms"] == 0
    assert figures["ways"]["blind"]["seen"] == 0
    assert figures["ways"]["blind"]["bias"] == pytest.approx(-math.log(1.05) / 2)
    assert list(figures["cases"]) == [
        "spin 5 us 1x",
        "spin 5 us 1.05x",
        "copy 1x heated",
        "copy 1.05x",
    ]


def test_ten_cases_are_identical_ten_differ_and_all_names_are_distinct():
    assert len(other_timers.CASES) == len({str(case) for case in other_timers.CASES}) == 20
    assert sum(case.share == 0 for case in other_timers.CASES) == 10
    assert {case.kind for case in other_timers.CASES if isinstance(case.kind, str)} <= set(TIMES)


# the record


class CountingLock:
    """Counts how often it is acquired."""

    def __init__(self):
        self.acquired, self.is_held = 0, False

    @contextlib.contextmanager
    def __call__(self):
        assert not self.is_held
        self.acquired, self.is_held = self.acquired + 1, True
        try:
            yield
        finally:
            self.is_held = False


def test_each_part_is_stored_and_one_that_fails_stops_no_other(monkeypatch):
    def fails(*_):
        raise RuntimeError("CUDA error: an illegal address\nmore")

    lock, stored, progress = CountingLock(), {}, []
    monkeypatch.setattr(records, "PARTS", {**records.PARTS, "flush": fails})
    monkeypatch.setattr(records, "QUICK", TINY)
    names = ("floor", "flush", "modes")
    records.run(names, workbench, lock, stored.__setitem__, progress.append, quick=True)
    assert list(stored) == list(names)
    assert stored["flush"]["failed"] == "RuntimeError: CUDA error: an illegal address"
    assert stored["modes"]["quick"] is True
    assert lock.acquired == 4  # three parts, and once to make the workbench
    assert any("Traceback" in line for line in progress)
    assert [row.is_met for row in records.rows(stored)] == [None, False, None]


def test_the_processes_of_repeat_acquire_the_lock_themselves(monkeypatch):
    lock, stored = CountingLock(), {}

    def measure_in_new_process():
        assert not lock.is_held
        return 2.0

    monkeypatch.setattr(records, "FULL", TINY)
    records.run(
        ("repeat",),
        lambda: workbench(measure_in_new_process=measure_in_new_process),
        lock,
        stored.__setitem__,
        ground_truth.no_progress,
    )
    assert stored["repeat"]["ratio"] == pytest.approx(2)


def test_an_interrupt_keeps_the_parts_that_ended(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "FULL", TINY)
    monkeypatch.setattr(records, "PARTS", {**records.PARTS, "aa": interrupted})
    record = records.Record(FAKE_GPU, tmp_path / "proof.json")
    with pytest.raises(KeyboardInterrupt):
        records.run(
            ("floor", "aa"), workbench, CountingLock(), record.store, ground_truth.no_progress
        )
    assert list(records.read(tmp_path / "proof.json")["parts"]) == ["floor"]


def test_parts_of_the_same_machine_stay_in_the_record(tmp_path):
    path = tmp_path / "proof.json"
    records.Record(FAKE_GPU, path).store("floor", {"graph": 0.123456789})
    records.Record(FAKE_GPU, path).store("spin", {"slope": [1.0]})
    content = records.read(path)
    assert content["parts"] == {"spin": {"slope": [1.0]}, "floor": {"graph": 0.12346}}
    assert content["gpu"]["uuid"] == ""
    other = dataclasses.replace(FAKE_GPU, driver="1")
    records.Record(other, path).store("aa", {})
    assert list(records.read(path)["parts"]) == ["aa"]


def test_a_file_that_is_no_record_is_refused(tmp_path):
    (path := tmp_path / "x.json").write_text('{"schema": 2, "parts": {}}')
    with pytest.raises(UsageError, match="not a self-check record of schema 1"):
        records.read(path)


def test_unknown_parts_are_refused():
    assert records.parts_named(None) == records.ALL
    assert records.parts_named("spin, aa") == ("spin", "aa")
    assert "one" not in records.ALL
    with pytest.raises(UsageError, match="no part 'spins'; choose from spin, "):
        records.parts_named("spins")


@pytest.fixture(scope="module")
def record():
    """Make a record of all parts on the fake device; ``block_timer`` replaces other timers."""
    parts = {name: part for name, part in records.PARTS.items() if name != "rivals"}
    bench = workbench(dataclasses.replace(CALM, white=5e-5, layout=5e-5))
    stored = {name: {"date": "2026-11-22", **part(bench, TINY)} for name, part in parts.items()}
    timers = {"blocks": block_timer(bench)}
    comparisons = other_timers.head_to_head(bench, other_timers.CASES[:2], timers)
    stored["rivals"] = {"date": "2026-11-21", **comparisons}
    file = records.Record(FAKE_GPU, None)
    for name, figures in stored.items():
        file.store(name, figures)
    return file.content


def test_a_record_is_small_strict_json(record):
    text = json.dumps(record, allow_nan=False)
    assert len(text) < 8_000


def test_all_parts_are_shown(record):
    rows = records.rows(record["parts"])
    assert [row.check for row in rows if row.is_met is False] == []
    shown = "\n".join(records.lines(record["parts"]))
    for word in (
        "graph",
        "empty kernel",
        "MiB",
        "0.5 % slower",
        "heated",
        "3 processes",
        "identical",
    ):
        assert word in shown
    assert "| pytest-aiperf " in shown
    kinds = [line for line in shown.splitlines() if line.startswith("| identical arms")]
    assert [line.split(" | ")[0].strip("| ") for line in kinds] == [
        "identical arms",
        "identical arms, ladders of 5 arms",
    ]
    assert len({len(line) for line in shown.split("\n\n")[0].splitlines()}) == 1


def test_figures_outside_their_bounds_are_marked(record):
    aa = {**record["parts"]["aa"], "comparisons": 300, "false_alarms": 4, "confirmed": 1}
    repeat = {**record["parts"]["repeat"], "sd": 0.006}
    heated = {"ours": {"false_alarms": 0, "refused": 2, "sd": None}}
    drift = {"heated": {**record["parts"]["drift"]["heated"], **heated}}  # every comparison refused
    rows = records.rows({"aa": aa, "repeat": repeat, "drift": drift})
    assert [row.is_met for row in rows] == [False, False, True, False, False]


def test_the_section_of_a_record_names_the_machine_and_the_dates(record):
    text = records.section(record)
    assert text.startswith("Fake H200, driver 0, torch ")
    assert "2026-11-21 to 2026-11-22, `python -m pytest_aiperf prove`:" in text
    assert "| an empty kernel, per call " in text


def test_without_a_gpu_the_command_fails(monkeypatch, capsys):
    monkeypatch.setattr("pytest_aiperf.session.cuda_machine.CudaMachine.gpus", lambda _: [])
    assert main(["prove"]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err


def test_the_command_prints_tables_and_writes_the_record(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PYTEST_AIPERF_LOCKS", str(tmp_path / "locks"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("pytest_aiperf.session.cuda_machine.CudaMachine.gpus", lambda _: [FAKE_GPU])
    monkeypatch.setattr(
        "pytest_aiperf.session.cuda_machine.CudaMachine.open_device", lambda *_: None
    )
    monkeypatch.setattr(ground_truth, "on_gpu", lambda _, progress: workbench(progress=progress))
    path = tmp_path / "proof.json"
    assert main(["prove", "--only=floor,repeat", "--quick", f"--json={path}"]) == 0
    out, err = capsys.readouterr()
    assert "| an empty kernel, per call " in out
    assert "repeat: 2 of 2: " in err
    assert list(records.read(path)["parts"]) == ["floor", "repeat"]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "PARTS", {**records.PARTS, "aa": interrupted})
    assert main(["prove", "--only=floor,aa"]) == 1
    out, err = capsys.readouterr()
    assert "| an empty kernel, per call " in out
    assert "interrupted" in err


def test_the_workbench_of_a_gpu_calibrates_its_spins(monkeypatch):
    """The fake kernels spin at an SM clock of 2 GHz and count nanoseconds."""
    cycles_spun = []

    def spin(cycles):
        cycles_spun.append(cycles)
        spend(cycles / 2e9)

    def timed_spin(cycles, totals):
        spin(cycles)
        totals[0] += round(cycles / 2)
        totals[1] += 1

    lookups = []

    class Kernels(dict):
        def __getitem__(self, name):
            lookups.append(name)
            return super().__getitem__(name)

    kernels = {
        "spin": spin,
        "timed_spin": timed_spin,
        "empty": lambda: None,
        "sweep": lambda data, size, _: spend(size),
    }
    monkeypatch.setattr(ground_truth.nvcc, "Nvcc", lambda *_: lambda _: Kernels(kernels))
    monkeypatch.setattr(ground_truth, "_HEAT_MATRIX_SIDE", 8)
    monkeypatch.setattr(
        ground_truth.ceilings, "get", lambda _device, names, _progress: {names[0]: 4e12}
    )
    bench = ground_truth.on_gpu(FakeDevice(FAKE_GPU, Noise.none()), ground_truth.no_progress)
    assert len(lookups) == 4
    bench.timed_spin(5e-6)
    bench.timed_spin(15e-6)
    bench.spin(1e-6)
    assert cycles_spun[-3:] == [10_000, 30_000, 2_000]
    assert bench.pop_mean_spin_s() == pytest.approx(10e-6)
    assert bench.pop_mean_spin_s() == 0  # the previous call has reset the total
    assert bench.device.block([bench.sweep(3)], Mode.PLAIN).run() == 3
    assert bench.read_limit() == 4e12
    bench.heat()
    assert set(bench.kinds) == set(TIMES)
    assert len(lookups) == 4  # calls look no kernel up: that takes longer than a launch


@pytest.mark.parametrize("works", [True, False])
def test_a_new_process_measures_one_claim(monkeypatch, works):
    def run(command, **options):
        assert command[1:5] == ["-m", "pytest_aiperf", "prove", "--only=one"]
        assert options["timeout"]
        if works:
            path = command[5].removeprefix("--json=")
            Path(path).write_text('{"parts": {"one": {"ratio": 2.5}}}')
        return subprocess.CompletedProcess(command, 0, "", "no GPU\n")

    monkeypatch.setattr(ground_truth.subprocess, "run", run)
    if works:
        assert ground_truth._measure_in_new_process() == 2.5
    else:
        with pytest.raises(AiperfError, match="failed: no GPU"):
            ground_truth._measure_in_new_process()


def test_the_kernels_build_with_these_signatures():
    source = ground_truth._KERNELS
    built = build(source, "sm90")
    kernels = Kernels(source.name, source.read_text(), built.path)
    assert {name: kernels[name].text.partition("(")[2] for name in kernels} == {
        "spin": "long long cycles, cudaStream_t stream)",
        "timed_spin": "long long cycles, unsigned long long* totals, cudaStream_t stream)",
        "empty": "cudaStream_t stream)",
        "sweep": "const void* in, size_t bytes, unsigned* out, cudaStream_t stream)",
    }
    assert all(kernel.spill_bytes == 0 for kernel in built.kernels)
