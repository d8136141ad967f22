"""The dataclasses of the model are the JSON schema of records."""

import json
from typing import get_args

import pytest

from pytest_aiperf.correctness.accuracy import ERROR_BUDGETS
from pytest_aiperf.model import Against, AgainstName, Metric, MetricName, PrecisionName, Result
from pytest_aiperf.schema import from_json, to_json
from tests.plugin.records import result, timing


def test_a_result_survives_strict_json():
    text = json.dumps(to_json(result()), allow_nan=False)
    assert from_json(Result, json.loads(text)) == result()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verdict": "BEST"}, "Result.verdict: 'BEST' is not one of FASTER"),
        ({"seed": "7"}, "Result.seed: int is needed"),
        ({"seed": True}, "Result.seed: int is needed"),
        ({"speedup": {"low": 1, "value": 2}}, "Result.speedup: high is missing"),
        ({"extra": 1}, "unknown extra"),
        ({"floor": 10**400}, "Result.floor: 1000"),
        ({"work": []}, "Result.work: a mapping is needed"),
        ({"timing": {**to_json(timing()), "better": "bigger"}}, "'bigger' is not one of"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        from_json(Result, {**to_json(result()), **change})


@pytest.mark.parametrize(
    ("words", "known"),
    [(MetricName, Metric), (AgainstName, Against), (PrecisionName, ERROR_BUDGETS)],
)
def test_type_checkers_and_compare_know_the_same_words(words, known):
    assert get_args(words) == tuple(known)
