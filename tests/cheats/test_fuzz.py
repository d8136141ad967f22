"""Whatever is typed, sent or torn is read or refused in a sentence: never a traceback.

2,000 cases a run; ``pytest tests/cheats --hypothesis-profile=long`` tries 100,000, with new
seeds each time.
"""

from __future__ import annotations

import argparse
import json
import re
import string
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_aiperf import options
from pytest_aiperf.building import build
from pytest_aiperf.errors import Misuse
from pytest_aiperf.machine import gpu
from pytest_aiperf.model import Result
from pytest_aiperf.profiling import profile
from pytest_aiperf.records import expectations, journal, plainyaml, results
from pytest_aiperf.rules import guards
from pytest_aiperf.schema import from_json, to_json
from pytest_aiperf.timing import fake
from tests.plugin.records import result
from tests.plugin.test_build import HOSTILE

LONG = settings.get_current_profile_name() == "long"
TARGETS = 8
fuzzed = settings(
    max_examples=(100_000 if LONG else 2_000) // TARGETS,
    derandomize=not LONG,
    deadline=None,  # a machine that is busy is no fault
    database=None,
    suppress_health_check=list(HealthCheck),
)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
RECORD = to_json(result())
WHOLE = json.dumps({"benchmarks": [{"aiperf": RECORD}]})
LINE = json.dumps(RECORD).encode()
UUIDS = ["GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333"]
ASCII = st.text(string.printable, max_size=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@fuzzed
@given(st.data())
def test_results_files(folder, data):
    at, cut = data.draw(st.integers(0, len(WHOLE))), data.draw(st.integers(0, 6))
    damaged = WHOLE[:at] + data.draw(st.text(max_size=3)) + WHOLE[at + cut :]
    other = st.text(max_size=80) | VALUES.map(json.dumps)
    text = data.draw(st.just(damaged) | other)
    path = folder / "results.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(Misuse):
        assert all(type(r) is Result for r in results.read_results(path))


@fuzzed
@given(st.sampled_from(sorted(RECORD)), VALUES)
def test_records(name, value):
    try:
        read = from_json(Result, RECORD | {name: value})
    except ValueError as why:
        said = str(why)
        assert name in said
    else:
        with suppress(ValueError):  # a figure may be no finite one
            results.loads(results.dumps(to_json(read), "x"), "x")


@fuzzed
@given(st.binary(max_size=60), st.integers(0, len(LINE)), st.booleans())
def test_journals(folder, junk, cut, ended):
    path = folder / "journal-main-1.jsonl"
    torn = LINE[:cut] + junk
    path.write_bytes(b"\n" + LINE + b"\n" + torn + b"\n" * ended)
    with suppress(Misuse):
        found, _ = journal.read_journals(folder)
        assert RECORD in [to_json(r) for r in found]


@fuzzed
@given(
    st.text(max_size=80)
    | st.lists(st.sampled_from("{}[]:,-&*!|>'\"#%@ \n\tab1.~<"), max_size=40).map("".join)
)
def test_yaml(folder, text):
    path = folder / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(Misuse):
        if (read := plainyaml.read(path)) is not None:
            plainyaml.parse(path, read)


@fuzzed
@given(st.text(max_size=200) | ASCII, st.text(max_size=200) | ASCII)
def test_ids_and_the_files_named_after_them(folder, one, other):
    for claim in (one, f"../{one}", f"/{one}", f"ch07/{one}[{other}]", f"{one}\0"):
        name = profile.safe(claim)
        assert re.fullmatch(r"[\w.-]{1,120}", name, re.ASCII)
        assert (folder / name).resolve().parent == folder.resolve()
        assert "/" in claim or not expectations.is_claim_id(claim)
    if one != other:
        assert profile.safe(f"a/{one}") != profile.safe(f"a/{other}")


@fuzzed
@given(
    ASCII
    | st.text(max_size=20)
    | st.tuples(st.sampled_from([*HOSTILE, "-O2", "-DA=1", "-lcuda"]), ASCII).map("".join)
)
def test_flags(flag):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "find_nvcc", lambda: ("nvcc", ""))
        try:
            words = build._nvcc("sm_90a", [flag])
        except Misuse as why:
            said = str(why)
            assert repr(flag) in said
        else:
            assert flag in words
            assert re.fullmatch(r"-[\w.+=-]+", flag, re.ASCII)
            assert not re.match(r"-(o|I|L|X|cc|include|odir|run|keep)|--(run|opt|keep|comp)", flag)
    for read in (options._seconds, options._count, options._tool):
        with suppress(ValueError, argparse.ArgumentTypeError):
            read(flag)


@fuzzed
@given(
    st.lists(
        st.sampled_from([*UUIDS, "GPU-b", "0", "1", "2", "3", "-1", "", " ", "MIG-x", "²"])
    ).map(",".join)
    | st.text(max_size=30),
    st.dictionaries(st.text(max_size=20) | st.sampled_from(sorted(guards._ENVIRONMENT)), st.text()),
)
def test_values_of_the_environment(devices, environ):
    with suppress(Misuse):
        chosen = gpu._chosen(devices, UUIDS)
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(UUIDS)
    problem = guards.environment_problem(environ)
    assert problem is None or problem.partition("=")[0] in environ


@fuzzed
@given(
    st.text(max_size=40)
    | st.dictionaries(st.sampled_from(["gpus", "noise", "seed", "faults", "x"]), VALUES).map(
        json.dumps
    )
)
def test_descriptions_of_a_fake_machine(text):
    with suppress(Misuse):
        assert isinstance(fake.machine(text), fake.FakeMachine)


def test_the_cases_are_as_many_as_said():
    tests = [found for name, found in globals().items() if hasattr(found, "hypothesis")]
    assert len(tests) == TARGETS
