"""Records that contradict themselves are refused, in one sentence, by all that reads them."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
import shutil
from datetime import date
from pathlib import Path

import pytest

from pytest_aiperf.cli import main
from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Outcome, Result
from pytest_aiperf.records.consistency import contradiction
from pytest_aiperf.records.expectations import propose_update
from pytest_aiperf.records.results import read_record, read_results
from pytest_aiperf.schema import from_json, to_json

RESULTS = Path(__file__).parents[2] / "results"
RECORDS = [RESULTS / f"{key}.json" for key in ("h200", "h100", "2xh200", "cpu")]
CONF = RESULTS.parent / "docs" / "conf.py"


@functools.cache
def recorded():
    """The accepted records, as JSON values by claim."""
    content = json.loads((RESULTS / "h200.json").read_text())
    return {entry["aiperf"]["claim"]: entry["aiperf"] for entry in content["benchmarks"]}


def a_record():
    """An accepted record with limits, all arms, evidence and, copied, a second metric.

    Its first piece of evidence has a lower bound, which an edit of its value can break.
    """
    names = ("limits", "library", "first", "evidence", "expectation")
    whole = [r for r in recorded().values() if all(r[name] for name in names)]
    bounded = [r for r in whole if r["evidence"][0]["evidence"]["min"] is not None]
    found = next(r for r in bounded if r["expectation"]["recorded"])
    record = copy.deepcopy(found)
    record["also"] = [copy.deepcopy(record["timing"])]
    return record


def each_round(record):
    return [blocks for rep in record["timing"]["replicates"] for blocks in rep["rounds"]]


def scale(record, arm, factor):
    for blocks in each_round(record):
        blocks["seconds"][arm] = [factor * value for value in blocks["seconds"][arm]]


def set_all(record, values):
    for blocks in each_round(record):
        blocks["seconds"]["optimized"] = list(values)


def at(path, value):
    """Return an edit that sets the value at a path such as ``"speedup.value"``."""

    def edit(record):
        *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        for key in parents:
            record = record[key]
        record[last] = value

    return edit


def untimed(record):
    record["timing"], record["also"], record["limits"] = None, [], {}


def too_fast(record):
    """Twenty times the rate, consistently."""
    for arm in ("baseline", "optimized", "library", "first"):
        scale(record, arm, 0.05)
    for limit in record["limits"].values():
        limit["rate"] *= 20
        limit["share"] *= 20


EDITS = {
    "a larger speedup": (at("speedup.value", 1000.0), "its speedup is"),
    "a higher lower end": (at("speedup.low", 1.9), "its speedup is"),
    "another library ratio": (at("library.value", 3.0), "its library is"),
    "no library ratio": (at("library", None), "its library is None"),
    "another ratio to the first arm": (at("first.high", 99.0), "its first is"),
    "a slower optimized arm": (lambda r: scale(r, "optimized", 100), "its speedup is"),
    "negative seconds": (lambda r: set_all(r, [-1e-3, -1e-3]), "not all above 0"),
    "no seconds": (lambda r: set_all(r, [0.0, 0.0]), "not all above 0"),
    "seconds that overflow": (lambda r: set_all(r, [1e-308, 1e308]), "its speedup is"),
    "one block": (lambda r: set_all(r, [1e-3]), "their order does not name"),
    "no blocks": (lambda r: set_all(r, []), "their order does not name"),
    "another order": (at("timing.replicates.0.rounds.0.order", "BXXB"), "order"),
    "a second metric of other blocks": (at("also.0.replicates.0.rounds.0.order", "BBB"), "order"),
    "no rounds": (at("timing.replicates", []), "no rounds"),
    "a replicate without rounds": (at("timing.replicates.0.rounds", []), "no rounds"),
    "a round without an arm": (
        lambda r: each_round(r)[-1]["seconds"].pop("optimized"),
        "different arms",
    ),
    "no timing": (untimed, "its speedup is"),
    "no calls": (at("timing.calls.baseline", 0), "no calls"),
    "calls of another arm": (at("timing.calls.other", 3), "calls of no arm"),
    "no input sets": (at("timing.sets", 0), "no calls"),
    "scores that are times": (at("timing.unit", "requests"), "is better"),
    "higher times": (at("timing.better", "higher"), "is better"),
    "another verdict": (at("verdict", "SLOWER"), "its verdict is SLOWER"),
    "no verdict": (at("verdict", None), "it PASSED with the verdict None"),
    "a negative noise floor": (at("floor", -0.5), "floor is too small"),
    "a negative duration": (at("seconds", -1.0), "too small"),
    "no attempt": (at("attempts", 0), "too small"),
    "an expectation of 0": (
        at("expectation.recorded.speedup", [0.0, 1.0, 2.0]),
        "its expectation is no interval above 0",
    ),
    "negative work": (at("work.read", -1e12), "its work is negative"),
    "no agreement": (at("agreement", []), "were not checked: baseline"),
    "one arm's agreement": (lambda r: r["agreement"].pop(), "were not checked"),
    "an error above the limit": (at("agreement.0.error", 3.0), "does not agree"),
    "an RMS error above the limit": (at("agreement.1.rms", 3.0), "does not agree"),
    "a negative error": (at("agreement.0.error", -1.0), "does not agree"),
    "any error allowed": (at("agreement.0.allowed", 1e9), "may have an error of 1e+09"),
    "any RMS error allowed": (at("agreement.0.rms_allowed", 5.0), "may have an error of 5"),
    "another claim": (at("claim", "ch01/other"), "is not that of the claim"),
    "another test": (at("nodeid", "tests/ch01/test_x.py::test_other"), "not that of the claim"),
    "another share": (at("limits.optimized.share", 0.97), "not that of its samples"),
    "another rate": (at("limits.optimized.rate", 1e12), "not that of its samples"),
    "a limit of 0": (at("limits.optimized.limit", 0.0), "not above 0"),
    "a limit of no arm": (lambda r: r["limits"].update(x=r["limits"]["optimized"]), "limit of 'x'"),
    "a limit without work": (at("work", None), "without work"),
    "faster than the GPU": (too_fast, "exceed the"),
    "evidence out of its bounds": (at("evidence.0.value", -1.0), "has held=True for -1.0"),
    "evidence without a figure": (at("evidence.0.value", None), "has held=True for None"),
    "evidence that fails on no baseline": (
        lambda r: r["evidence"][0].update(baseline_value=None, baseline_held=False),
        "has baseline_held=False",
    ),
    "evidence that does not hold": (at("evidence.0.held", False), "it PASSED although"),
}


@pytest.mark.parametrize("kind", EDITS)
def test_each_contradiction_is_one_sentence(kind, tmp_path, monkeypatch, capsys):
    edit, message = EDITS[kind]
    record = a_record()
    assert contradiction(from_json(Result, record)) is None
    edit(record)
    with pytest.raises(UsageError, match=r"the record contradicts itself: ") as caught:
        read_record(record, "r")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("command", ["accept", "report", "compare", "merge"])
def test_every_command_refuses_it(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record = a_record()
    record["speedup"]["value"] *= 10
    Path("r.json").write_text(json.dumps({"benchmarks": [{"aiperf": record}]}))
    more = {"compare": ["r.json"], "merge": ["-o", "out.json"]}
    assert main([command, "r.json", *more.get(command, [])]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "the record contradicts itself: its speedup is" in err


def test_a_claim_that_was_not_judged_needs_no_agreement_and_may_be_impossibly_fast():
    record = a_record()
    record |= {"verdict": None, "outcome": "INVALID", "agreement": []}
    assert contradiction(from_json(Result, record)) is None
    assert contradiction(from_json(Result, record | {"verdict": "FASTER"}))


@pytest.mark.parametrize("key", ["h200", "2xh200"])
def test_accepted_records_are_read_and_accepted_again(key, tmp_path):
    results = read_results(RESULTS / f"{key}.json")
    # the requirements allow parity where it is claimed
    expectations = shutil.copy(RESULTS.parent / "expectations.yaml", tmp_path)
    update = propose_update(Path(expectations), results, date(2026, 1, 1))
    # requirements may be ahead of records of earlier code
    changed = re.search(r"course_unmeasured = \[(.*?)\]", CONF.read_text(), re.DOTALL)[1]
    codes = {(r.claim, r.code) for file in RECORDS for r in read_results(file)}
    twice = {claim for claim, _ in codes if len({c for name, c in codes if name == claim}) > 1}
    claims = {r.claim.partition("[")[0] for r, _ in update.refused if r.claim not in twice}
    assert [claim for claim in claims if f'"{claim}"' not in changed] == []
    assert len(update.accepted) + len(update.refused) == len(results) > 3


HOSTILE = (
    *(None, True, 0, -1, 1, 2**70, 0.0, -0.0, 1e-320, 1e308, -1e308, 0.5, 3.7, "", "x", "\ud800"),
    *("9" * 5000, "x" * 200_000, "\x1b[31m\n", [], {}, [0], [[]], [1.0, 2.0], {"optimized": 1.0}),
    *("PASSED", "FAILED", "SLOWER", "SAME", "h200", "2026-01-01", "cpu", "first", "library"),
)


def places(value, path=()):
    """List the paths of all values in a JSON value."""
    yield path
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(each, (*path, key))


def mutate(record, rng):
    """Change one value of a record: replace, delete, double, add or scale it."""
    paths = list(places(record))[1:]
    # a level at random, so that the many samples do not hide the other fields
    depth = rng.choice(sorted({len(p) for p in paths}))
    path = rng.choice([p for p in paths if len(p) == depth])
    *parents, last = path
    parent = functools.reduce(lambda value, key: value[key], parents, record)
    value, act = parent[last], rng.randrange(5)
    if act == 0 and isinstance(value, (int, float)):
        parent[last] = value * rng.choice((-1, 0, 10, 1e300))
    elif act == 1:
        del parent[last]
    elif act == 2 and isinstance(value, list) and value:
        value.append(copy.deepcopy(rng.choice(value)))
    elif act == 3 and isinstance(value, dict):
        value[rng.choice(("\ud800", "x" * 100_000, "optimized", "\x1b[0m"))] = rng.choice(HOSTILE)
    else:
        parent[last] = copy.deepcopy(rng.choice(HOSTILE))


def assert_no_traceback(record, capsys):
    """Every command ends with a status and, if it refuses the record, with one short sentence."""
    Path("r.json").write_text(json.dumps({"benchmarks": [{"aiperf": record}]}))
    for command in (
        ["report", "r.json", "-o", "r.html"],
        ["report", "r.json", "--format=md", "-o", "r.md"],
        ["compare", "good.json", "r.json"],
        ["compare", "r.json", "good.json"],
        ["accept", "r.json", "--dry-run"],
        ["merge", "r.json", "good.json", "-o", "m.json"],
    ):
        status = main(command)
        _, err = capsys.readouterr()
        assert (status, err.count("\n")) in ((0, 0), (1, 0), (2, 1)), (command, err)
        assert len(err) < 1000, (command, err[:2000])
        if status == 2:
            return


def test_no_edit_of_a_record_ends_in_a_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(20260101)
    good = list(recorded().values())
    small = sorted(good, key=lambda r: len(json.dumps(r)))[:30]
    Path("good.json").write_text(json.dumps({"benchmarks": [{"aiperf": small[0]}]}))
    for _ in range(500):
        record = copy.deepcopy(rng.choice(small))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            mutate(record, rng)
        assert_no_traceback(record, capsys)


def test_the_outcome_of_a_lost_claim_contradicts_nothing():
    lost = Result("a/b", "a/test_x.py::test_b", "", Outcome.NOT_RUN, "", "run", "2026-01-01", 0)
    assert contradiction(lost) is None
    assert read_record(to_json(lost), "r") == lost
