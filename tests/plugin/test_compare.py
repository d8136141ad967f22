"""One claim, whole: what becomes of a measurement, and under which lease it is made."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from pytest_aiperf import Work
from pytest_aiperf.claim import measure
from pytest_aiperf.claim.inputs import SEEDS
from pytest_aiperf.claim.measure import ClaimContext, run
from pytest_aiperf.claim.stopping_rule import STANDARD
from pytest_aiperf.device.fake import FAKE_GPU, FakeDevice, Fault, Noise
from pytest_aiperf.errors import ClaimNotMet, InvalidMeasurement, WrongResult
from pytest_aiperf.model import Expectation, Interval, Outcome, Recorded, Result, Verdict
from tests.plugin.claims import a_claim, doubling

BLANK = Result("ch07/x", "t::x", "X", Outcome.ERROR, "h200", "run", "2026-01-01", 1)


class Turns:
    """A lease that writes down who has what."""

    waited = 0.0

    def __init__(self):
        self.log = []

    def _turn(self, name):
        @contextmanager
        def turn():
            self.log.append(name)
            yield

        return turn

    def __getattr__(self, name):
        return self._turn(name)


def a_case(**changes):
    noise = replace(Noise.none(), white=0.001)
    case = ClaimContext(
        blank=BLANK,
        clock=FakeDevice(FAKE_GPU, noise),
        lease=Turns(),
        plan=STANDARD,
        say=lambda *_a, **_k: None,
        floor=lambda clock: 0.002,
        expected=lambda code: Expectation(),
        code=lambda: "c0de",
    )
    return replace(case, **changes)


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # of the run that tests us


def test_a_record_leaves_out_what_others_were_waited_for():
    class Crowded(Turns):
        def __getattr__(self, name):
            self.waited += 1000.0
            return super().__getattr__(name)

    result, _ = run(a_claim(), a_case(lease=Crowded()))
    assert result.seconds < 0  # here the waiting took no time


def test_inputs_that_flip_a_global_switch_are_found(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    claim = a_claim()

    def flips(bench):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        return claim.inputs(bench)

    result, problem = run(replace(claim, inputs=flips), a_case())
    assert result.outcome is Outcome.INVALID
    assert "OMP_NUM_THREADS: 4 -> 1" in str(problem)


@pytest.mark.parametrize(
    ("highs", "floor", "asked"),
    [([1.05, 9], 0.05, 1), ([2.3, 1.06, 1.07], 0.07, 3), ([1.5, 1.3, 1.4, 9], 0.4, 3)],
)
def test_a_noise_floor_of_a_disturbance_is_measured_again(monkeypatch, highs, floor, asked):
    given = iter(highs)
    seen = []

    def speedup(_):
        seen.append(1)
        return Interval(1, 1, next(given))

    monkeypatch.setattr(measure, "speedup", speedup)
    clock = FakeDevice(noise=Noise.none())
    assert measure.noise_floor(clock, 1, STANDARD, lambda *_a, **_k: None) == pytest.approx(floor)
    assert len(seen) == asked


def test_a_claim_that_holds():
    case = a_case()
    result, problem = run(a_claim(library=doubling(150)), case)
    assert problem is None
    assert (result.outcome, result.verdict) == (Outcome.PASSED, Verdict.FASTER)
    assert result.speedup.low < 2 < result.speedup.high
    assert result.library.low < 1.5 < result.library.high
    assert (result.code, result.floor, len(result.agreement)) == ("c0de", 0.002, 3)


def test_it_prepares_with_others_and_times_alone():
    case = a_case()
    run(a_claim(metric=("device", "wall")), case)
    # a turn for the work, one to learn the contract, one for each seed; then each metric is made
    # ready, timed and challenged; then all is verified, and explained
    turns = ["prepare"] * (2 + SEEDS)
    for timed in ("time_device", "time_host"):
        turns += ["prepare", timed, "prepare"]
    assert case.lease.log == [*turns, "prepare", "prepare"]


def test_what_makes_inputs_has_ended_before_another_has_its_turn():
    case = a_case()

    class Watched(FakeDevice):
        def synchronize(self):
            case.lease.log.append("wait")

    run(a_claim(), replace(case, clock=Watched(FAKE_GPU, Noise.none())))
    assert case.lease.log[:3] == ["prepare", "wait", "prepare"]


def test_memory_that_others_had_is_asked_for_again_alone():
    class OutOfMemoryError(RuntimeError):
        pass

    calls = []

    def crowded(x):
        calls.append(1)
        if len(calls) == 1:
            raise OutOfMemoryError
        return doubling(100)(x)

    case = a_case()
    result, _ = run(a_claim(optimized=crowded), case)
    # the third turn found no memory; then replicates are prepared, timed, challenged and so on
    turns = [*["prepare"] * 3, "time_device", "prepare", "time_device", *["prepare"] * 3]
    assert case.lease.log == turns
    assert result.outcome is Outcome.PASSED


def test_an_oracle_that_found_no_memory_is_asked_again_alone():
    class OutOfMemoryError(RuntimeError):
        pass

    case, calls = a_case(), []

    def greedy(x):
        calls.append(case.lease.log[-1])
        if case.lease.log.count("time_device") == 1 and calls.count("prepare") == 6:
            raise OutOfMemoryError
        return reference(x)

    reference = a_claim().reference
    result, problem = run(a_claim(reference=greedy), case)
    assert problem is None
    assert case.lease.log[-5:] == ["time_device", *["prepare"] * 2, "time_device", "prepare"]
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
def test_what_becomes_of_claims_that_do_not_hold(words, outcome, kind):
    result, problem = run(a_claim(**words), a_case())
    assert result.outcome is outcome
    assert isinstance(problem, kind)
    assert str(problem) == result.message


def test_a_wrong_result_says_more_than_a_disturbed_round():
    calls = []

    def tires(x):
        calls.append(1)
        result = doubling(100)(x)
        return result if len(calls) < 30 else x

    clock = FakeDevice(FAKE_GPU, Noise.none(), faults=[Fault(100, "throttle", blocks=10_000)])
    result, problem = run(a_claim(optimized=tires), a_case(clock=clock))
    assert isinstance(problem, WrongResult)
    assert result.outcome is Outcome.FAILED


def test_a_debugging_environment_measures_nothing(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    result, _ = run(a_claim(), a_case())
    assert result.outcome is Outcome.INVALID
    assert "CUDA_LAUNCH_BLOCKING" in result.message


def test_recorded_figures_of_what_a_caller_waits_for_are_not_compared():
    recorded = Recorded((9.0, 9.5, 9.9), 3, "c0de", "torch 2", "2026-01-01")
    case = a_case(expected=lambda code: Expectation(recorded=recorded, key="h200"))
    assert run(a_claim(metric="wall"), case)[0].outcome is Outcome.PASSED
    lost, _ = run(a_claim(), case)
    assert lost.outcome is Outcome.FAILED
    assert "dropped below the recorded 9.5x" in lost.message
