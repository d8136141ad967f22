"""Any input, valid or damaged, is read or refused with one sentence, never with a traceback.

2,000 cases per run; ``pytest tests/cheats --hypothesis-profile=long`` tries 100,000 with new seeds.
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
from pytest_aiperf.build import nvcc
from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import nvml
from pytest_aiperf.model import Result
from pytest_aiperf.profilers import capture
from pytest_aiperf.records import expectations, journal, results, yaml_file
from pytest_aiperf.rules import validity
from pytest_aiperf.schema import from_json, to_json
from tests import fake_gpu
from tests.plugin.records import result
from tests.plugin.test_nvcc import HOSTILE

LONG = settings.get_current_profile_name() == "long"
TARGETS = 8
fuzzed = settings(
    max_examples=(100_000 if LONG else 2_000) // TARGETS,
    derandomize=not LONG,
    deadline=None,  # examples take longer on a busy machine
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
    start, removed = data.draw(st.integers(0, len(WHOLE))), data.draw(st.integers(0, 6))
    damaged = WHOLE[:start] + data.draw(st.text(max_size=3)) + WHOLE[start + removed :]
    other = st.text(max_size=80) | VALUES.map(json.dumps)
    text = data.draw(st.just(damaged) | other)
    path = folder / "results.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(UsageError):
        assert all(type(r) is Result for r in results.read_results(path))


@fuzzed
@given(st.sampled_from(sorted(RECORD)), VALUES)
def test_records(name, value):
    try:
        read = from_json(Result, RECORD | {name: value})
    except ValueError as error:
        message = str(error)
        assert name in message
    else:
        with suppress(ValueError):  # a value may be infinite or NaN
            results.loads(results.dumps(to_json(read), "x"), "x")


@fuzzed
@given(st.binary(max_size=60), st.integers(0, len(LINE)), st.booleans())
def test_journals(folder, junk, cut, ended):
    path = folder / "journal-main-1.jsonl"
    torn = LINE[:cut] + junk
    path.write_bytes(b"\n" + LINE + b"\n" + torn + b"\n" * ended)
    with suppress(UsageError):
        records, _ = journal.read_journals(folder)
        assert RECORD in [to_json(r) for r in records]


@fuzzed
@given(
    st.text(max_size=80)
    | st.lists(st.sampled_from("{}[]:,-&*!|>'\"#%@ \n\tab1.~<"), max_size=40).map("".join)
)
def test_yaml(folder, text):
    path = folder / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(UsageError):
        if (read := yaml_file.read(path)) is not None:
            yaml_file.parse(path, read)


@fuzzed
@given(st.text(max_size=200) | ASCII, st.text(max_size=200) | ASCII)
def test_ids_and_the_files_named_after_them(folder, first, second):
    for claim in (first, f"../{first}", f"/{first}", f"ch07/{first}[{second}]", f"{first}\0"):
        name = capture.folder_name(claim)
        assert re.fullmatch(r"[\w.-]{1,120}", name, re.ASCII)
        assert (folder / name).resolve().parent == folder.resolve()
        assert "/" in claim or not expectations.is_claim_id(claim)
    if first != second:
        assert capture.folder_name(f"a/{first}") != capture.folder_name(f"a/{second}")


@fuzzed
@given(
    ASCII
    | st.text(max_size=20)
    | st.tuples(st.sampled_from([*HOSTILE, "-O2", "-DA=1", "-lcuda"]), ASCII).map("".join)
)
def test_flags(flag):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvcc, "find_nvcc", lambda: ("nvcc", ""))
        try:
            words = nvcc._nvcc("sm_90a", [flag])
        except UsageError as error:
            message = str(error)
            assert repr(flag) in message
        else:
            assert flag in words
            # -I takes any folder: nvcc reads headers there, and neither runs nor writes anything
            assert flag.startswith("-I") or re.fullmatch(r"-[\w.+=-]+", flag, re.ASCII)
            assert not re.match(r"-(o|L|X|cc|include|odir|run|keep)|--(run|opt|keep|comp)", flag)
    for read in (options._seconds, options._count, options._tool):
        with suppress(ValueError, argparse.ArgumentTypeError):
            read(flag)


@fuzzed
@given(
    st.lists(
        st.sampled_from([*UUIDS, "GPU-b", "0", "1", "2", "3", "-1", "", " ", "MIG-x", "²"])
    ).map(",".join)
    | st.text(max_size=30),
    st.dictionaries(
        st.text(max_size=20) | st.sampled_from(sorted(validity._ENVIRONMENT)), st.text()
    ),
)
def test_values_of_the_environment(devices, environ):
    with suppress(UsageError):
        selected = nvml._select(devices, UUIDS)
        assert len(set(selected)) == len(selected)
        assert set(selected) <= set(UUIDS)
    problem = validity.environment_problem(environ)
    assert problem is None or problem.partition("=")[0] in environ


@fuzzed
@given(
    st.text(max_size=40)
    | st.dictionaries(st.sampled_from(["gpus", "noise", "seed", "faults", "x"]), VALUES).map(
        json.dumps
    )
)
def test_descriptions_of_a_fake_machine(text):
    with suppress(UsageError):
        assert isinstance(fake_gpu.machine(text), fake_gpu.FakeMachine)


def test_the_number_of_fuzzed_tests():
    tests = [value for value in globals().values() if hasattr(value, "hypothesis")]
    assert len(tests) == TARGETS
