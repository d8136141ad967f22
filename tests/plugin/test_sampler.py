"""A claim on the fake device: how its arms are prepared, timed and verified, and when it stops."""

import contextlib
import gc
import itertools
import math
import random
import re
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytest_aiperf import Score, prepared, static
from pytest_aiperf.claim import buffers, replicates, result_copies, sampler
from pytest_aiperf.claim import ladder as ladders
from pytest_aiperf.claim.bound_claim import AGREEMENT_SEEDS, BoundClaim
from pytest_aiperf.claim.ladder import Ladder
from pytest_aiperf.claim.measure import noise_floor
from pytest_aiperf.claim.replicates import measure_metric
from pytest_aiperf.claim.search import Search
from pytest_aiperf.claim.stopping_rule import PATIENT, QUICK, STANDARD, StoppingRule
from pytest_aiperf.device.device import HostDevice
from pytest_aiperf.errors import InvalidMeasurement, UsageError, WrongResult
from pytest_aiperf.machine.distributed import RankGroup
from pytest_aiperf.model import Metric, Mode, Verdict
from pytest_aiperf.rules import validity
from pytest_aiperf.rules.stats import half_width, speedup, t_quantile
from pytest_aiperf.rules.verdict import verdict
from tests.fake_gpu import (
    FAKE_GPU,
    Allocation,
    FakeDevice,
    Fault,
    Noise,
    RepeatingDevice,
    spend,
    synchronise,
)
from tests.plugin.claims import a_claim, doubling, vectors

WHITE = replace(Noise.none(), white=0.002)


def a_bound_claim(device=None, phases=None, **words):
    device = device or FakeDevice(noise=WHITE, seed=1)
    phases = [] if phases is None else phases
    progress = lambda phase, **figures: phases.append((phase, figures))
    return BoundClaim(a_claim(**words), device, 1, full=True, progress=progress)


def measured(bound, rule=STANDARD, metric=Metric.DEVICE):
    bound.check_agreement()
    ladder = Ladder([bound])
    timing = measure_metric(ladder, metric, rule)
    ladder.verify()
    ladder.raise_error()
    return timing


def a_sampler(bound, metric=Metric.DEVICE, prebuilt=(1001,)):
    timed = sampler.Sampler(Ladder([bound]), metric, STANDARD)
    timed.prepare(prebuilt)
    timed.begin()
    return timed


# prepared arms and settings


def test_a_prepared_arm_is_timed_without_its_preparation():
    def make(x):
        spend(1.0)
        return doubling(100)

    ratio = speedup(measured(a_bound_claim(optimized=prepared(make))))
    assert ratio.value == pytest.approx(2, rel=0.005)


def test_work_done_while_preparing_gives_a_wrong_result():
    def make(x):
        done = x * 2
        return lambda x: done

    with pytest.raises(
        WrongResult, match=r"optimized disagrees.*; inputs are overwritten .*static"
    ):
        a_bound_claim(optimized=prepared(make)).check_agreement()


def test_static_inputs_may_be_consumed_while_preparing():
    def inputs(bench):
        rng = np.random.default_rng(bench.seed)
        return rng.random(8), static(rng.random(8))

    def make(x, weights):
        halved = weights / 2
        return lambda x, weights: x * halved

    words = {
        "inputs": inputs,
        "baseline": lambda x, w: x * (w / 2),
        "optimized": prepared(make),
        "reference": lambda x, w: x * w / 2,
    }
    assert {e.arm for e in a_bound_claim(**words).check_agreement()} == {"baseline", "optimized"}
    words["inputs"] = lambda bench: (inputs(bench)[0], inputs(bench)[1].value)
    with pytest.raises(WrongResult):
        a_bound_claim(**words).check_agreement()


def test_a_destination_that_no_arm_writes_is_named():
    def inputs(bench):
        rng = np.random.default_rng(bench.seed)
        unset = np.random.default_rng().random(8)  # as memory of numpy.empty may be
        return rng.random(8), unset

    names = {"baseline": lambda x, out: x * 2, "reference": lambda x, out: x + x}
    claim = a_bound_claim(inputs=inputs, optimized=lambda x, out: x + x, **names)
    with pytest.raises(
        UsageError, match=r"different values for the same seed: out \(all arms .*scratch memory"
    ):
        claim.check_agreement()


def test_no_garbage_is_collected_while_an_arm_prepares():
    seen = []
    arm = prepared(lambda x: seen.append(gc.isenabled()) or doubling(100))
    bound = a_bound_claim(optimized=arm)
    bound.check_agreement()
    bound.prepare("optimized", bound.make_inputs(1))
    assert set(seen) == {False}
    assert gc.isenabled()


def test_a_prepared_arm_must_return_a_callable():
    with pytest.raises(UsageError, match="must return the callable"):
        a_bound_claim(optimized=prepared(lambda x: x * 2)).check_agreement()


def test_arms_must_take_the_inputs():
    with pytest.raises(UsageError, match=r"optimized=.* does not take the 1 value"):
        a_bound_claim(optimized=lambda x, y: x).check_agreement()


@pytest.mark.parametrize("arm", ["baseline", "optimized"])
def test_an_arm_that_flips_a_global_switch_is_found(monkeypatch, arm):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")

    def flips(x):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        return x * 2

    with pytest.raises(InvalidMeasurement, match="OMP_NUM_THREADS: 4 -> 1"):
        a_bound_claim(**{arm: flips}).check_agreement()


# rounds, modes and verification


def test_rounds_are_mirrored_and_their_order_is_drawn():
    timing = measured(
        a_bound_claim(library=doubling(150)),
        replace(STANDARD, min_replicates=16, max_replicates=16),
    )
    orders = [r.order for replicate in timing.replicates for r in replicate.rounds]
    assert all(order == order[::-1] and sorted(order) == sorted("ABCABC") for order in orders)
    assert len(set(orders)) > 3  # rotations of one order are three


def test_each_arm_has_each_place_equally_often():
    timing = measured(
        a_bound_claim(library=doubling(150)), replace(STANDARD, min_replicates=6, max_replicates=6)
    )
    orders = [r.order for replicate in timing.replicates for r in replicate.rounds]
    assert len(orders) % 3 == 0
    for place in range(3):
        letters = [order[place] for order in orders]
        assert {letters.count(arm) for arm in "ABC"} == {len(orders) // 3}


def test_ranks_that_have_drawn_differently_are_refused_before_they_call_different_arms():
    class Others(RankGroup):
        count = 2
        passed = 2**31

        def max(self, figure):
            return max(figure, math.copysign(self.passed, figure))

    device = FakeDevice(FAKE_GPU, Noise.none())
    timed = a_sampler(a_bound_claim(device))
    device.ranks = Others()
    with pytest.raises(InvalidMeasurement, match="the ranks have chosen different inputs"):
        timed._refuse_ranks_apart()


def test_each_replicate_has_a_seed_of_its_own_and_fresh_inputs():
    seeds = []

    def inputs(bench):
        seeds.append(bench.seed)
        return vectors(bench)

    timing = measured(a_bound_claim(inputs=inputs))
    own = [r.seed for r in timing.replicates]
    assert len(set(own)) == len(own)
    assert set(own) <= set(seeds)


def test_no_arm_can_draw_its_inputs_again():
    bound = a_bound_claim(HostDevice(), inputs=lambda bench: (np.zeros(1), random.random()))

    def drawn(seed):
        _, number = bound.make_inputs(seed).args
        return number, torch.initial_seed(), random.random(), np.random.random()  # noqa: NPY002

    first = drawn(3)
    assert first == drawn(3), "arms that draw numbers must draw the same"
    assert not {*first} & {*drawn(4)}
    random.seed(3)
    assert first[0] == random.random()
    assert first[2] != random.random()
    np.random.seed(3)  # noqa: NPY002
    assert first[1] != 3
    assert first[3] != np.random.random()  # noqa: NPY002


@pytest.mark.parametrize(("is_prepared", "calls_per_set"), [(False, 1), (True, 3)])
def test_inputs_is_called_once_per_set(monkeypatch, is_prepared, calls_per_set):
    """A prepared arm's set is overwritten twice: with decoy values, then with the real ones."""
    monkeypatch.setattr(sampler.Sampler, "_short_blocks", lambda *_: ())  # they have any length
    calls = []
    arm = prepared(lambda x: doubling(100)) if is_prepared else doubling(100)
    bound = a_bound_claim(
        inputs=lambda bench: calls.append(bench.seed) or vectors(bench), optimized=arm
    )
    bound.check_agreement()
    # 2 calls infer effects, 2 compare two seeds, one is for shortcuts; per seed, one for each arm
    # and the reference
    assert len(calls) == 5 + AGREEMENT_SEEDS * (2 + calls_per_set)
    calls.clear()
    ladder = Ladder([bound])
    timing = measure_metric(ladder, Metric.DEVICE, STANDARD)
    sets = len(timing.replicates) * timing.sets
    blocks = sum(len(r.rounds) * 2 for r in timing.replicates)
    alone = 2 * len(timing.replicates)
    estimates = 3 * len(timing.calls)
    renewed = estimates + blocks * sum(timing.calls.values()) + alone
    # 1 call finds the size of a set
    assert len(calls) == 1 + sets * (1 + calls_per_set) + renewed
    calls.clear()
    ladder.verify()
    results = blocks + alone // 2
    assert len(calls) == results * (2 + is_prepared)


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("microseconds", [10, 100, 1_000, 50_000])
def test_no_block_has_values_that_an_earlier_call_had(is_prepared, microseconds):
    met, repeated, blocks = set(), [], []

    class Watched(FakeDevice):
        def run(self, calls, *about):
            blocks.append(len(calls))
            return super().run(calls, *about)

    def arm(x):
        spend(microseconds * 1e-6)
        repeated.append((len(blocks), float(x[0]) in met))
        met.add(float(x[0]))
        return x * 2

    optimized = prepared(lambda x: arm) if is_prepared else arm
    bound = a_bound_claim(
        Watched(noise=WHITE), baseline=doubling(2 * microseconds), optimized=optimized
    )
    bound.check_agreement()
    timed = a_sampler(bound)
    assert max(timed.calls.values()) <= timed.builder.sets
    timed._make_batches_once = timed._make_batches
    warm_ups = []

    def make(*about):
        made = timed._make_batches_once(*about)
        warm_ups.append(len(repeated))  # a capture calls each arm, and a wall block is warmed up
        return made

    timed._make_batches = make
    timed.replicate(2)
    assert sum(again for _, again in repeated[warm_ups[-1] :]) == 0


def test_arms_have_values_of_their_own():
    """A table that one arm fills holds nothing that the other could use."""
    values = {"baseline": set(), "optimized": set()}

    def arm(name):
        def double(x):
            spend(100e-6)
            values[name].add(float(x[0]))
            return x * 2

        return double

    bound = a_bound_claim(baseline=arm("baseline"), optimized=arm("optimized"))
    bound.check_agreement()
    timed = a_sampler(bound)
    for seen in values.values():
        seen.clear()
    timed.builder.run_once = lambda arm: None
    timed.replicate(timed.bound.seed + 77_000)
    fresh = [seen - values["baseline"] for seen in values.values()]
    assert len(values["baseline"]) > 20
    assert len(fresh[1]) == len(values["optimized"])


def test_cold_inputs_span_the_cache_and_a_block_goes_round_them():
    gpu = replace(FAKE_GPU, l2_bytes=64 * 8 * 10)
    timing = measured(a_bound_claim(FakeDevice(gpu, WHITE)))
    assert timing.sets == 30  # a set is a tenth of the L2, and all sets span three times the L2
    assert min(timing.calls.values()) >= timing.sets
    assert timing.cache == "cold"


def test_a_long_call_is_cold_although_its_block_does_not_go_round_the_sets():
    class Counting(FakeDevice):
        renews = False  # as on a GPU
        flushed = 0

        def flush(self):
            self.flushed += 1

    device = Counting(replace(FAKE_GPU, l2_bytes=64 * 8 * 10), WHITE)
    timing = measured(a_bound_claim(device, baseline=doubling(100_000)))
    assert timing.calls["baseline"] == 1 < timing.sets <= timing.calls["optimized"]
    assert device.flushed == sum(2 * len(r.rounds) for r in timing.replicates)  # its blocks


def test_inputs_too_small_to_be_kept_cold_are_refused():
    gpu = replace(FAKE_GPU, l2_bytes=64 << 20)
    with pytest.raises(UsageError, match='declare cache="warm" or enlarge the inputs'):
        measured(a_bound_claim(FakeDevice(gpu, WHITE)))
    assert measured(a_bound_claim(FakeDevice(gpu, WHITE), cache="warm")).cache == "warm"


def test_short_calls_are_captured_and_those_that_cannot_be_fall_back():
    short = {"baseline": doubling(20), "optimized": doubling(10)}
    assert measured(a_bound_claim(**short)).mode is Mode.GRAPH

    def waits(x):
        spend(10e-6)
        synchronise()
        return x * 2

    timing = measured(a_bound_claim(**short | {"optimized": waits}))
    assert timing.mode is Mode.PLAIN
    assert [note.partition(":")[0] for note in timing.notes] == [
        "not timed by graph",
        "not timed by backlog",
    ]


def test_a_disturbed_round_is_measured_again_and_counted(monkeypatch):
    monkeypatch.setattr(sampler.Sampler, "_short_blocks", lambda *_: ())  # these are not repeated
    clean = measured(a_bound_claim(FakeDevice(noise=Noise.none())))
    assert sum(r.redone for r in clean.replicates) == 0
    faults = [Fault(42, "throttle")]  # in the middle of a round
    timing = measured(a_bound_claim(FakeDevice(noise=Noise.none(), faults=faults)))
    assert sum(r.redone for r in timing.replicates) == 1
    assert speedup(timing).value == pytest.approx(2)


@pytest.mark.parametrize(("rounds", "settled"), [(1, 0), (2, 1), (3, 2)])
def test_a_round_is_repeated_at_once_and_then_with_stable_clocks(rounds, settled):
    class Counting(FakeDevice):
        settlings = 0

        def stabilize_clocks(self, call):
            self.settlings += 1
            super().stabilize_clocks(call)

    device = Counting(noise=Noise.none())
    bound = a_bound_claim(device)
    bound.check_agreement()
    timed = a_sampler(bound)
    before, faults, undisturbed = device.settlings, ["a fault"] * rounds, timed._round

    def disturbed(blocks):
        done, _ = undisturbed(blocks)
        return done, faults.pop() if faults and not blocks.calls else None

    timed._round = disturbed
    assert timed.replicate(2).redone == rounds
    assert device.settlings - before == settled


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 2), (0.009, 2), (0.015, 1)])
def test_a_block_that_takes_the_host_long_to_enqueue_has_fewer_rounds(monkeypatch, seconds, rounds):
    now = [0.0]
    for module in (buffers, sampler):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(sampler, "MAX_ROUNDS", 1)

    class Slow(FakeDevice):
        def block(self, calls, mode, keep=-1):
            made = super().block(calls, mode, keep)

            class Block:
                kept = None

                def run(self, *hooks):
                    now[0] += seconds
                    return made.run(*hooks)

            return Block()

    class Two(RankGroup):
        def max(self, figure):
            maxima.append(figure)
            return figure

    maxima = []
    bound = a_bound_claim(Slow(noise=Noise.none(), ranks=Two()))
    bound.check_agreement()
    timed = a_sampler(bound)
    assert timed.mode is Mode.BACKLOG
    assert timed.rounds == rounds
    # all ranks take the maximum: of the two blocks' time on the device and on the host, twice
    assert maxima[-1] == pytest.approx(max(2 * (11 * 2e-4 + 11 * 1e-4), 4 * seconds), rel=0.2)


def test_a_gpu_that_throttles_all_the_time_is_invalid():
    device = FakeDevice(noise=Noise.none(), faults=[Fault(20, "throttle", blocks=10_000)])
    with pytest.raises(InvalidMeasurement, match=r"disturbed.*let the GPU cool"):
        measured(a_bound_claim(device))


def test_a_clock_that_follows_the_load_disturbs_no_wall_time():
    class Alternating(FakeDevice):
        clocks = itertools.cycle((1560, 1935))

        def telemetry(self):
            return replace(super().telemetry(), sm_mhz=next(self.clocks))

    with pytest.raises(InvalidMeasurement, match="by the SM clock, which went from"):
        measured(a_bound_claim(Alternating(noise=Noise.none())))
    bound = a_bound_claim(Alternating(noise=Noise.none()), metric="wall")
    rounds = [r for each in measured(bound, metric=Metric.WALL).replicates for r in each.rounds]
    assert {r.sm_mhz for r in rounds} <= {1560, 1935}  # recorded


def test_outputs_of_timed_calls_are_verified():
    calls = []

    def tires(x):
        calls.append(1)
        spend(100e-6)
        return x * 2 if len(calls) < 50 else x

    with pytest.raises(WrongResult, match=r"optimized disagrees.*in a timed block"):
        measured(a_bound_claim(optimized=tires))


def left(ladder, bound, seed, arms=("baseline", "optimized"), factor=2.0):
    for name in arms:
        outputs = [("0", bound.make_inputs(seed).args[0] * factor)]
        ladder.verify_later(name, outputs, seed, "then")


@pytest.mark.parametrize(("kib", "kept"), [(5, 10), (1 << 20, 12)])
def test_outputs_wait_for_verification_up_to_a_share_of_the_memory(kib, kept):
    """Each output takes half a KiB; beyond the room for them, those of both arms are dropped."""
    gpu = replace(FAKE_GPU, memory_bytes=64 * kib * 1024)
    bound = a_bound_claim(FakeDevice(gpu, WHITE))
    ladder = Ladder([bound])
    for seed in range(6):
        left(ladder, bound, seed)
    arms = [p.arm for p in ladder._pending]
    assert len(arms) == kept
    assert arms.count("baseline") == arms.count("optimized")


def test_one_output_of_each_arm_is_kept_whatever_its_size():
    bound = a_bound_claim(FakeDevice(replace(FAKE_GPU, memory_bytes=64), WHITE))
    ladder = Ladder([bound])
    for seed in range(6):
        left(ladder, bound, seed)
    assert sorted(p.arm for p in ladder._pending) == ["baseline", "optimized"]


@pytest.mark.parametrize(("seconds", "verified"), [(0.0, 20), (1.0, 8), (3.0, 3)])
def test_results_are_verified_while_time_allows_and_some_of_each_arm_at_least(
    monkeypatch, seconds, verified
):
    now, calls = [0.0], []
    clock = lambda: now[0]
    monkeypatch.setattr(ladders, "time", SimpleNamespace(monotonic=clock, thread_time=clock))

    def reference(x):
        calls.append(1)
        now[0] += seconds
        return x + x

    bound = a_bound_claim(reference=reference)
    ladder = Ladder([bound])
    for seed in range(10):
        left(ladder, bound, seed)
    ladder.verify()
    assert len(calls) == verified


def test_other_work_on_the_machine_does_not_leave_results_unverified(monkeypatch):
    now, calls = [0.0], []
    clocks = {"monotonic": lambda: now[0], "thread_time": lambda: 0.0}
    monkeypatch.setattr(ladders, "time", SimpleNamespace(**clocks))

    def reference(x):
        calls.append(1)
        now[0] += ladders.VERIFYING_S
        return x + x

    bound = a_bound_claim(reference=reference)
    ladder = Ladder([bound])
    for seed in range(10):
        left(ladder, bound, seed)
    ladder.verify()
    assert len(calls) == 20


def test_a_wrong_result_among_right_ones_is_found():
    bound = a_bound_claim()
    ladder = Ladder([bound])
    for seed in range(10):
        left(ladder, bound, seed, factor=2.0)
    left(ladder, bound, 10, ["optimized"], factor=2.1)
    ladder.verify()
    with pytest.raises(WrongResult, match="optimized disagrees with the reference then"):
        ladder.raise_error()


@pytest.mark.parametrize("is_hard", [True, False])
def test_a_result_may_be_as_far_off_as_the_baselines_on_the_same_inputs(is_hard):
    """On the inputs of one seed, which no kept result of the baseline has, it is far off, too."""
    hard = a_bound_claim().make_inputs(10).args[0][0]

    def doubled(x):
        return x * (2 + 1e-12 if is_hard and x[0] == hard else 2.0)

    bound = a_bound_claim(baseline=doubled)
    bound.check_agreement()
    ladder = Ladder([bound])
    for seed in range(4):
        left(ladder, bound, seed)
    left(ladder, bound, 10, ["optimized"], factor=2 + 1.5e-12)
    ladder.verify()
    error = ladder.rungs[0].error
    assert error is None if is_hard else isinstance(error, WrongResult)


@pytest.mark.parametrize(("variants", "is_refused"), [(8, True), (64, True), (1 << 16, False)])
def test_inputs_of_few_seeds_are_refused(variants, is_refused):
    def inputs(bench):
        return (np.random.default_rng(bench.seed % variants).random(64),)

    bound = a_bound_claim(inputs=inputs)
    bound.check_agreement()
    refused = pytest.raises(UsageError, match="the same values for the seeds")
    with refused if is_refused else contextlib.nullcontext():
        # a seed of 65,536 may return by chance, as the last one here does
        for seed in [*range(1000, 1150), 1000 + (1 << 16)]:
            bound.make_inputs(seed)


def test_errors_are_limited_by_the_largest_of_the_baselines():
    """The arms have other values; a seed on which the baseline is exact must not limit the rest."""
    bound = a_bound_claim()
    for factors, is_wrong in (((2 + 1e-12, 2.0), False), ((2.0, 2.0), True)):
        ladder = Ladder([bound])
        for seed, factor in enumerate(factors):
            left(ladder, bound, seed, ["baseline"], factor)
        left(ladder, bound, 7, ["optimized"], 2 + 2e-12)
        ladder._baselines.clear()
        ladder.verify()
        assert (ladder.rungs[0].error is not None) == is_wrong


def test_arms_that_update_in_place_are_verified_on_new_values():
    def adding(microseconds):
        def add(x):
            spend(microseconds * 1e-6)
            x += 1

        return add

    words = {"baseline": adding(200), "optimized": adding(100), "reference": lambda x: x + 1}
    ratio = speedup(measured(a_bound_claim(**words)))
    assert ratio.value == pytest.approx(2, rel=0.01)


# the stopping rule


def test_it_stops_when_the_interval_is_narrow():
    timing = measured(a_bound_claim())
    assert (timing.stopped, len(timing.replicates)) == ("width", STANDARD.min_replicates)
    assert half_width(speedup(timing)) <= STANDARD.target_half_width


# at 0.002 nearly all runs stop at the minimum of replicates, at 0.008 most run longer
@pytest.mark.parametrize("sd", [0.002, 0.005, 0.008])
def test_stopping_at_a_width_hardly_lowers_the_coverage_of_intervals(sd):
    rng, runs, missed = np.random.default_rng(1), 20_000, 0
    drawn, open_ = rng.normal(0, sd, (runs, STANDARD.max_replicates)), np.ones(runs, bool)
    for n in range(STANDARD.min_replicates, STANDARD.max_replicates + 1):
        mean, spread = drawn[:, :n].mean(1), drawn[:, :n].std(1, ddof=1)
        half = t_quantile(0.995, n - 1) * spread / n**0.5
        ends = open_ & ((half <= STANDARD.target_half_width) | (n == STANDARD.max_replicates))
        missed += int((ends & (abs(mean) > half)).sum())
        open_ &= ~ends
    assert missed / runs < 0.021  # 0.01 without the stopping rule


def test_it_never_stops_for_a_good_ratio_alone():
    noisy = replace(Noise.none(), layout=0.05)
    timing = measured(a_bound_claim(FakeDevice(noise=noisy)), replace(STANDARD, time_budget_s=1e9))
    assert timing.stopped == "replicates"
    assert verdict(speedup(timing), 0.0) is Verdict.FASTER


def test_it_stops_when_its_time_budget_is_spent():
    noisy = replace(Noise.none(), layout=0.05)
    rule = StoppingRule(min_replicates=3, time_budget_s=1e-9)
    timing = measured(a_bound_claim(FakeDevice(noise=noisy)), rule)
    assert (timing.stopped, len(timing.replicates), timing.replicates[0].rounds[1:]) == (
        "seconds",
        5,  # the minimum and two more, because the interval is wide
        (),
    )


def test_no_arm_can_tell_the_seeds_of_timed_inputs_from_the_first_ones():
    seeds = []
    for draw in (None, None, random.SystemRandom()):
        bound = BoundClaim(a_claim(), FakeDevice(), 1, full=True, draw=draw)
        bound.learn_effects()
        timing = measured(bound, STANDARD)
        seeds.append([replicate.seed for replicate in timing.replicates])
        assert len({*seeds[-1]}) == len(timing.replicates)
    both = min(map(len, seeds[:2]))  # how many replicates there are depends on the time they take
    assert seeds[0][:both] == seeds[1][:both], "--reproducible"
    assert not {*seeds[0]} & {*seeds[2]}


@pytest.mark.parametrize(
    ("each", "layout", "extra", "count"),
    [
        (0.1, 0.01, 2, 10),
        (0.2, 0.01, 2, 6),
        (0.2, 0.1, 2, 8),
        (0.11, 0.1, 2, 10),
        (0.2, 0.1, 8, 14),
    ],
)
def test_a_wide_interval_takes_more_replicates(monkeypatch, each, layout, extra, count):
    now = [0.0]
    for module in (replicates, buffers, sampler):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(FakeDevice):
        def release(self):
            now[0] += each

    noisy = replace(Noise.none(), layout=layout)
    rule = replace(STANDARD, time_budget_s=0.999, extra_replicates=extra)
    timing = measured(a_bound_claim(Slow(noise=noisy)), rule)
    assert (timing.stopped, len(timing.replicates)) == ("seconds", count)


def test_a_library_arm_of_uneven_speed_takes_more_replicates():
    drawn = random.Random(1)
    times = {seed: drawn.uniform(100, 300) for seed in range(1000)}

    def uneven(x):
        return doubling(times[int(1e6 * float(x[0])) % 1000])(x)

    timing = measured(a_bound_claim(library=uneven), replace(STANDARD, time_budget_s=1e-9))
    assert half_width(speedup(timing)) <= STANDARD.target_half_width
    count = STANDARD.min_replicates + STANDARD.extra_replicates
    assert (timing.stopped, len(timing.replicates)) == ("seconds", count)


@pytest.mark.parametrize(
    ("rule", "is_undecided", "asked", "stopped", "count"),
    [
        (STANDARD, False, 1, "width", 6),
        (STANDARD, True, 1, "replicates", 6 + 16),
        (replace(STANDARD, undecided_s=0.0), True, 1, "seconds", 6 + 1),
        (QUICK, True, 0, "width", 5),
    ],
)
def test_an_undecided_measurement_takes_more_replicates_once(
    rule, is_undecided, asked, stopped, count
):
    timings = []

    def decide(timing):
        timings.append(timing)
        return is_undecided

    bound = a_bound_claim()
    bound.check_agreement()
    measurement = replicates.Measurement(Ladder([bound]), Metric.DEVICE, rule, decide)
    while measurement.timing is None:
        measurement.prepare()
        measurement.measure()
    measurement.finish()
    timing = measurement.timing
    assert (timing.stopped, len(timing.replicates), len(timings)) == (stopped, count, asked)
    note = "undecided after 6 replicates, so more followed"
    assert (note in timing.notes) == (is_undecided and asked > 0)


def test_a_claim_at_its_requirement_is_rarely_met_by_chance():
    rng, runs, look, more = np.random.default_rng(1), 100_000, 8, STANDARD.undecided_replicates
    drawn = rng.normal(0, 1, (runs, look + more))  # log-ratios to what is required

    def interval(n):
        mean, error = drawn[:, :n].mean(1), drawn[:, :n].std(1, ddof=1) / n**0.5
        half = t_quantile(0.995, n - 1) * error
        return mean - half, mean + half

    (low, high), (later, _) = interval(look), interval(look + more)
    met = (low > 0) | ((high > 0) & (later > 0))
    assert 0.006 < met.mean() < 0.01  # 0.005 with one look


# buffers that are built before the exclusive lock


@pytest.fixture
def few_sets(monkeypatch):
    """Let inputs count as expensive, so that there are as few sets as are needed.

    Seeds of replicates are small, which tells them from those of new values of a block.
    """
    monkeypatch.setattr(buffers, "RENEWAL_S", 0.0)
    monkeypatch.setattr(replicates.Measurement, "_seed", lambda _, replicate: 1000 * replicate)


def built_under_the_lock(device, **words):
    """Measure a claim; return the number of replicates that are built under the exclusive lock."""
    made, usual = [], a_claim().inputs

    def inputs(bench):
        made.extend([1] * (bench.seed < 100_000))  # new values of a block have larger seeds
        return usual(bench)

    bound = a_bound_claim(device, inputs=inputs, **words)
    bound.check_agreement()
    ladder = Ladder([bound])
    measurement = replicates.Measurement(ladder, Metric.DEVICE, STANDARD)
    measurement.prepare()
    made.clear()
    measurement.measure()
    in_measure = len(made) / (2 * measurement.sampler.builder.sets)
    measurement.finish()
    ladder.verify()
    assert len(measurement.timing.replicates) == STANDARD.min_replicates
    return in_measure


@pytest.mark.parametrize(
    ("prebuilt", "made"),
    [
        (STANDARD.min_replicates, 0),
        (STANDARD.min_replicates - 2, 2),
        (0.5, STANDARD.min_replicates - 1),
    ],
)
def test_replicates_are_prebuilt_while_memory_allows(few_sets, monkeypatch, prebuilt, made):
    size = 2 * validity.rotation(64 * 8, 0) * 64 * 8  # bytes of the inputs of two arms
    monkeypatch.setattr(buffers, "PREBUILT_SHARE", prebuilt * size / FAKE_GPU.memory_bytes)
    assert built_under_the_lock(FakeDevice(noise=Noise.none())) == made


def test_half_of_the_memory_is_left_to_others(few_sets):
    class Full(FakeDevice):
        queries = 0

        def free_bytes(self):
            self.queries += 1
            return self.gpu.memory_bytes // 2 + 2 - self.queries  # less per query: others allocate

    assert built_under_the_lock(Full(noise=Noise.none())) == STANDARD.min_replicates - 3


def test_a_replicate_that_finds_no_memory_is_built_under_the_lock(few_sets):
    class OutOfMemoryError(RuntimeError):
        pass

    class Small(FakeDevice):
        blocks = 0

        def block(self, calls, mode, keep=-1):
            self.blocks += mode is Mode.WALL
            if mode is Mode.WALL and self.blocks == 10:  # while replicates are prebuilt
                raise OutOfMemoryError
            return super().block(calls, mode, keep)

    assert built_under_the_lock(Small(noise=Noise.none())) == STANDARD.min_replicates - 2


class TwoRanks(RankGroup):
    count = property(lambda _: 2)


@pytest.mark.parametrize("device", [FakeDevice(None), FakeDevice()])
def test_replicates_that_take_long_to_build_are_built_before_the_lock_is_taken_again(
    few_sets, monkeypatch, device
):
    monkeypatch.setattr(buffers, "LONG_BUILD_S", 0.0)
    monkeypatch.setattr(buffers, "PREBUILT_SHARE", 0.0)  # memory for one
    steps, usual = [], a_claim().inputs
    # a claim that holds the machine alone has all its threads
    monkeypatch.setattr(validity, "_libraries", lambda: {"threads": steps[-1:] == ["lock"]})

    def inputs(bench):
        if bench.seed < 100_000:  # new values of a block have larger seeds
            steps.append("build")
        return usual(bench)

    bound = a_bound_claim(device, inputs=inputs)
    bound.check_agreement()
    measurement = replicates.Measurement(Ladder([bound]), Metric.DEVICE, STANDARD)
    steps.clear()
    while measurement.timing is None:
        measurement.prepare()
        steps.append("lock")
        measurement.measure()
        steps.append("unlock")
    measured = "".join(s[0] for s in steps)
    assert re.fullmatch(r"(b+lu)+", measured)
    assert len(measurement.timing.replicates) == measured.count("l") >= STANDARD.min_replicates


def test_ranks_build_replicates_while_they_measure(few_sets, monkeypatch):
    monkeypatch.setattr(buffers, "LONG_BUILD_S", 0.0)
    device = FakeDevice(noise=Noise.none(), ranks=TwoRanks())
    assert built_under_the_lock(device) == STANDARD.min_replicates - 1


def test_ranks_and_host_claims_prebuild_one_replicate(few_sets):

    assert built_under_the_lock(FakeDevice(None, Noise.none())) == STANDARD.min_replicates - 1
    assert (
        built_under_the_lock(FakeDevice(noise=Noise.none(), ranks=TwoRanks()))
        == STANDARD.min_replicates - 1
    )


@pytest.mark.parametrize(
    ("microseconds", "prebuilt", "released"), [(20, [2], 0), (20, [1], 1), (100, [2], 1)]
)
def test_memory_is_released_except_for_prebuilt_graphs(microseconds, prebuilt, released):
    class Watched(FakeDevice):
        released = 0

        def release(self):
            self.released += 1

    arms = {"baseline": doubling(2 * microseconds), "optimized": doubling(microseconds)}
    bound = a_bound_claim(Watched(noise=Noise.none()), **arms)
    bound.check_agreement()
    timed = a_sampler(bound, prebuilt=prebuilt)
    before = bound.device.released
    timed.replicate(2)
    assert bound.device.released - before == released


@pytest.mark.parametrize(("memory", "expected"), [(40, 1), (60, 3)])
def test_input_sets_that_would_fill_the_gpu_are_not_built(memory, expected):
    size = a_bound_claim().set_bytes
    gpu = replace(FAKE_GPU, memory_bytes=memory * size)
    claims = [a_claim(optimized=doubling(199 - i), cache="warm") for i in range(7)]
    device = FakeDevice(gpu, Noise.none())
    ladder = Ladder([BoundClaim(claim, device, 1, full=True) for claim in claims])
    for rung in ladder.rungs:
        rung.bound.learn_effects()
    timed = sampler.Sampler(ladder, Metric.DEVICE, STANDARD)
    timed.prepare([1001])
    assert timed.builder.sets == expected


@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_a_slow_call_has_one_input_set(cache):
    device = FakeDevice(replace(FAKE_GPU, l2_bytes=64 * 8), Noise.none())  # one set fills the L2
    bound = a_bound_claim(
        device, cache=cache, baseline=doubling(50_000), optimized=doubling(45_000)
    )
    bound.check_agreement()
    timed = a_sampler(bound, prebuilt=[1001, 2001])
    assert (timed.builder.sets, len(timed.builder.prebuilt[2001][0].inputs)) == (1, 1)


@pytest.mark.parametrize(
    ("mode", "prebuilt", "warmed"),
    [
        (Mode.BACKLOG, [1], False),  # warm_up has run the call
        (Mode.PLAIN, [1], False),
        (Mode.GRAPH, [1], True),  # capturing must not be a call's first run
        (Mode.GRAPH, [2], False),
        (Mode.WALL, [1, 2], True),  # prebuilt long ago: the caches may be cold again
        (Mode.WALL, [2], False),  # begin() has run the calls
    ],
)
def test_each_call_has_run_before_it_is_timed(monkeypatch, mode, prebuilt, warmed):
    ran = []
    monkeypatch.setattr(buffers.BufferBuilder, "run_once", lambda _, stand: ran.append(stand.name))
    bound = a_bound_claim()
    bound.check_agreement()
    timed = a_sampler(bound, Metric.WALL if mode is Mode.WALL else Metric.DEVICE, prebuilt)
    timed.mode = mode
    ran.clear()
    timed.replicate(2)
    assert sorted(ran) == (["baseline", "optimized"] if warmed else [])


@pytest.mark.parametrize(
    ("prebuilt", "warmed"), [([1, 2], ["optimized"]), ([1], ["baseline", "optimized"])]
)
def test_a_long_call_is_warmed_up_once(monkeypatch, prebuilt, warmed):
    ran = []
    bound = a_bound_claim(metric="wall", baseline=doubling(200_000), optimized=doubling(50_000))
    bound.check_agreement()
    timed = a_sampler(bound, Metric.WALL, prebuilt)
    monkeypatch.setattr(buffers.BufferBuilder, "run_once", lambda _, stand: ran.append(stand.name))
    timed.replicate(2)
    assert sorted(ran) == warmed


@pytest.mark.parametrize("metric", [Metric.DEVICE, Metric.WALL])
def test_the_device_is_warmed_up_before_the_first_round(metric):
    done = []

    class Clock(FakeDevice):
        def warm_up(self, blocks):
            done.append(len(blocks))

    bound = a_bound_claim(Clock(noise=Noise.none()))
    bound.check_agreement()
    timed = a_sampler(bound, metric)
    once = timed._round
    kind = lambda each: "lone" if each.is_lone else "short" if each.calls else "round"
    timed._round = lambda each: done.append(kind(each)) or once(each)
    timed.replicate(2)
    warm_ups = [2] if metric is Metric.DEVICE else []  # wall times include pauses of the GPU anyway
    done.remove("short")  # it comes anywhere between the rounds
    # a slow machine affords one round
    assert done in (["lone", *warm_ups, *["round"] * rounds] for rounds in (1, 2))


def test_results_are_copied_in_random_order(monkeypatch):
    """A thread that still fills a list of results must not stay ahead of the copies."""
    copied, copy = [], result_copies._copy
    monkeypatch.setattr(result_copies, "_copy", lambda *o: copied.append(o[0]) or copy(*o))
    parts = lambda x: [x * i for i in range(1, 41)]
    arms = {"baseline": parts, "optimized": partial(parts), "reference": parts}
    timed = a_sampler_of(Metric.WALL, device=HostDevice(), metric="wall", **arms)
    timed.replicate(2)
    in_order = [f"result[{i}]" for i in range(40)]
    blocks = [copied[i : i + 40] for i in range(0, len(copied), 40)]
    assert len(blocks) > 2
    assert all(sorted(block) == sorted(in_order) for block in blocks)
    assert in_order not in blocks


def test_an_arm_is_called_alone_by_the_functions_that_call_it_in_a_round():
    def double(x):
        frame, callers = sys._getframe(1), []
        while frame and frame.f_code is not sampler.Sampler.replicate.__code__:
            callers.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        if frame and counts:
            seen.setdefault(counts[-1], set()).add((*callers, frame.f_lineno))
        return x * 2

    seen, counts = {}, []
    bound = a_bound_claim(HostDevice(), metric="wall", optimized=double)
    bound.check_agreement()
    timed = a_sampler(bound, Metric.WALL)
    time_once = timed._time
    timed._time = lambda batch, n, **words: counts.append(n) or time_once(batch, n, **words)
    timed.replicate(2)
    assert len(seen) == 3  # alone, in a short block and in a round
    assert len(set.union(*seen.values())) == 1


def test_progress_reports_phases_and_figures():
    reports = []
    measured(a_bound_claim(phases=reports))
    phases = [phase for phase, _ in reports]
    expected = ["checking results", "building inputs", "warming up", "measuring"]
    assert list(dict.fromkeys(phases)) == expected
    last = reports[-1][1]
    assert (last["replicate"], last["most"]) == (STANDARD.min_replicates, STANDARD.max_replicates)
    assert last["ratio"] == pytest.approx(2, rel=0.01)


# metrics other than time


def test_peak_memory():
    def holding(size):
        def double(x):
            held = Allocation(size)
            return x * 2 if held else x

        return double

    bound = a_bound_claim(baseline=holding(3000), optimized=holding(1000), metric="memory")
    timing = measured(bound, metric=Metric.MEMORY)
    ratio = speedup(timing)
    assert (timing.unit, ratio.low, ratio.value, ratio.high) == ("B", *[pytest.approx(3)] * 3)


def test_peak_memory_does_not_include_pages_of_inputs():
    """Equal arms have equal figures in both orders, though np.zeros() has no pages at first."""

    def inputs(bench):
        n = bench.size(1 << 23, check=8)  # glibc may reuse freed memory of up to 32 MiB
        return np.random.default_rng(bench.seed).random(n), np.zeros(n)

    arms = {name: lambda x, out: np.add(x, out, out=out) for name in ("baseline", "optimized")}
    words = {"inputs": inputs, "reference": lambda x, out: x + out, "metric": "memory"}
    timed = measured(a_bound_claim(HostDevice(), **arms, **words), metric=Metric.MEMORY)
    rounds = [r.rounds[0] for r in timed.replicates]
    assert {r.order for r in rounds} == {"AB", "BA"}
    assert max(r.seconds[name][0] for r in rounds for name in arms) < 1e6


@pytest.mark.parametrize("first_call", [0, 2, 4])
def test_peak_memory_includes_what_an_arm_holds_after_its_calls(first_call):
    """Whether it allocates while its effects are inferred, in a check or when it is measured."""
    calls, held = [], []

    def baseline(x):
        buffer = Allocation(300_000)
        return x * 2 if buffer else x

    def holding(x):
        calls.append(1)
        if len(calls) > first_call and not held:
            held.append(Allocation(300_000))
        return x * 2

    bound = a_bound_claim(baseline=baseline, optimized=holding, metric="memory")
    timing = measured(bound, metric=Metric.MEMORY)
    last = timing.replicates[-1].rounds[0].seconds
    assert last["optimized"] == pytest.approx((300_000,), rel=0.01)


class Scratch:
    def __init__(self, values):
        self.values = values

    def __call__(self, x):
        return x * self.values[0] * 2

    def of_values(self, x):
        return self(x)


SCRATCH = {"a": np.ones(10_000), "b": [np.ones(20_000)]}


def held_globally(x):
    return x * SCRATCH["a"][0] * 2


def held_by_default(x, *, values=np.ones(30_000)):  # noqa: B008  it is what is tested
    return x * values[0] * 2


HOLDING = (
    held_globally,
    held_by_default,
    Scratch(np.ones(30_000)),
    Scratch([np.ones(30_000)]).of_values,
    partial(lambda values, x: x * values[0] * 2, np.ones(30_000)),
    prepared(partial(lambda values, x: partial(np.multiply, values[0] * 2), np.ones(30_000))),
)


@pytest.mark.parametrize("arm", HOLDING)
def test_peak_memory_includes_arrays_that_the_code_of_an_arm_refers_to(arm):
    """They may be the scratch of its calls; an argument does not count."""
    bound = a_bound_claim(optimized=arm, metric="memory")
    assert bound.held_bytes("optimized") == 240_000
    assert bound.held_bytes("baseline") == 0


def test_a_result_that_an_arm_holds_counts_as_memory_once():
    held = Allocation(100)

    def holding(x):
        return x * 2 if held else x

    bound = a_bound_claim(optimized=holding, metric="memory")
    timing = measured(bound, metric=Metric.MEMORY)
    assert timing.replicates[-1].rounds[0].seconds["optimized"] == pytest.approx((1,))


@pytest.mark.parametrize(("better", "ratio"), [("higher", 1.5), ("lower", 1 / 1.5)])
def test_scores(better, ratio):
    def scoring(figure):
        return lambda x: (x * 2, Score(figure, "tokens/s", better))

    bound = a_bound_claim(baseline=scoring(100.0), optimized=scoring(150.0), metric="score")
    timing = measured(bound, metric=Metric.SCORE)
    assert timing.unit == "tokens/s"
    assert speedup(timing).value == pytest.approx(ratio)


def test_the_second_attempt_at_a_score_leaves_a_disturbed_call_out():
    calls = []

    def disturbed(x):
        calls.append(x)
        return x * 2, Score(30.0 if len(calls) % 9 == 0 else 1.0, "ms", "lower")

    steady = lambda x: (x * 2, Score(2.0, "ms", "lower"))
    bound = a_bound_claim(baseline=steady, optimized=disturbed, metric="score")
    timing = measured(bound, PATIENT, Metric.SCORE)
    assert {len(replicate.rounds) for replicate in timing.replicates} == {3}
    assert 30.0 in [r.seconds["optimized"][0] for each in timing.replicates for r in each.rounds]
    assert speedup(timing).low == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (lambda x: x * 2, "exactly one Score"),
        (lambda x: (x * 2, Score(0.0, "hits")), "a ratio needs more than 0"),
        (lambda x: (x * 2, Score(2.0, 5)), r"Score\(unit=5\): name the unit"),
        (lambda x: (x * 2, Score(None, "ms")), r"Score\(value=None\): give a number"),
    ],
)
def test_a_score_must_be_there_and_positive(arm, message):
    bound = a_bound_claim(baseline=arm, optimized=arm, metric="score")
    bound.check_agreement()
    bound.depends_on_load(Metric.SCORE)  # raises nothing: the message below says more
    with pytest.raises(UsageError, match=message):
        measured(a_bound_claim(baseline=arm, optimized=arm, metric="score"), metric=Metric.SCORE)


def test_an_arm_that_slows_down_before_it_is_timed_is_reported():
    calls = []

    def tires(x):
        calls.append(1)
        spend(100e-6 if len(calls) < 40 else 200e-6)
        return x * 2

    timing = measured(a_bound_claim(baseline=tires))
    [note] = timing.notes
    was, is_ = (float(figure) for figure in re.findall(r"([\d.]+) µs", note))
    assert (was, is_) == (pytest.approx(100, rel=0.05), pytest.approx(200, rel=0.05))
    assert note.startswith("baseline took")
    assert not measured(a_bound_claim()).notes


# large inputs


def test_at_most_two_sets_of_large_inputs_exist_at_a_time():
    made, alive = [], []

    def tracked(bench):
        array = np.random.default_rng(bench.seed).random(64)
        made.append(weakref.ref(array))
        alive.append(sum(ref() is not None for ref in made))
        return (array,)

    def negate(x):
        spend(100e-6)
        np.negative(x, out=x)

    gpu = replace(FAKE_GPU, memory_bytes=64 * 8 * 19)
    bound = a_bound_claim(
        FakeDevice(gpu, WHITE), inputs=tracked, reference=lambda x: -x,
        baseline=negate, optimized=negate, library=negate,
    )  # fmt: skip
    timing = measured(bound)
    assert max(alive) == 2
    assert len(timing.replicates) >= STANDARD.min_replicates


@pytest.mark.parametrize(
    ("words", "memory", "unchecked"),
    [
        ({}, 1 << 40, []),
        ({}, 64 * 8 * 19, ["results of timed calls: they are too large"]),
        ({"inputs": lambda b: (*vectors(b), b.seed)}, 1 << 40, []),
        (
            {"inputs": lambda b: (*vectors(b), b.seed), "optimized": prepared(lambda *_: by)},
            1 << 40,
            ["results on new values: n could not be overwritten"],
        ),
    ],
)
def test_what_cannot_be_checked_is_told(words, memory, unchecked):
    gpu = replace(FAKE_GPU, memory_bytes=memory)
    if "inputs" in words:
        words = {"baseline": by, "optimized": by, "reference": lambda x, n: x * 2} | words
    bound = a_bound_claim(FakeDevice(gpu, WHITE), **words)
    bound.check_agreement()
    timed = a_sampler(bound)
    timed.replicate(2001)
    assert [
        text[: len(u)] for text, u in zip(timed.unchecked(), unchecked, strict=True)
    ] == unchecked


@pytest.mark.parametrize("times", [1.05, 1.2])
def test_a_baseline_that_is_slower_after_another_arm_is_told_on_a_gpu(times):
    """What the optimized arm leaves in the L2 cache slows the baseline's next block down."""
    device = FakeDevice(noise=WHITE, seed=1)
    is_left, slow_block = False, -1

    def baseline(x):
        nonlocal is_left, slow_block
        if is_left:
            is_left, slow_block = False, device._blocks
        spend(1e-3 * (times if device._blocks == slow_block else 1))
        return x * 2

    def optimized(x):
        nonlocal is_left
        is_left = True
        spend(0.5e-3)
        return x * 2

    bound = a_bound_claim(device, baseline=baseline, optimized=optimized)
    bound.check_agreement()
    measurement = replicates.Measurement(Ladder([bound]), Metric.DEVICE, STANDARD)
    measurement.prepare()
    measurement.measure()
    told = [text.partition(":")[0] for text in measurement.sampler.unchecked()]
    assert told == ["whether another arm slows the baseline down"] * (times > 1.1)


@pytest.mark.parametrize("times", [1, 5])
def test_a_baseline_that_is_slower_since_another_arm_has_run_is_told(times):
    """Both use a table, which the optimized arm makes longer when it has used it."""
    table = np.ones(1)  # a value that no check of references sees

    def baseline(x):
        spend(200e-6 * float(table[0]))
        return x * 2

    def optimized(x):
        spend(100e-6)
        table[0] = times
        return x * 2

    bound = a_bound_claim(baseline=baseline, optimized=optimized, metric="wall")
    bound.check_agreement()
    measurement = replicates.Measurement(Ladder([bound]), Metric.WALL, STANDARD)
    measurement.prepare()
    measurement.measure()
    told = [text.partition(":")[0] for text in measurement.sampler.unchecked()]
    assert told == ["whether another arm slows the baseline down"] * (times > 1)


@pytest.mark.parametrize(
    ("again", "ranks", "is_told"),
    [
        ([1e-3, 1e-3], RankGroup(), True),
        ([10e-3, 10e-3], RankGroup(), False),
        ([], TwoRanks(), True),  # a call of one rank would wait for the other
    ],
)
def test_a_baseline_that_is_quicker_in_a_thread_is_told_if_it_still_is(
    monkeypatch, again, ranks, is_told
):
    times = iter((1e-3, 1e-3, *again))
    monkeypatch.setattr(BoundClaim, "_time_in_thread", lambda _: next(times))
    device = FakeDevice(noise=WHITE, ranks=ranks)
    arms = {"baseline": doubling(10_000), "optimized": doubling(5_000)}
    bound = a_bound_claim(device, metric="wall", **arms)
    bound.check_agreement()
    measurement = replicates.Measurement(Ladder([bound]), Metric.WALL, STANDARD)
    measurement.prepare()
    measurement.measure()
    told = [text.partition(":")[0] for text in measurement.sampler.unchecked()]
    assert told == ["whether the baseline is slow only while it is timed"] * is_told


def by(x, n):
    spend(100e-6)
    return x * 2


def test_sets_that_return_within_a_block_are_told(few_sets):
    timed = a_sampler_of(baseline=doubling(20), optimized=doubling(10))
    assert max(timed.calls.values()) > timed.builder.sets
    assert [text.partition(":")[0] for text in timed.unchecked()] == ["results cached by value"]


@pytest.mark.parametrize("metric", [Metric.DEVICE, Metric.WALL])
def test_an_arm_that_remembers_values_gets_no_longer_blocks(metric, monkeypatch):
    """It is short on values that it has met, and would gain from blocks in which values return."""
    monkeypatch.setattr(buffers, "PREBUILT_SHARE", 0)  # few sets
    met = set()

    def arm(x):
        spend(1e-6 if float(x[0]) in met else 100e-6)
        met.add(float(x[0]))
        return x * 2

    timed = a_sampler_of(metric, baseline=doubling(100), optimized=arm)
    assert max(timed.calls.values()) <= timed.builder.sets


def a_sampler_of(metric=Metric.DEVICE, /, **words):
    bound = a_bound_claim(**words)
    bound.check_agreement()
    return a_sampler(bound, metric)


def test_an_arm_that_turns_wrong_on_large_inputs_is_found_after_timing():
    calls = []

    def tires(x):
        spend(100e-6)
        calls.append(1)
        return x * (2 if len(calls) < 20 else 3)  # after the checks, within the first replicates

    gpu = replace(FAKE_GPU, memory_bytes=64 * 8 * 19)
    with pytest.raises(WrongResult, match="optimized disagrees with the reference"):
        measured(a_bound_claim(FakeDevice(gpu, WHITE), optimized=tires))
    assert len(calls) > 20


# verdicts on a device with all the noise of a real one


def verdicts(slower, comparisons=40):
    rule = replace(STANDARD, time_budget_s=60.0)  # what a busy host needs for it is no part of this
    found = []
    for seed in range(comparisons):
        kind = RepeatingDevice if seed % 4 else FakeDevice  # as on a GPU, and as on the host
        device = kind(seed=seed)
        floor = noise_floor(device, seed, rule, lambda *_a, **_k: None)
        bound = a_bound_claim(device, baseline=doubling(200), optimized=doubling(200 * slower))
        bound.random = random.Random(seed)
        bound.check_agreement()
        found.append(verdict(speedup(measure_metric(Ladder([bound]), Metric.DEVICE, rule)), floor))
    return found


def test_identical_arms_get_no_verdict():
    found = verdicts(1.0)
    assert found.count(Verdict.FASTER) + found.count(Verdict.SLOWER) == 0


def test_an_arm_slowed_by_two_percent_is_slower():
    # at least 36 of 40, because the default noise is that of the noisiest kernel
    assert verdicts(1.02).count(Verdict.SLOWER) >= 36


def test_blocks_of_a_gpu_go_round_the_sets_and_end_with_the_last():
    seen = []
    timed = a_sampler(a_bound_claim(RepeatingDevice(noise=WHITE, seed=1)))
    batches = timed._make_batches(timed.builder.build(1001), timed.calls)
    for batch in batches.values():
        seen.append((batch.order[-1], len(batch.order), batch.block.keep))
        assert set(batch.order) == set(range(timed.builder.sets))
        assert len(batch.order) > timed.builder.sets
    assert seen == [
        (timed.builder.sets - 1, timed.calls[name], timed.calls[name] - 1) for name in batches
    ]


def test_a_lone_call_on_new_values_finds_results_kept_by_address_on_a_gpu():
    kept = {}

    def remembers(x):
        spend(100e-6)
        return kept.setdefault(x.ctypes.data, x * 2)

    with pytest.raises(WrongResult, match="optimized disagrees"):
        measured(a_bound_claim(RepeatingDevice(noise=WHITE, seed=1), optimized=remembers))


def test_one_block_of_each_arm_and_replicate_is_kept_on_a_gpu():
    timed = a_sampler(a_bound_claim(RepeatingDevice(noise=WHITE, seed=1)))
    pending = timed.ladder._pending
    timed.replicate(1001)
    lone, rounds = len(timed.ladder.arms), len(timed.ladder.arms)
    assert len(pending) == lone + rounds
    timed.replicate(1002)
    assert len(pending) == lone + 2 * rounds


def test_results_in_host_memory_are_copied_before_later_calls_overwrite_them():
    class Copying(RepeatingDevice):
        torch_device = "cuda"

    def doubled(x, out):
        np.multiply(x, 2, out=out)
        spend(100e-6)

    words = {
        "inputs": lambda bench: (np.random.default_rng(bench.seed).random(8), np.empty(8)),
        "baseline": doubled,
        "optimized": doubled,
        "reference": lambda x, out: x * 2,
    }
    measured(a_bound_claim(Copying(noise=WHITE, seed=1), **words))


def test_garbage_is_not_collected_between_drawing_values_and_timing_calls_on_them():
    is_on = []

    def inputs(bench):
        is_on.append(gc.isenabled())
        time.sleep(buffers.RENEWAL_S)
        return (np.random.default_rng(bench.seed).random(64),)

    timed = a_sampler(a_bound_claim(HostDevice(), inputs=inputs, metric="wall"), Metric.WALL)
    assert not timed.renews
    timed.replicate(1001)
    drawn = len(timed.calls) * timed.builder.sets
    assert is_on[-drawn:] == [False] * drawn
    assert gc.isenabled()


def test_objects_whose_attributes_a_call_changes_are_new_in_each_call(monkeypatch):
    monkeypatch.setattr(buffers, "RENEWAL_S", 0)  # as if drawing took long

    def halving(records):
        for record in records:
            record.value /= 2
        return np.array([record.value for record in records])

    timing = measured(
        a_bound_claim(
            HostDevice(),
            inputs=lambda bench: (
                [SimpleNamespace(value=v) for v in np.random.default_rng(bench.seed).random(30)],
            ),
            baseline=halving,
            optimized=partial(halving),
            reference=lambda records: np.array([record.value for record in records]) / 2,
            metric="wall",
        ),
        metric=Metric.WALL,
    )
    assert timing.replicates


def test_small_results_are_copied_before_large_ones(monkeypatch):
    bound, copied = a_bound_claim(HostDevice()), []
    monkeypatch.setattr(
        result_copies, "_copy", lambda path, value: copied.append(path) or (path, value)
    )
    result = [np.zeros(10_000), [0.0] * 10_000, 1.0, np.zeros(10_000), np.zeros(4), [0.0] * 20]
    for _ in range(20):
        copied.clear()
        result_copies.copy_result(bound, result, ())
        assert sorted(copied[:3]) == ["result[2]", "result[4]", "result[5]"]
        assert len(copied) == len(result)


def test_a_lone_call_on_new_values_finds_results_kept_by_value_on_a_gpu():
    """The destination still holds the result of the same values."""
    known = {}

    def remembers(x, out):
        if known.get(id(out)) == x[0]:
            spend(20e-6)
            return
        known[id(out)] = x[0]
        works(x, out)

    def works(x, out):
        np.multiply(x, 2, out=out)
        spend(200e-6)

    words = {
        "inputs": lambda bench: (np.random.default_rng(bench.seed).random(8), np.empty(8)),
        "baseline": works,
        "optimized": remembers,
        "reference": lambda x, out: x * 2,
    }
    with pytest.raises(InvalidMeasurement, match=r"per call in a block, but .* alone"):
        measured(a_bound_claim(RepeatingDevice(noise=WHITE, seed=1), **words))


def test_settings_are_compared_after_each_replicate_on_a_gpu(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    bound = a_bound_claim(RepeatingDevice(noise=WHITE, seed=1))
    timed = a_sampler(bound)
    timed.replicate(1001)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(
        InvalidMeasurement, match=r"baseline or optimized.*|optimized or baseline.*"
    ):
        timed.replicate(1002)


@pytest.mark.parametrize("n", [2, 5])
def test_successive_calls_find_skipped_work_on_a_gpu(n):
    """The destination holds the right result until the values change."""
    calls = [0]

    def skips(x, out):
        calls[0] += 1
        if calls[0] < 150 or calls[0] % n:
            np.multiply(x, 2, out=out)
        spend(100e-6)

    def works(x, out):
        np.multiply(x, 2, out=out)
        spend(200e-6)

    words = {
        "inputs": lambda bench: (np.random.default_rng(bench.seed).random(8), np.empty(8)),
        "baseline": works,
        "optimized": skips,
        "reference": lambda x, out: x * 2,
    }
    with pytest.raises(WrongResult, match="optimized disagrees"):
        measured(a_bound_claim(RepeatingDevice(noise=WHITE, seed=1), **words))


def known_values(work_s):
    """Return an arm that skips its work on the values of its last call with the same inputs."""
    last = {}

    def arm(x):
        key = x.ctypes.data
        spend(1e-6 if last.get(key) == x[0] else work_s)
        last[key] = x[0]
        return x * 2

    return arm


@pytest.mark.parametrize("share", [1.0, 0.4, 0.2])
def test_an_arm_that_skips_values_that_return_in_a_block_is_refused(share):
    """Also one that is faster than the baseline if it works."""
    device = RepeatingDevice(noise=WHITE, seed=1)
    arms = {"baseline": doubling(200), "optimized": known_values(share * 200e-6)}
    with pytest.raises(InvalidMeasurement, match=r"per call in a block, but \d.* alone"):
        measured(a_bound_claim(device, **arms))


def test_a_much_faster_arm_may_start_slowly():
    """Its calls take longer alone, as those of the baseline do, and as much as a launch takes."""

    class Launching(RepeatingDevice):
        def run(self, calls, *about):
            seconds, kept = super().run(calls, *about)
            return seconds + 15e-6 * (len(calls) == 1), kept

    bound = a_bound_claim(Launching(noise=WHITE, seed=1), optimized=doubling(2))
    assert speedup(measured(bound)).value > 50


@pytest.mark.parametrize(("limit_s", "told"), [(0.0, True), (60.0, False)])
def test_a_note_tells_that_building_the_inputs_took_long(limit_s, told, monkeypatch):
    monkeypatch.setattr(buffers, "LONG_SETS_S", limit_s)
    notes = measured(a_bound_claim()).notes
    assert any(re.match(r"building \d+ sets of inputs took ", note) for note in notes) is told


@pytest.mark.parametrize("is_wrong", [True, False])
def test_results_on_inputs_on_which_the_baseline_is_slow_are_verified(is_wrong):
    def baseline(x):
        spend(20e-3 if x[0] < 0.05 else 200e-6)
        return x * 2

    def optimized(x):
        spend(100e-6)
        return x * (3 if is_wrong and x[0] < 0.05 else 2)

    bound = a_bound_claim(baseline=baseline, optimized=optimized, metric="wall")
    bound.learn_effects()
    ladder = Ladder([bound])
    typical_s = {"baseline": 200e-6, "optimized": 100e-6}
    ladder.search(typical_s, is_short=True)  # 200 seeds miss a case of 1 in 20 in 1 of 30,000 runs
    assert isinstance(ladder.rungs[0].suspicion, WrongResult) is is_wrong
    # as many seeds do not count as repeated values
    assert len(bound._variants) < 10


@pytest.mark.parametrize(
    ("baseline_s", "optimized_s", "judged", "told"),
    [
        (200e-6, 20e-3, 2.0, True),
        (200e-6, 20e-3, 0.2, False),  # timed blocks have met such inputs as well
        (40e-3, 20e-3, 2.0, False),
        (200e-6, 400e-6, 2.0, False),
    ],
)
def test_an_arm_that_is_slow_on_few_inputs_is_told(baseline_s, optimized_s, judged, told):
    def arm(usual_s, rare_s):
        def double(x):
            spend(rare_s if x[0] < 0.05 else usual_s)
            return x * 2

        return double

    arms = {"baseline": arm(200e-6, baseline_s), "optimized": arm(100e-6, optimized_s)}
    bound = a_bound_claim(**arms, metric="wall")
    bound.learn_effects()
    Ladder([bound]).search({"baseline": judged * 1e-4, "optimized": 1e-4}, is_short=True)
    text = "whether the speedup holds for all inputs: it is"
    assert any(u.startswith(text) for u in bound.unchecked) is told


def test_a_call_that_took_long_only_once_is_not_slow():
    """Other work on the machine may have taken the time."""
    met = set()

    def optimized(x):
        spend(20e-3 if x[0] < 0.05 and x[0] not in met else 100e-6)
        met.add(x[0])
        return x * 2

    bound = a_bound_claim(optimized=optimized, metric="wall")
    bound.learn_effects()
    Ladder([bound]).search({"baseline": 2e-4, "optimized": 1e-4}, is_short=True)
    assert not bound.unchecked


@pytest.mark.parametrize(
    ("metric", "searching_s", "searched"),
    [(Metric.WALL, 60.0, [True]), (Metric.WALL, 0.0, [False]), (Metric.DEVICE, 60.0, [])],
)
def test_slow_inputs_are_searched_for_after_timing_by_the_hosts_clock_if_calls_are_short(
    metric, searching_s, searched, monkeypatch
):
    monkeypatch.setattr(sampler, "SEARCHING_S", searching_s)
    calls = []
    monkeypatch.setattr(Ladder, "search", lambda *_, is_short: calls.append(is_short))
    measured(a_bound_claim(), metric=metric)
    assert calls == searched


def test_inputs_that_all_take_as_long_are_not_verified_again():
    bound = a_bound_claim(metric="wall")
    bound.learn_effects()
    assert Search(bound).slow_seeds() == []
