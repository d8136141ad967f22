"""One claim from its arguments to its record: outcomes, locks and the noise floor."""

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest

from pytest_aiperf import Score, Work, evidence
from pytest_aiperf.claim import buffers, measure
from pytest_aiperf.claim.bound_claim import AGREEMENT_SEEDS
from pytest_aiperf.claim.measure import ClaimContext, measure_claim
from pytest_aiperf.claim.stopping_rule import STANDARD
from pytest_aiperf.errors import ClaimNotMet, InvalidMeasurement, UsageError, WrongResult
from pytest_aiperf.model import (
    Expectation,
    Interval,
    Outcome,
    Recorded,
    Require,
    Result,
    Verdict,
)
from tests.fake_gpu import FAKE_GPU, FakeDevice, Fault, Noise
from tests.plugin.claims import a_claim, doubling

BLANK = Result("ch07/x", "t::x", "X", Outcome.ERROR, "h200", "run", "2026-01-01", 1)


class LoggingLock:
    """A GPU lock that records how it is entered."""

    waited_s = 0.0
    folder = None

    def __init__(self):
        self.log = []
        self.held = ""

    def _scope(self, name):
        @contextmanager
        def scope():
            self.log.append(name)
            self.held = name
            try:
                yield
            finally:
                self.held = ""

        return scope

    def __getattr__(self, name):
        return self._scope(name)


def a_context(**changes):
    noise = replace(Noise.none(), white=0.001)
    device = FakeDevice(FAKE_GPU, noise)
    context = ClaimContext(
        record=BLANK,
        device=device,
        lock=LoggingLock(),
        rule=STANDARD,
        progress=lambda *_a, **_k: None,
        noise_floor=0.002,
        ceilings={},
        expectation=Expectation(),
        code="c0de",
    )
    return replace(context, **changes)


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # set by the outer pytest run


@pytest.mark.parametrize(("required", "more"), [(1.8, 0), (2.0, STANDARD.undecided_replicates)])
def test_a_requirement_that_the_interval_reaches_takes_more_replicates(required, more):
    claim = a_claim(baseline=doubling(200), optimized=doubling(100))
    require = Require(speedup=required, share=0.5)  # the share is not known while it is timed
    context = a_context(expectation=Expectation(require=require))
    result, _ = measure_claim(claim, context)
    assert result.speedup.value == pytest.approx(2, rel=0.005)
    assert len(result.timing.replicates) == STANDARD.min_replicates + more


def test_seconds_of_a_record_leave_out_the_wait_for_locks():
    class Crowded(LoggingLock):
        def __getattr__(self, name):
            self.waited_s += 1000.0
            return super().__getattr__(name)

    result, _ = measure_claim(a_claim(), a_context(lock=Crowded()))
    assert result.seconds < 0  # the lock reports a wait that is longer than the whole test


def test_inputs_that_flip_a_global_switch_are_found(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    claim = a_claim()

    def flips(bench):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        return claim.inputs(bench)

    result, problem = measure_claim(replace(claim, inputs=flips), a_context())
    assert result.outcome is Outcome.INVALID
    assert "OMP_NUM_THREADS: 4 -> 1" in str(problem)


@pytest.mark.parametrize(
    ("highs", "floor", "measurements"),
    [([1.05, 9], 0.05, 1), ([2.3, 1.06, 1.07], 0.07, 3), ([1.5, 1.3, 1.4, 9], 0.4, 3)],
)
def test_a_disturbed_noise_floor_is_measured_again(monkeypatch, highs, floor, measurements):
    remaining = iter(highs)
    calls = []

    def speedup(_):
        calls.append(1)
        return Interval(1, 1, next(remaining))

    monkeypatch.setattr(measure, "speedup", speedup)
    device = FakeDevice(noise=Noise.none())
    assert measure.noise_floor(device, 1, STANDARD, lambda *_a, **_k: None) == pytest.approx(floor)
    assert len(calls) == measurements


def test_a_claim_names_a_metric():
    with pytest.raises(UsageError, match=r"compare\(metric=\(\)\): name at least one"):
        a_claim(metric=())


@pytest.mark.parametrize("metric", [("wall", "wall"), ["device", "wall", "memory", "wall"]])
def test_a_claim_names_each_metric_once(metric):
    words = re.escape(repr(tuple(metric)))
    text = rf"compare\(metric={words}\): 'wall' is named twice; name each metric once"
    with pytest.raises(UsageError, match=text):
        a_claim(metric=metric)


def test_one_piece_of_evidence_needs_no_list():
    piece = evidence.launches(max=1)
    assert a_claim(evidence=piece).evidence == a_claim(evidence=[piece]).evidence == (piece,)


def test_a_precision_is_checked_early():
    with pytest.raises(UsageError, match=r"precision='half'\): use one of fp64, fp32"):
        a_claim(precision="half")


def test_a_claim_that_holds():
    context = a_context()
    result, problem = measure_claim(a_claim(library=doubling(150)), context)
    assert problem is None
    assert (result.outcome, result.verdict) == (Outcome.PASSED, Verdict.FASTER)
    assert result.speedup.value == pytest.approx(2, rel=0.01)
    assert result.library.value == pytest.approx(1.5, rel=0.01)
    assert (result.code, result.floor, len(result.agreement)) == ("c0de", 0.002, 3)


def test_it_prepares_under_the_shared_lock_and_times_under_the_exclusive():
    context = a_context()
    measure_claim(a_claim(metric=("device", "wall")), context)
    # one step for the size of the inputs, one for the work, one for the effects and one per seed;
    # per metric three: prepare, time and check with new inputs; at the end, verify the outputs
    locks = ["shared"] * (3 + AGREEMENT_SEEDS)
    for timed in ("exclusive_gpu", "exclusive_host"):
        locks += ["shared", timed, "shared"]
    assert context.lock.log == [*locks, "shared"]


class Traced(FakeDevice):
    """Notes under which lock calls are traced."""

    def __init__(self, lock):
        super().__init__(FAKE_GPU, replace(Noise.none(), white=0.001))
        self.lock, self.held = lock, []

    def trace(self, call, mode, *, cold):
        self.held.append((self.lock.held, len(self.lock.log)))
        return super().trace(call, mode, cold=cold)


def traced(**words):
    """Return which exclusive locks were taken, and under which the arms were traced, by number."""
    lock = LoggingLock()
    device = Traced(lock)
    _, problem = measure_claim(a_claim(**words), a_context(device=device, lock=lock))
    assert problem is None
    alone = [i for i, name in enumerate(lock.log, start=1) if name != "shared"]
    return [lock.log[i - 1] for i in alone], [(held, alone.index(i)) for held, i in device.held]


def test_arms_are_traced_under_the_lock_of_the_last_metric_without_waiting_for_another_one():
    for metric, locks in {
        "device": ["exclusive_gpu"],
        "wall": ["exclusive_host"],
        ("device", "wall"): ["exclusive_gpu", "exclusive_host"],
    }.items():
        last = len(locks) - 1
        assert traced(metric=metric) == (locks, [(locks[-1], last)] * 2)


@pytest.mark.parametrize(
    ("words", "lock", "long_build_s"),
    [
        ({"evidence": [evidence.page_faults(min=0)]}, "exclusive_host", 1.0),  # needs the host, too
        ({"metric": ("device", "memory")}, "exclusive_gpu", 1.0),  # the last metric needs no lock
        ({}, "exclusive_gpu", 0.0),  # others can work while the arms are prepared
        ({"evidence": [evidence.busy_share(min=0)]}, "exclusive_gpu", 0.0),
        ({"evidence": [evidence.launches(max=1)], "metric": "wall"}, "exclusive_gpu", 0.0),
        # the share depends on how fast the host enqueues
        ({"evidence": [evidence.busy_share(min=0)], "metric": "wall"}, "exclusive_host", 0.0),
    ],
)
def test_arms_that_cannot_be_traced_at_once_are_traced_under_a_lock_of_their_own(
    monkeypatch, words, lock, long_build_s
):
    monkeypatch.setattr(buffers, "LONG_BUILD_S", long_build_s)
    locks, held = traced(**words)
    last = len(locks) - 1
    assert last >= 1
    assert (locks[-1], held) == (lock, [(lock, last)] * 2)


def test_bytes_are_measured_beside_other_claims():
    context = a_context()
    measure_claim(a_claim(metric=("memory", "device")), context)
    assert [name for name in context.lock.log if name != "shared"] == ["exclusive_gpu"]


@pytest.mark.parametrize(
    ("unit", "times"),
    [("MiB reserved", 0), ("tokens per pass", 0), ("tokens/s", 1), ("s (p99)", 1), ("ms", 1)],
)
def test_counts_are_measured_beside_other_claims_and_rates_are_not(unit, times):
    def scored(score):
        return lambda x: (x * 2, Score(score, unit, "lower"))

    context = a_context()
    arms = {"baseline": scored(2.0), "optimized": scored(1.0)}
    result, problem = measure_claim(a_claim(**arms, metric="score"), context)
    assert (problem, result.speedup.value) == (None, 2)
    alone = [name for name in context.lock.log if name != "shared"]
    assert alone == ["exclusive_host"] * times  # a score may contain the host's work


def test_a_step_waits_for_its_work_before_it_releases_the_lock():
    context = a_context()

    class Watched(FakeDevice):
        def synchronize(self):
            context.lock.log.append("wait")

    measure_claim(a_claim(), replace(context, device=Watched(FAKE_GPU, Noise.none())))
    assert context.lock.log[:3] == ["shared", "wait", "shared"]


def test_a_step_without_memory_runs_again_under_the_exclusive_lock():
    class OutOfMemoryError(RuntimeError):
        pass

    calls = []

    def crowded(x):
        calls.append(1)
        if len(calls) == 1:
            raise OutOfMemoryError
        return doubling(100)(x)

    context = a_context()
    result, _ = measure_claim(a_claim(optimized=crowded), context)
    # the first seed runs out of memory; the other seeds and all later steps run as usual
    others = ["shared"] * (AGREEMENT_SEEDS - 1)
    timed = ["shared", "exclusive_gpu", *["shared"] * 2]
    assert context.lock.log == [*["shared"] * 4, "exclusive_gpu", *others, *timed]
    assert result.outcome is Outcome.PASSED


def test_a_reference_without_memory_runs_again_under_the_exclusive_lock():
    class OutOfMemoryError(RuntimeError):
        pass

    context, calls = a_context(), []

    def greedy(x):
        calls.append(context.lock.log[-1])
        if context.lock.log.count("exclusive_gpu") == 1 and calls.count("shared") == 6:
            raise OutOfMemoryError
        return reference(x)

    reference = a_claim().reference
    result, problem = measure_claim(a_claim(reference=greedy), context)
    assert problem is None
    verified = ["exclusive_gpu", *["shared"] * 2, "exclusive_gpu"]
    assert context.lock.log[-4:] == verified
    assert result.outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("words", "outcome", "kind"),
    [
        ({"optimized": doubling(200)}, Outcome.FAILED, ClaimNotMet),
        ({"optimized": lambda x: x}, Outcome.FAILED, WrongResult),
        # 10 GB in 100 us are 100 TB/s
        ({"work": lambda x: Work(read=5e09, written=5e09)}, Outcome.INVALID, InvalidMeasurement),
    ],
)
def test_outcomes_of_claims_that_do_not_hold(words, outcome, kind):
    result, problem = measure_claim(a_claim(**words), a_context())
    assert result.outcome is outcome
    assert isinstance(problem, kind)
    assert str(problem) == result.message


def test_a_wrong_result_is_reported_before_a_disturbed_round():
    calls = []

    def tires(x):
        calls.append(1)
        result = doubling(100)(x)
        return result if len(calls) < 30 else x

    clock = FakeDevice(FAKE_GPU, Noise.none(), faults=[Fault(100, "throttle", blocks=10_000)])
    result, problem = measure_claim(a_claim(optimized=tires), a_context(device=clock))
    assert isinstance(problem, WrongResult)
    assert result.outcome is Outcome.FAILED


def test_a_debugging_environment_measures_nothing(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    result, _ = measure_claim(a_claim(), a_context())
    assert result.outcome is Outcome.INVALID
    assert "CUDA_LAUNCH_BLOCKING" in result.message


def test_recorded_wall_times_are_not_compared():
    recorded = Recorded((9.0, 9.5, 9.9), 3, "c0de", "torch 2", "2026-01-01")
    context = a_context(expectation=Expectation(recorded=recorded, key="h200"))
    assert measure_claim(a_claim(metric="wall"), context)[0].outcome is Outcome.PASSED
    lost, _ = measure_claim(a_claim(), context)
    assert lost.outcome is Outcome.FAILED
    assert "dropped below the recorded 9.5x" in lost.message
