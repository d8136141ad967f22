"""The nouns are the JSON schema: they survive the journey, and nothing else gets in."""

import json

import pytest

from pytest_aiperf.model import Result
from pytest_aiperf.schema import from_json, to_json
from tests.plugin.records import result, timing


def test_a_result_survives_strict_json():
    text = json.dumps(to_json(result()), allow_nan=False)
    assert from_json(Result, json.loads(text)) == result()


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
        ({"timing": {**to_json(timing()), "better": "bigger"}}, "'bigger' is none of"),
    ],
)
def test_what_does_not_fit_is_named(change, says):
    with pytest.raises(ValueError, match=says):
        from_json(Result, {**to_json(result()), **change})
