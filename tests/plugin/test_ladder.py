"""Ladders: rungs of one parametrized test are timed in the same rounds."""

import dataclasses
import functools
import json
import weakref
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pytest_aiperf import Score, prepared
from pytest_aiperf.claim.bound_claim import AGREEMENT_SEEDS, BoundClaim
from pytest_aiperf.claim.ladder import Ladder, identity
from pytest_aiperf.claim.measure import measure_ladder
from pytest_aiperf.claim.replicates import measure_metric
from pytest_aiperf.claim.stopping_rule import STANDARD
from pytest_aiperf.model import Metric, Outcome
from pytest_aiperf.rules.stats import speedup
from tests.fake_gpu import FakeDevice, Noise, spend

from .claims import a_claim, doubling
from .conftest import by_claim
from .test_compare import a_context

LADDER = """
@pytest.mark.parametrize("rung", [100, 50, 5])
def test_ladder(compare, rung):
    compare(**usual | {"optimized": doubling(rung)})
"""
STEPS = """
@pytest.mark.parametrize("rung", [100, 50, 5])
def test_steps(compare, rung):
    before = {100: 200, 50: 100, 5: 50}[rung]
    compare(**usual | {"baseline": doubling(before), "optimized": doubling(rung)},
            against="previous rung")
"""


# which arms are the same


def a_function(x):
    return x


def test_arms_with_the_same_code_and_the_same_captured_objects_are_the_same():
    def capturing(value):
        return lambda x: (x, value)

    def default(value):
        def arm(x, value=value):
            return x, value

        return arm

    text = "a string"
    same = [
        (a_function, a_function),
        (capturing(1), capturing(1)),
        (capturing(a_function), capturing(a_function)),
        (capturing(capturing(text)), capturing(capturing(text))),
        (default(2), default(2)),
        (prepared(capturing(1)), prepared(capturing(1))),
        (functools.partial(a_function, 1, y=2), functools.partial(a_function, 1, y=2)),
    ]
    for one, other in same:
        assert identity(one) == identity(other)
    different = [
        a_function, capturing(1), capturing(1.0), capturing(2), capturing([1]), capturing([1]),
        default(1), default(2), prepared(capturing(1)), functools.partial(a_function, 1),
        functools.partial(a_function, 2), functools.partial(a_function, y=1),
    ]  # fmt: skip
    assert len({identity(one) for one in different}) == len(different)


def test_methods_of_one_object_are_the_same_arm_and_those_of_two_are_not():
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def arm(self, x):
            return self.factor * x

        def twice(self, x):
            return 2 * self.arm(x)

    double, triple = Scale(2), Scale(3)
    assert identity(double.arm) == identity(double.arm)
    assert identity(prepared(double.arm)) == identity(prepared(double.arm))
    assert len({identity(arm) for arm in (double.arm, triple.arm, double.twice)}) == 3


@dataclasses.dataclass(frozen=True)
class Scaled:
    factor: float
    kind: str = dataclasses.field(compare=False)

    def arm(self, x):
        return self.factor * x if self.kind == "scaled" else x


class AlwaysEqual:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1

    def arm(self, x):
        return self.factor * x


def test_arms_of_objects_that_are_merely_equal_are_not_the_same():
    def capturing(value):
        return lambda x: (x, value)

    assert identity(Scaled(2.0, "scaled").arm) == identity(Scaled(2.0, "scaled").arm)
    different = [
        Scaled(2.0, "scaled").arm, Scaled(2.0, "not").arm, Scaled(3.0, "scaled").arm,
        AlwaysEqual(1).arm, AlwaysEqual(2).arm,
        *map(capturing, (0.0, -0.0, (1,), (1.0,), (True,))),
    ]  # fmt: skip
    assert len({identity(arm) for arm in different}) == len(different)


def test_a_recursive_arm_has_an_identity():
    def recursive(x):
        return recursive(x - 1) if x else 0

    assert identity(recursive) == identity(recursive)


# one measurement


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # set by the outer pytest run


def a_ladder(*claims, device=None):
    device = device or FakeDevice(noise=replace(Noise.none(), white=0.002), seed=1)
    return Ladder([BoundClaim(claim, device, 1, full=True) for claim in claims])


def test_an_arm_that_two_rungs_use_is_timed_once():
    ladder = a_ladder(
        a_claim(optimized=doubling(100), library=doubling(70)),
        a_claim(baseline=doubling(100), optimized=doubling(50), library=doubling(70)),
    )
    assert [rung.arms for rung in ladder.rungs] == [
        {"baseline": "baseline", "optimized": "optimized", "library": "library"},
        {
            "baseline": "optimized",
            "optimized": "optimized-1",
            "library": "library",
            "first": "baseline",
        },
    ]
    for rung in ladder.rungs:
        rung.bound.check_agreement()
    timing = measure_metric(ladder, Metric.DEVICE, STANDARD)
    first, second = (ladder.timing_of(rung, timing) for rung in ladder.rungs)
    rounds = [[b for r in t.replicates for b in r.rounds] for t in (first, second)]
    for one, other in zip(*rounds, strict=True):
        assert one.seconds["optimized"] == other.seconds["baseline"]
        assert one.seconds["baseline"] == other.seconds["first"]
        assert sorted(one.order) == list("BBLLOO")
        assert sorted(other.order) == list("BBFFLLOO")
        # both orders are parts of the same one
        assert one.order.translate(str.maketrans("BO", "FB")).replace("L", "") == (
            other.order.replace("L", "").replace("O", "")
        )
    noted = replace(
        timing, notes=("optimized-1 took 1 ms", "optimized took 2 ms", "not about arms")
    )
    notes = [ladder.timing_of(rung, noted).notes for rung in ladder.rungs]
    assert notes[0] == ("optimized took 2 ms", "not about arms")
    assert notes[1] == ("optimized took 1 ms", "baseline took 2 ms", "not about arms")
    assert speedup(first).value * speedup(second).value == pytest.approx(
        speedup(second, of="first").value, rel=1e-3
    )


def test_an_arm_is_not_compared_with_its_own_times():
    arm = doubling(100)
    ladder = a_ladder(a_claim(baseline=arm, optimized=arm))
    assert ladder.arms == ["baseline", "optimized"]


def test_a_slow_arm_takes_fewer_calls_per_block():
    ladder = a_ladder(a_claim(baseline=doubling(9_000), optimized=doubling(10)))
    ladder.bound.check_agreement()
    timing = measure_metric(ladder, Metric.DEVICE, STANDARD)
    # as many as there are sets of inputs, whose number depends on the machine's speed
    assert timing.calls["baseline"] == 2
    assert timing.calls["optimized"] > 10
    assert speedup(timing).value == pytest.approx(900, rel=0.05)


def outcomes(*claims, **context):
    measured = measure_ladder([(claim, a_context(**context)) for claim in claims])
    return [result for result, _ in measured], [error for _, error in measured]


def test_a_wrong_rung_does_not_affect_the_others():
    def wrong(x):
        spend(30e-6)
        return x * 2.5

    results, errors = outcomes(a_claim(), a_claim(optimized=wrong), a_claim(optimized=doubling(50)))
    assert [r.outcome for r in results] == [Outcome.PASSED, Outcome.FAILED, Outcome.PASSED]
    assert "optimized disagrees with the reference" in str(errors[1])
    assert not results[0].notes
    assert not results[2].notes


def test_agreement_calls_each_arm_and_the_reference_once_per_seed():
    calls = Counter()

    def counted(name, function):
        def call(x):
            calls[name] += 1
            return function(x)

        return call

    arms = [counted(str(rung), doubling(rung)) for rung in (200, 100, 50)]
    reference = counted("reference", lambda x: x + x)
    steps = [
        a_claim(baseline=arms[i], optimized=arms[i + 1], reference=reference) for i in range(2)
    ]
    ladder = Ladder([BoundClaim(claim, FakeDevice(), 1, full=True) for claim in steps])
    for rung in ladder.rungs:
        rung.bound.learn_effects()
    calls.clear()
    assert ladder.check_agreement(lambda step: step())
    assert set(calls.values()) == {AGREEMENT_SEEDS}
    assert [{error.arm for error in rung.agreement} for rung in ladder.rungs] == [
        {"baseline", "optimized"}
    ] * 2


def test_no_arm_finds_the_result_of_another_one_in_freed_memory():
    returned, alive = [], []

    def kept(microseconds):
        def double(x):
            alive.append([result() is not None for result in returned])
            result = doubling(microseconds)(x)
            returned.append(weakref.ref(result))
            return result

        return double

    claims = [a_claim(optimized=kept(rung)) for rung in (100, 50)]
    ladder = Ladder([BoundClaim(claim, FakeDevice(), 1, full=True) for claim in claims])
    for rung in ladder.rungs:
        rung.bound.learn_effects()
    assert ladder.check_agreement(lambda step: step())
    # the second rung's arm runs first on each seed, and its result is kept for the first one's
    assert [flags[-1] for flags in alive[1::2]] == [True] * AGREEMENT_SEEDS
    assert not any(alive[-2])  # of the seeds before, nothing is


@pytest.mark.parametrize("setup", [lambda arm: arm, lambda arm: prepared(lambda _: arm)])
@pytest.mark.parametrize(("off", "outcome"), [(0.0, Outcome.PASSED), (1e-9, Outcome.FAILED)])
def test_where_sums_nearly_cancel_another_order_is_no_error(off, outcome, setup):
    def nearly_cancelling(bench):
        x = np.random.default_rng(bench.seed).normal(size=20_001)
        return (x - x.mean() + 1e-5 * (1 + bench.seed % 7),)

    def mean_of(microseconds, order, factor=1.0):
        def mean(x):
            spend(microseconds * 1e-6)
            return np.atleast_1d(order(x).mean()) * factor

        return mean

    claim = a_claim(
        baseline=setup(mean_of(200, lambda x: x)),
        optimized=setup(mean_of(100, np.sort, 1 + off)),
        inputs=nearly_cancelling,
        reference=mean_of(0, lambda x: x),
    )
    results, errors = outcomes(claim)
    assert results[0].outcome is outcome
    assert not off or "optimized disagrees" in str(errors[0])


def test_a_rung_whose_arm_fails_does_not_affect_the_others():
    def failing(x):
        raise RuntimeError("no kernel for this shape")

    results, errors = outcomes(
        a_claim(), a_claim(optimized=failing), a_claim(optimized=doubling(50))
    )
    assert [r.outcome for r in results] == [Outcome.PASSED, Outcome.ERROR, Outcome.PASSED]
    assert "no kernel for this shape" in str(errors[1])
    assert all(len(r.agreement) == 2 for r in (results[0], results[2]))


def test_rungs_that_need_other_inputs_are_timed_apart_and_say_so():
    def others(bench):
        return (a_claim().inputs(bench)[0] + 1,)

    results, _ = outcomes(a_claim(), a_claim(inputs=others), a_claim(optimized=doubling(50)))
    assert [r.outcome for r in results] == [Outcome.PASSED] * 3
    assert all("not timed together with all rungs" in r.notes[0] for r in results)
    seconds = [r.timing.replicates[0].rounds[0].seconds["baseline"] for r in results]
    assert seconds[0] == seconds[2] != seconds[1]


def test_rungs_with_another_cache_are_timed_apart_and_say_so():
    results, _ = outcomes(a_claim(), a_claim(cache="warm"))
    assert all("the metric, cache=, or the arguments" in r.notes[0] for r in results)


def test_what_is_not_checked_of_a_rungs_results_is_noted_for_this_rung_alone():
    def coarse(x):
        spend(50e-6)
        return x * np.float32(2 * (1 + 3e-6))

    words = {
        "inputs": lambda bench: (a_claim().inputs(bench)[0].astype(np.float32),),
        "reference": lambda x: x.astype(float) * 2,
    }
    results, errors = outcomes(
        a_claim(**words), a_claim(**words, optimized=coarse), a_claim(**words)
    )
    assert errors == [None] * 3
    assert [len(r.unchecked) for r in results] == [0, 1, 0]
    assert "small parts of result: optimized's error is 3e-06" in results[1].unchecked[0]


@pytest.mark.parametrize("rungs", [["fused"], ["plain", "fused"]])
def test_doubts_about_times_name_the_arm_by_its_rung(rungs):
    """What the optimized arm leaves in the L2 cache slows the baseline's next block down."""
    device = FakeDevice(noise=replace(Noise.none(), white=0.002), seed=1)
    is_left, slow_block = False, -1

    def baseline(x):
        nonlocal is_left, slow_block
        if is_left:
            is_left, slow_block = False, device._blocks
        spend(1.2e-3 if device._blocks == slow_block else 1e-3)
        return x * 2

    def optimized(x):
        nonlocal is_left
        is_left = True
        return doubling(500)(x)

    claims = {"plain": a_claim(), "fused": a_claim(baseline=baseline, optimized=optimized)}
    context = a_context(device=device)
    records = {rung: replace(context.record, claim=f"ch07/x[{rung}]") for rung in rungs}
    each = [(claims[rung], replace(context, record=records[rung])) for rung in rungs]
    arm = "the baseline arm of rung 'fused'" if len(rungs) > 1 else "baseline"
    for result, _ in measure_ladder(each):
        [text] = result.unchecked
        assert text.startswith(f"whether another arm slows the baseline down: {arm} took 1.2")


def test_a_score_without_a_ratio_is_that_of_an_arm_of_a_rung():
    def scored(value):
        return lambda x: (x * 2, Score(value, "ms", "lower"))

    context = a_context()
    rungs = [
        (
            a_claim(baseline=scored(2.0), optimized=scored(value), metric="score"),
            replace(context, record=replace(context.record, claim=f"ch07/x[{rung}]")),
        )
        for rung, value in {"half": 1.0, "none": 0.0}.items()
    ]
    (half, _), (none, error) = measure_ladder(rungs)
    assert (half.outcome, none.outcome) == (Outcome.PASSED, Outcome.ERROR)
    assert any("the optimized arm of rung 'none' gives 0.0 ms" in note for note in half.notes)
    assert str(error).startswith("optimized gives 0.0 ms: a ratio needs more than 0")


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_an_array_that_is_passed_twice_is_noted_for_each_rung(cache):
    arm = lambda us: lambda x, _: doubling(us)(x)
    words = {
        "baseline": arm(200),
        "inputs": lambda bench: a_claim().inputs(bench) * 2,
        "reference": lambda x, _: x + x,
    }
    results, errors = outcomes(
        a_claim(**words, optimized=arm(100)), a_claim(**words, optimized=arm(50), cache=cache)
    )
    assert errors == [None] * 2
    for result in results:
        assert any(u.startswith("calls on different arrays: ") for u in result.unchecked)


def test_rungs_are_timed_one_by_one_if_they_cannot_be_timed_together():
    def moody(calls=[]):  # noqa: B006  counts the calls of all claims
        def double(x):
            calls.append(1)
            if len(calls) == 20:
                raise RuntimeError("not now")
            spend(50e-6)
            return x * 2

        return double

    results, errors = outcomes(a_claim(), a_claim(optimized=moody()))
    assert errors == [None, None]
    assert all("timed by itself" in r.notes[-1] and "not now" in r.notes[-1] for r in results)


# sessions


def test_a_ladder_is_one_measurement_with_a_result_for_each_rung(project):
    project.tests(LADDER + STEPS)
    done = project.run("--gpu", "-v")
    done.assert_outcomes(passed=6)
    done.stdout.fnmatch_lines(["*::test_ladder[[]100[]] FASTER *", "*::test_steps[[]5[]] FASTER *"])
    results = project.results()
    for name, ratios, firsts in (
        ("ladder", (2, 4, 40), (None, None, None)),
        ("steps", (2, 2, 10), (None, 4, 40)),
    ):
        rungs = [results[f"ch07/{name}[{rung}]"] for rung in (100, 50, 5)]
        assert {r["ladder"] for r in rungs} == {f"ch07/{name}"}
        assert [r["rung_index"] for r in rungs] == [0, 1, 2]
        assert len({r["seed"] for r in rungs}) == 1
        for rung, ratio, first in zip(rungs, ratios, firsts, strict=True):
            assert rung["speedup"]["value"] == pytest.approx(ratio, rel=0.05)
            if first is None:
                assert rung["first"] is None
            else:
                assert rung["first"]["value"] == pytest.approx(first, rel=0.05)
        role = "baseline" if name == "ladder" else "first"
        blocks = [r["timing"]["replicates"][0]["rounds"][0]["seconds"] for r in rungs]
        assert blocks[0]["baseline"] == blocks[1][role] == blocks[2][role]


def test_workers_share_the_measurement_of_a_ladder(project):
    project.tests(LADDER + STEPS)
    project.run("--gpu", "-n3").assert_outcomes(passed=6)
    results = project.results()
    blocks = [
        results[f"ch07/ladder[{rung}]"]["timing"]["replicates"][0]["rounds"][0]["seconds"]
        for rung in (100, 50, 5)
    ]
    assert blocks[0]["baseline"] == blocks[1]["baseline"] == blocks[2]["baseline"]


def test_one_selected_rung_is_measured_alone(project):
    project.tests(LADDER)
    project.run("--gpu", "-k", "50").assert_outcomes(passed=1, deselected=2)
    [result] = project.results().values()
    assert (result["claim"], result["ladder"]) == ("ch07/ladder[50]", "ch07/ladder")


def test_a_rung_that_fails_before_it_compares_costs_only_itself(project):
    project.tests(
        """
@pytest.mark.parametrize("rung", [100, 50, 5])
def test_ladder(compare, rung):
    if rung == 50:
        raise OSError("no such rung")
    result = compare(**usual | {"optimized": doubling(rung)})
    assert result.speedup.value > 30, "after the comparison"
"""
    )
    done = project.run("--gpu")
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(["*OSError: no such rung*", "*after the comparison*"])
    found = {c: (r["outcome"], r["speedup"] is None) for c, r in project.results().items()}
    assert found == {
        "ch07/ladder[100]": ("ERROR", False),
        "ch07/ladder[50]": ("ERROR", True),
        "ch07/ladder[5]": ("PASSED", False),
    }


@pytest.mark.parametrize(
    ("baselines", "words", "refused"),
    [
        ((200, 100, 50), (), []),
        ((200, 100, 100), (), []),  # the fastest arm before, which is not the last one
        ((200, 200, 50), (), [1]),
        ((200, 200, 50), ("-k2",), []),
    ],
)
def test_a_rung_against_the_previous_rung_has_its_arm_as_baseline(
    project, baselines, words, refused
):
    project.tests(f"""
@pytest.mark.parametrize("rung", range(3))
def test_ladder(compare, rung):
    baseline, optimized = doubling({baselines}[rung]), doubling([100, 50, 20][rung])
    arms = {{"baseline": baseline, "optimized": optimized}}
    compare(**usual | arms, against="previous rung")
""")
    project.run("--gpu", *words)
    messages = {r["rung_index"]: r["message"] for r in project.results().values()}
    assert [i for i in messages if "not the optimized arm of any" in messages[i]] == refused


def test_what_arms_print_is_captured(project):
    project.tests("""
import os

@pytest.mark.parametrize("rung", [50, 5])
def test_ladder(compare, rung):
    def printing(x):
        os.write(2, b"written")
        print("printed")
        return doubling(rung)(x)
    compare(**usual | {"optimized": printing})
""")
    assert "written" not in str(project.run("--gpu").stdout)
    project.run("--gpu", "-rP").stdout.fnmatch_lines(
        ["*Captured stdout call*", "printed*", "*Captured stderr call*", "written*"]
    )


def test_a_global_that_a_later_rung_changes_costs_the_earlier_rung(project):
    project.tests(
        """
USED, calls = [None], []

@pytest.mark.parametrize("rung", [50, 5])
def test_ladder(compare, rung):
    USED[0] = doubling(rung)
    calls.append(rung)  # grows, as caches do
    def optimized(x):
        calls and USED[0](x)
        return usual["baseline"](x)
    compare(**usual | {"optimized": optimized})
"""
    )
    done = project.run("--gpu")
    results = project.results()
    assert "USED: changed since this test called compare()" in results["ch07/ladder[50]"]["message"]
    assert results["ch07/ladder[5]"]["message"].startswith("SLOWER"), done


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("os.environ['RUNG'] = str(rung)", "os.environ['RUNG']: changed since"),
        ("np.seterr(under='raise' if rung == 5 else 'ignore')", "numpy.geterr: [("),
    ],
)
def test_a_setting_that_a_later_rung_changes_costs_the_earlier_rung(project, change, name):
    project.tests(
        f"""
@pytest.mark.parametrize("rung", [50, 5])
def test_ladder(compare, rung):
    {change}
    os.environ[f"NEW_{{rung}}"] = "1"  # as imports do
    compare(**usual | {{"optimized": doubling(rung)}})
"""
    )
    project.run("--gpu")
    results = project.results()
    assert results["ch07/ladder[50]"]["message"].startswith(name)
    assert results["ch07/ladder[5]"]["outcome"] == "PASSED"


def test_a_rung_that_ends_its_process_costs_only_itself(project):
    project.tests(
        """
def dying(x):
    os._exit(7)

@pytest.mark.parametrize("rung", [100, 50, 5])
def test_ladder(compare, rung):
    compare(**usual | {"optimized": dying if rung == 50 else doubling(rung)})
"""
    )
    done = project.run("--gpu")
    done.assert_outcomes(passed=2, failed=1)
    results = project.results()
    assert "ended with exit code 7" in results["ch07/ladder[50]"]["message"]
    for rung in (100, 5):
        [note] = results[f"ch07/ladder[{rung}]"]["notes"]
        assert note.startswith("measured by itself, because the process of its ladder ended")


def test_a_rung_that_is_not_met_is_confirmed_with_its_ladder(project):
    project.tests(LADDER.replace("50, 5", "200, 5"))
    project.run("--gpu").assert_outcomes(passed=2, failed=1)
    results = project.results()
    assert {r["attempts"] for r in results.values()} == {2}
    assert results["ch07/ladder[200]"]["verdict"] == "SAME"
    [own], [other] = (results[f"ch07/ladder[{rung}]"]["notes"] for rung in (200, 5))
    assert own.startswith("second attempt; the first: SAME where FASTER is claimed")
    assert other.startswith("second attempt; the first of another rung: SAME where FASTER")


@pytest.mark.parametrize("scope", ["function", "module"])
@pytest.mark.parametrize(
    "teardown",
    ["yield held\n    held.clear()", "request.addfinalizer(held.clear)\n    return held"],
    ids=["yield", "finalizer"],
)
def test_a_fixture_lives_until_its_rungs_are_timed(project, teardown, scope):
    """Rungs that share one from their module are timed together, rungs with their own apart."""
    project.tests(
        f"""
@pytest.fixture(scope="{scope}")
def resource(request):
    held = [2]
    {teardown}

@pytest.mark.parametrize("rung", [100, 50])
def test_ladder(compare, resource, rung):
    def double(x):
        spend(rung * 1e-6)
        return x * resource[0]
    compare(**usual | {{"optimized": double}})
"""
    )
    project.run("--gpu").assert_outcomes(passed=2)
    blocks = [
        r["timing"]["replicates"][0]["rounds"][0]["seconds"]["baseline"]
        for r in project.results().values()
    ]
    assert (blocks[0] == blocks[1]) == (scope == "module")


def test_a_finalizer_that_no_fixture_adds_itself_is_named_as_a_cause(project):
    project.tests(
        """
def until_the_end(request, held):
    request.addfinalizer(held.clear)
    return held

@pytest.fixture
def resource(request):
    return until_the_end(request, [2])

@pytest.mark.parametrize("rung", [100, 50])
def test_ladder(compare, resource, rung):
    compare(**usual | {"optimized": lambda x: x * resource[0]})
"""
    )
    done = project.run("--gpu", "--quick")
    done.assert_outcomes(failed=2)
    done.stdout.fnmatch_lines(["resource: changed *not in a finalizer that a function*"])


def test_a_shard_holds_whole_ladders(project):
    project.tests(LADDER + STEPS)
    claims = set()
    for shard in ("1/2", "2/2"):
        project.run("--gpu", f"--shard={shard}").assert_outcomes(passed=3, deselected=3)
        found = {r["ladder"] for r in project.results().values()}
        assert len(found) == 1
        claims |= found
    assert claims == {"ch07/ladder", "ch07/steps"}


def test_rungs_pass_through_junit_and_expectations(project):
    project.tests(LADDER)
    project.run("--gpu", "--update-expectations", "--junitxml=out.xml").assert_outcomes(passed=3)
    cases = ET.parse(project.path / "out.xml").iter("testcase")
    seconds = [record["seconds"] for record in project.results().values()]
    assert sorted(float(case.get("time")) for case in cases) == pytest.approx(
        sorted(seconds), abs=0.1
    )
    text = (project.path / "expectations.yaml").read_text()
    assert all(f"ch07/ladder[{rung}]" in text for rung in (100, 50, 5))
    accepted = json.loads((project.path / "results" / "fake.json").read_text())
    assert by_claim(accepted).keys() == project.results().keys()


def test_an_arm_that_two_rungs_use_is_traced_once():
    traced = []

    class Watched(FakeDevice):
        def trace(self, call, mode, *, cold):
            traced.append(call)
            return super().trace(call, mode, cold=cold)

    context = a_context(device=Watched(noise=replace(Noise.none(), white=0.001)))
    claims = [a_claim(), a_claim(optimized=doubling(50)), a_claim(optimized=doubling(25))]
    measured = measure_ladder([(claim, context) for claim in claims])
    assert [error for _, error in measured] == [None] * 3
    assert len(traced) == 4
    assert all(set(r.traces) == {"baseline", "optimized"} for r, _ in measured)
    assert measured[0][0].traces["baseline"] == measured[2][0].traces["baseline"]


def test_other_parameters_make_other_ladders(project):
    project.tests(
        """
@pytest.mark.parametrize("kind", [float, int])
@pytest.mark.parametrize("size", [10, 20])
@pytest.mark.parametrize("rung", ["a", "b"])
def test_sum(compare, rung, size, kind):
    compare(**usual)
"""
    )
    project.run("--gpu", "--quick", "-k", "float")
    ladders = {claim: result["ladder"] for claim, result in project.results().items()}
    assert ladders == {
        "ch07/sum[a-10-float]": "ch07/sum[size=10,kind=float]",
        "ch07/sum[a-20-float]": "ch07/sum[size=20,kind=float]",
        "ch07/sum[b-10-float]": "ch07/sum[size=10,kind=float]",
        "ch07/sum[b-20-float]": "ch07/sum[size=20,kind=float]",
    }
