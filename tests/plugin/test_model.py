"""The nouns are the JSON schema: they survive the journey, and nothing else gets in."""

import json

import pytest

from pytest_aiperf.model import (
    Interval,
    Metric,
    Mode,
    Outcome,
    Replicate,
    Result,
    Round,
    Timing,
    Verdict,
    Work,
    from_json,
    to_json,
)

RESULT = Result(
    claim="ch07/copy[vector]",
    nodeid="tests/ch07/test_copy.py::test_copy[vector]",
    title="Wide loads copy faster",
    outcome=Outcome.PASSED,
    key="h200",
    run="r1",
    started="2026-01-01T00:00:00+00:00",
    seed=7,
    verdict=Verdict.FASTER,
    speedup=Interval(1.9, 2.0, 2.1),
    work=Work(bytes=8e9, dtype="fp32"),
    timing=Timing(
        Metric.DEVICE,
        Mode.GRAPH,
        10,
        "cold",
        3,
        (Replicate(1, (Round("BOOB", {"baseline": (2.0, 2.1), "optimized": (1.0, 1.0)}),)),),
    ),
    stack={"torch": "2.11"},
)


def test_a_result_survives_strict_json():
    text = json.dumps(to_json(RESULT), allow_nan=False)
    assert from_json(Result, json.loads(text)) == RESULT


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"verdict": "BEST"}, "Result.verdict: 'BEST' is none of FASTER"),
        ({"seed": "7"}, "Result.seed: int is needed"),
        ({"seed": True}, "Result.seed: int is needed"),
        ({"speedup": {"low": 1, "value": 2}}, "Result.speedup: high is missing"),
        ({"extra": 1}, "unknown extra"),
        ({"floor": 10**400}, "Result.floor: 1000"),
        ({"work": []}, "Result.work: a mapping is needed"),
        ({"timing": {**to_json(RESULT.timing), "better": "bigger"}}, "'bigger' is none of"),
    ],
)
def test_what_does_not_fit_is_named(change, says):
    with pytest.raises(ValueError, match=says):
        from_json(Result, {**to_json(RESULT), **change})
