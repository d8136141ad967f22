"""A claim on the fake device: how its arms are prepared, timed and verified, and when it stops."""

import gc
import random
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pytest_aiperf import Score, prepared, static
from pytest_aiperf.claim import replicates, sampler
from pytest_aiperf.claim.bound_claim import AGREEMENT_SEEDS, BoundClaim
from pytest_aiperf.claim.ladder import Ladder
from pytest_aiperf.claim.measure import noise_floor
from pytest_aiperf.claim.replicates import measure_metric, speedup
from pytest_aiperf.claim.stopping_rule import STANDARD, StoppingRule
from pytest_aiperf.errors import InvalidMeasurement, UsageError, WrongResult
from pytest_aiperf.machine.distributed import RankGroup
from pytest_aiperf.model import Metric, Mode, Verdict
from pytest_aiperf.rules import validity
from pytest_aiperf.rules.stats import half_width, t_quantile
from pytest_aiperf.rules.verdict import verdict
from tests.fake_gpu import (
    FAKE_GPU,
    Allocation,
    FakeDevice,
    Fault,
    Noise,
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

    with pytest.raises(WrongResult, match="optimized disagrees"):
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
    with pytest.raises(UsageError, match=r"optimized=.* does not take the 1 values"):
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
        a_bound_claim(library=doubling(150)), replace(STANDARD, min_replicates=8, max_replicates=8)
    )
    orders = [r.order for replicate in timing.replicates for r in replicate.rounds]
    assert all(order == order[::-1] and sorted(order) == sorted("ABCABC") for order in orders)
    assert len(set(orders)) > 1


def test_each_replicate_has_a_seed_of_its_own_and_fresh_inputs():
    seeds = []

    def inputs(bench):
        seeds.append(bench.seed)
        return vectors(bench)

    timing = measured(a_bound_claim(inputs=inputs))
    own = [r.seed for r in timing.replicates]
    assert len(set(own)) == len(own)
    assert set(own) <= set(seeds)


@pytest.mark.parametrize(("is_prepared", "calls_per_set"), [(False, 1), (True, 3)])
def test_inputs_is_called_once_per_set(is_prepared, calls_per_set):
    """A prepared arm's set is overwritten twice: with decoy values, then with the real ones."""
    calls = []
    arm = prepared(lambda x: doubling(100)) if is_prepared else doubling(100)
    bound = a_bound_claim(
        inputs=lambda bench: calls.append(bench.seed) or vectors(bench), optimized=arm
    )
    bound.check_agreement()
    # 2 calls infer effects, 2 compare two seeds; per seed, one for each arm and the reference
    assert len(calls) == 4 + AGREEMENT_SEEDS * (2 + calls_per_set)
    calls.clear()
    ladder = Ladder([bound])
    timing = measure_metric(ladder, Metric.DEVICE, STANDARD)
    sets = len(timing.replicates) * timing.sets
    # 1 call finds the size of a set, 3 make the check with new inputs
    assert len(calls) == 1 + sets * (1 + calls_per_set) + 3
    calls.clear()
    ladder.verify()
    # 1 call per replicate, 2 for the check with new inputs
    assert len(calls) == len(timing.replicates) + 2


def test_cold_inputs_span_the_cache_and_a_block_goes_round_them():
    gpu = replace(FAKE_GPU, l2_bytes=64 * 8 * 10)
    timing = measured(a_bound_claim(FakeDevice(gpu, WHITE)))
    assert timing.sets == 30  # a set is a tenth of the L2, and all sets span three times the L2
    assert min(timing.calls.values()) >= timing.sets
    assert timing.cache == "cold"


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


def test_a_disturbed_round_is_measured_again_and_counted():
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

    def disturbed(*about):
        done, _, state = undisturbed(*about)
        return done, faults.pop() if faults else None, state

    timed._round = disturbed
    assert timed.replicate(2).redone == rounds
    assert device.settlings - before == settled


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 2), (0.009, 2), (0.015, 1)])
def test_a_block_that_takes_the_host_long_to_enqueue_has_fewer_rounds(monkeypatch, seconds, rounds):
    now = [0.0]
    monkeypatch.setattr(sampler, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(FakeDevice):
        def block(self, calls, mode):
            made = super().block(calls, mode)

            class Block:
                last = None

                def run(self):
                    now[0] += seconds
                    return made.run()

                again = run

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
    assert maxima[-1] == pytest.approx(2 * seconds)  # all ranks take the maximum


def test_a_gpu_that_throttles_all_the_time_is_invalid():
    device = FakeDevice(noise=Noise.none(), faults=[Fault(20, "throttle", blocks=10_000)])
    with pytest.raises(InvalidMeasurement, match=r"disturbed.*let the GPU cool"):
        measured(a_bound_claim(device))


def test_outputs_of_timed_calls_are_verified():
    calls = []

    def tires(x):
        calls.append(1)
        spend(100e-6)
        return x * 2 if len(calls) < 50 else x

    with pytest.raises(WrongResult, match=r"optimized disagrees.*after timing"):
        measured(a_bound_claim(optimized=tires))


@pytest.mark.parametrize(("memory", "verified"), [(64 * 5 * 1024, 6), (1 << 30, 0)])
def test_outputs_wait_for_verification_up_to_a_share_of_the_memory(memory, verified):
    """Two arms' outputs take 1 KiB per seed. With 5 KiB of room, the sixth seed forces a check."""
    calls = []
    bound = a_bound_claim(
        FakeDevice(replace(FAKE_GPU, memory_bytes=memory), WHITE),
        reference=lambda x: calls.append(1) or x + x,
    )
    ladder = Ladder([bound])

    def left(seed):
        results = {
            n: [("0", bound.make_inputs(seed).args[0] * 2)] for n in ("baseline", "optimized")
        }
        ladder.verify_later([results], seed, "then")

    for seed in range(5):
        left(seed)
    assert len(calls) == 0
    left(5)
    assert len(calls) == verified
    ladder.verify()
    assert len(calls) == 6


def test_the_reference_runs_once_for_the_same_inputs():
    calls = []
    bound = a_bound_claim(reference=lambda x: calls.append(1) or x + x)
    ladder = Ladder([bound])
    for seed, other in ((1, None), (1, None), (1, 2), (1, 2), (1, None)):
        values = bound.make_inputs(seed if other is None else other).args[0]
        results = {name: [("0", values * 2)] for name in ("baseline", "optimized")}
        ladder.verify_later([results], seed, "then", other)
    ladder.verify()
    assert len(calls) == 3


def test_arms_that_update_in_place_are_verified_from_restored_inputs():
    def adding(microseconds):
        def add(x):
            spend(microseconds * 1e-6)
            x += 1

        return add

    words = {"baseline": adding(200), "optimized": adding(100), "reference": lambda x: x + 1}
    ratio = speedup(measured(a_bound_claim(**words)))
    assert ratio.low < 2 < ratio.high


def test_a_result_of_restored_inputs_is_copied_after_a_wait(monkeypatch):
    """Without the wait, pinned memory would be read before the call's copy to it is done."""
    seen = []

    class Watched(FakeDevice):
        def synchronize(self):
            seen.append("wait")

    def add(x):
        seen.append("call")
        spend(100e-6)
        x += 1

    bound = a_bound_claim(
        Watched(noise=WHITE), baseline=add, optimized=add, reference=lambda x: x + 1
    )
    bound.check_agreement()
    copies = sampler.agreement.copies
    monkeypatch.setattr(sampler.agreement, "copies", lambda x: seen.append("copy") or copies(x))
    # skip this check, because it copies results without a wait
    monkeypatch.setattr(sampler.Sampler, "check_with_new_inputs", lambda *_: None)
    measure_metric(Ladder([bound]), Metric.DEVICE, STANDARD)
    before = [seen[i - 1] for i, what in enumerate(seen) if what == "copy"]
    assert set(before) == {"wait"}


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


@pytest.mark.parametrize(
    ("each", "layout", "count"),
    [(0.1, 0.01, 10), (0.2, 0.01, 6), (0.2, 0.1, 8), (0.11, 0.1, 10)],
)
def test_a_wide_interval_takes_more_replicates(monkeypatch, each, layout, count):
    now = [0.0]
    monkeypatch.setattr(replicates, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(FakeDevice):
        def release(self):
            now[0] += each

    noisy = replace(Noise.none(), layout=layout)
    timing = measured(a_bound_claim(Slow(noise=noisy)), replace(STANDARD, time_budget_s=0.999))
    assert (timing.stopped, len(timing.replicates)) == ("seconds", count)


# buffers that are built before the exclusive lock


def built_under_the_lock(device, **words):
    """Measure a claim; return the number of replicates that are built under the exclusive lock."""
    made, usual = [], a_claim().inputs
    bound = a_bound_claim(device, inputs=lambda bench: made.append(1) or usual(bench), **words)
    bound.check_agreement()
    ladder = Ladder([bound])
    measurement = replicates.Measurement(ladder, Metric.DEVICE, STANDARD)
    measurement.prepare()
    made.clear()
    timing = measurement.measure()
    in_measure = len(made) / (2 * measurement.sampler.sets)
    measurement.check_with_new_inputs()
    ladder.verify()
    assert len(timing.replicates) == STANDARD.min_replicates
    return in_measure


@pytest.mark.parametrize(
    ("prebuilt", "made"),
    [
        (STANDARD.min_replicates, 0),
        (STANDARD.min_replicates - 2, 2),
        (0.5, STANDARD.min_replicates - 1),
    ],
)
def test_replicates_are_prebuilt_while_memory_allows(monkeypatch, prebuilt, made):
    size = 2 * validity.rotation(64 * 8, 0) * 64 * 8  # bytes of the inputs of two arms
    monkeypatch.setattr(sampler, "PREBUILT_SHARE", prebuilt * size / FAKE_GPU.memory_bytes)
    assert built_under_the_lock(FakeDevice(noise=Noise.none())) == made


def test_half_of_the_memory_is_left_to_others():
    class Full(FakeDevice):
        queries = 0

        def free_bytes(self):
            self.queries += 1
            return self.gpu.memory_bytes // 2 + 2 - self.queries  # less per query: others allocate

    assert built_under_the_lock(Full(noise=Noise.none())) == STANDARD.min_replicates - 3


def test_a_replicate_that_finds_no_memory_is_built_under_the_lock():
    class OutOfMemoryError(RuntimeError):
        pass

    class Small(FakeDevice):
        blocks = 0

        def block(self, calls, mode):
            self.blocks += mode is Mode.WALL
            if mode is Mode.WALL and self.blocks == 8:  # while replicates are prebuilt
                raise OutOfMemoryError
            return super().block(calls, mode)

    assert built_under_the_lock(Small(noise=Noise.none())) == STANDARD.min_replicates - 2


def test_ranks_and_host_claims_prebuild_one_replicate():
    class Two(RankGroup):
        count = property(lambda _: 2)

    assert built_under_the_lock(FakeDevice(None, Noise.none())) == STANDARD.min_replicates - 1
    assert (
        built_under_the_lock(FakeDevice(noise=Noise.none(), ranks=Two()))
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


@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_a_slow_call_has_one_input_set(cache):
    device = FakeDevice(replace(FAKE_GPU, l2_bytes=64 * 8), Noise.none())  # one set fills the L2
    bound = a_bound_claim(
        device, cache=cache, baseline=doubling(50_000), optimized=doubling(45_000)
    )
    bound.check_agreement()
    timed = a_sampler(bound, prebuilt=[1001, 2001])
    assert (timed.sets, len(timed._prebuilt[2001][0].calls)) == (1, 1)


@pytest.mark.parametrize(
    ("mode", "prebuilt", "warmed"),
    [
        (Mode.BACKLOG, [1], False),  # warm_up has run the call
        (Mode.PLAIN, [1], False),
        (Mode.GRAPH, [1], True),  # capturing must not be a call's first run
        (Mode.GRAPH, [2], False),
        (Mode.WALL, [2], True),  # prebuilt long ago: the caches may be cold again
    ],
)
def test_each_call_has_run_before_it_is_timed(monkeypatch, mode, prebuilt, warmed):
    ran = []
    monkeypatch.setattr(sampler.Sampler, "_run_once", lambda _, stand: ran.append(stand.name))
    bound = a_bound_claim()
    bound.check_agreement()
    timed = a_sampler(bound, Metric.WALL if mode is Mode.WALL else Metric.DEVICE, prebuilt)
    timed.mode = mode
    ran.clear()
    timed.replicate(2)
    assert sorted(ran) == (["baseline", "optimized"] if warmed else [])


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
    timed._round = lambda *about: done.append("round") or once(*about)
    timed.replicate(2)
    warm_ups = [2] if metric is Metric.DEVICE else []  # wall times include pauses of the GPU anyway
    assert done == [*warm_ups, "round", "round"]


def test_progress_reports_phases_and_figures():
    reports = []
    measured(a_bound_claim(phases=reports))
    phases = [phase for phase, _ in reports]
    assert list(dict.fromkeys(phases)) == ["agreeing", "preparing", "warming up", "measuring"]
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


@pytest.mark.parametrize(("better", "ratio"), [("higher", 1.5), ("lower", 1 / 1.5)])
def test_scores(better, ratio):
    def scoring(figure):
        return lambda x: (x * 2, Score(figure, "tokens/s", better))

    bound = a_bound_claim(baseline=scoring(100.0), optimized=scoring(150.0), metric="score")
    timing = measured(bound, metric=Metric.SCORE)
    assert timing.unit == "tokens/s"
    assert speedup(timing).value == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (lambda x: x * 2, "exactly one Score"),
        (lambda x: (x * 2, Score(0.0, "hits")), "a ratio needs more than 0"),
    ],
)
def test_a_score_must_be_there_and_positive(arm, message):
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
    assert "too large to keep the outputs" in timing.notes[0]


def test_an_arm_that_turns_wrong_on_large_inputs_is_found_after_timing():
    calls = []

    def tires(x):
        spend(100e-6)
        calls.append(1)
        return x * (2 if len(calls) < 50 else 3)

    gpu = replace(FAKE_GPU, memory_bytes=64 * 8 * 19)
    with pytest.raises(WrongResult, match="optimized disagrees with the reference"):
        measured(a_bound_claim(FakeDevice(gpu, WHITE), optimized=tires))
    assert len(calls) > 50


# verdicts on a device with all the noise of a real one


def verdicts(slower, comparisons=40):
    found = []
    for seed in range(comparisons):
        device = FakeDevice(seed=seed)
        floor = noise_floor(device, seed, STANDARD, lambda *_a, **_k: None)
        bound = a_bound_claim(device, baseline=doubling(200), optimized=doubling(200 * slower))
        bound.random = random.Random(seed)
        bound.check_agreement()
        found.append(
            verdict(speedup(measure_metric(Ladder([bound]), Metric.DEVICE, STANDARD)), floor)
        )
    return found


def test_identical_arms_get_no_verdict():
    found = verdicts(1.0)
    assert found.count(Verdict.FASTER) + found.count(Verdict.SLOWER) == 0


def test_an_arm_slowed_by_two_percent_is_slower():
    # at least 36 of 40, because the default noise is that of the noisiest kernel
    assert verdicts(1.02).count(Verdict.SLOWER) >= 36
