"""expectations.yaml is read strictly, and an update changes only measured figures."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import (
    Expectation,
    Finding,
    Interval,
    Limit,
    Outcome,
    Recorded,
    Require,
    Verdict,
)
from pytest_aiperf.records import expectations, yaml_file
from pytest_aiperf.records.expectations import (
    ClaimEntry,
    acceptable,
    is_claim_id,
    load,
    propose_update,
    stack_line,
)
from pytest_aiperf.rules.evidence import counter, launches
from tests.plugin.records import H200, HOST, STACK, result, timing

TODAY = date(2026, 11, 22)
LINE = "torch 2.11.0, CUDA 13.0, driver 580.159"

GOLDEN = """\
# header, mine

schema: 1   # the version

claims:
  # about copying
  ch07/copy[vector]:   # odd   spacing
      require:   {speedup:   1.5, library: 0.990}     # mine
      h200: {speedup: [1.95, 1.97, 1.990], share: 0.86, runs: 3, code: 1a2b3c4d5e6f, ENDS # note
      # b200: waiting for hardware

  'ch07/tile':
    require:
        speedup: 1.50


    sm90: {speedup: [1.1, 1.2, 1.3],   # wrapped
           runs: 1, code: 'a', stack: b, recorded: '2026-01-01'}
    h200:
      speedup:   # a list
        - 1.10
        - 1.2
        - 1.3
      runs: 7          # counted
      code: "c0de"
      stack: "STACK"
      recorded: "2026-01-01"
    # tail of tile
  "ch09/chain": {require: {speedup: 2}}
  ch09/limit: {require: {share: 0.85}}
# end
""".replace("ENDS", f'stack: "{LINE}", recorded: "2026-11-21"}}').replace("STACK", LINE)

ENTRY = '{speedup: [1.1, 1.2, 1.3], runs: 1, code: a, stack: b, recorded: "2026-01-01"}'


@pytest.fixture
def path(tmp_path):
    return tmp_path / "expectations.yaml"


@pytest.fixture(params=["C", "Python"])
def either_loader(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)


def changed_lines(before, after):
    assert len(before.splitlines()) == len(after.splitlines())
    return [
        (old, new)
        for old, new in zip(before.splitlines(), after.splitlines(), strict=True)
        if old != new
    ]


# reading the file


def test_reads_everything(path, either_loader):
    path.write_text(GOLDEN)
    loaded = load(path)
    assert list(loaded.claims) == ["ch07/copy[vector]", "ch07/tile", "ch09/chain", "ch09/limit"]
    assert loaded.claims["ch09/limit"].require == Require(share=0.85)
    assert loaded.claims["ch07/copy[vector]"] == ClaimEntry(
        Require(1.5, 0.99),
        recorded={
            "h200": Recorded((1.95, 1.97, 1.99), 3, "1a2b3c4d5e6f", LINE, "2026-11-21", 0.86)
        },
    )
    assert loaded.claims["ch09/chain"] == ClaimEntry(Require(speedup=2))


def test_missing_file_expects_nothing(path):
    loaded = load(path)
    assert loaded.claims == {}
    assert loaded.lookup("a/b", "h200", "sm90", "c") == Expectation()


def test_lookup_prefers_the_gpu_then_its_architecture(path):
    path.write_text(GOLDEN)
    loaded = load(path)
    exact = loaded.lookup("ch07/tile", "h200", "sm90", "c0de")
    assert (exact.key, exact.stale, exact.require) == ("h200", False, Require(speedup=1.5))
    fallback = loaded.lookup("ch07/tile", "h100", "sm90", "changed")
    assert (fallback.key, fallback.stale) == ("sm90", True)
    assert loaded.lookup("ch07/tile", "b200", "sm100", "a").recorded is None
    assert loaded.lookup("ch07/tile", "2xh200", "sm90", "a").recorded is None, "other machine"
    assert loaded.lookup("ch07/tile", "cpu", "sm90", "a") == Expectation(Require(speedup=1.5))


def test_a_host_is_never_expected_to_reach_a_recorded_figure(path):
    path.write_text(f"schema: 1\nclaims:\n  a/b:\n    require: {{speedup: 1}}\n    cpu: {ENTRY}\n")
    assert list(load(path).claims["a/b"].recorded) == ["cpu"]
    assert load(path).lookup("a/b", "cpu", "", "a") == Expectation(Require(speedup=1.0))


def test_a_gpu_or_an_architecture_may_have_a_requirement_of_its_own(path):
    path.write_text(
        "schema: 1\nclaims:\n"
        "  a/b: {require: {speedup: 2, share: 0.5, h100: {speedup: 1.5}, sm100: {library: 1}}}\n"
    )
    loaded = load(path)
    assert loaded.lookup("a/b", "h200", "sm90", "").require == Require(speedup=2, share=0.5)
    assert loaded.lookup("a/b", "h100", "sm90", "").require == Require(speedup=1.5, share=0.5)
    assert loaded.lookup("a/b", "b200", "sm100", "").require == Require(2, 1, 0.5)


@pytest.mark.parametrize(
    ("key", "arch", "expected"),
    [
        ("h200", "sm90", Require(2, 1, 0.5)),
        ("8xh200", "sm90", Require(2, 1, 0.5)),  # a claim that was recorded on two of them
        ("h100", "sm90", Require(1.5, 1, 0.5)),
        ("rtx4090", "sm89", Require()),  # has to be FASTER only
        ("cpu", "", Require(2, 1, 0.5)),
    ],
)
def test_requirements_count_on_the_gpus_that_the_entry_names(path, key, arch, expected):
    require = "{speedup: 2, library: 1, share: 0.5, h100: {speedup: 1.5}}"
    path.write_text(
        f"schema: 1\nclaims:\n  a/b: {{require: {require}, 2xh200: {ENTRY}}}\n"
        f"  a/c: {{require: {{speedup: 0.98, share: 0.5}}, h200: {ENTRY}}}\n"
    )
    loaded = load(path)
    assert loaded.lookup("a/b", key, arch, "").require == expected
    assert loaded.required("a/b", "rtx4090", "sm89") == Require(2, 1, 0.5)
    assert loaded.lookup("a/c", "b200", "sm100", "").require == Require(0.98), "SAME is enough"


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ("h100: {sped: 1}", "require.h100: unknown sped"),
        ("h100: {speedup: 0}", "require.h100.speedup: must be above 0"),
        ("H 100: {speedup: 1}", "'H 100' is not a GPU such as h100"),
        ("librari: {speedup: 1}", "require.librari: library is one number"),
        ("speedup: {h100: 1.2}", "require.speedup: speedup is one number"),
    ],
)
def test_a_wrong_requirement_of_a_gpu_is_refused(path, special, message):
    path.write_text(f"schema: 1\nclaims: {{a/b: {{require: {{{special}}}}}}}\n")
    with pytest.raises(UsageError, match=re.escape(message)):
        load(path)


def test_several_gpus_fall_back_to_as_many(path):
    path.write_text(f"schema: 1\nclaims:\n  a/b:\n    2xsm90: {ENTRY}\n")
    assert load(path).lookup("a/b", "2xh200", "sm90", "a").key == "2xsm90"


def entry(**changes):
    fields = {
        "speedup": "[1.1, 1.2, 1.3]",
        "runs": "1",
        "code": "a",
        "stack": "b",
        "recorded": '"2026-01-01"',
    }
    fields |= changes
    inner = ", ".join(f"{k}: {v}" for k, v in fields.items() if v is not None)
    return f"schema: 1\nclaims:\n  a/b:\n    h200: {{{inner}}}\n"


def require(text):
    return f"schema: 1\nclaims:\n  a/b:\n    require: {text}\n"


TRAPS = {
    "duplicate claim": ("schema: 1\nclaims:\n  a/b: {}\n  a/b: {}\n", 4, "occurs twice"),
    "duplicate field": (require("{speedup: 1, speedup: 2}"), 4, "occurs twice"),
    "duplicate schema": ("schema: 1\nclaims: {}\nschema: 1\n", 3, "occurs twice"),
    "tag": (require('{speedup: !!python/object/apply:os.system ["x"]}'), 4, "the tag"),
    "local tag": (require("{speedup: !x 1}"), 4, "the tag '!x' is refused"),
    "bare tag": (require("{speedup: ! 1}"), 4, "the tag '!' is refused"),
    "standard tag": (require("{speedup: !!float 1}"), 4, "the tag"),
    "anchor": (require("&a {speedup: 1}"), 4, "anchors and aliases"),
    "alias": ("schema: 1\nclaims:\n  a/b: *a\n", 3, "alias"),
    "merge": (require("{<<: {speedup: 1}}"), 4, "not '<<'"),
    "nan": (require("{speedup: .nan}"), 4, "a number such as 1.5"),
    "inf": (require("{speedup: .inf}"), 4, "a number such as 1.5"),
    "-inf": (entry(speedup="[-.inf, 1, 2]"), 4, "a number"),
    "no": (require("{speedup: no}"), 4, "not 'no'"),
    "true": (require("{speedup: true}"), 4, "not 'true'"),
    "quoted number": (require('{speedup: "1.5"}'), 4, "float is needed, not '1.5'"),
    "octal": (require("{speedup: 012}"), 4, "a number"),
    "hexadecimal": (require("{speedup: 0x1F}"), 4, "a number"),
    "sexagesimal": (require("{speedup: 1:30}"), 4, "a number"),
    "underscore": (require("{speedup: 1_000}"), 4, "a number"),
    "exponent": (require("{speedup: 1e3}"), 4, "float is needed, not '1e3'"),
    "other digits": (require("{speedup: \u0661}"), 4, "float is needed"),
    "null": (require("{speedup: null}"), 4, "a number"),
    "nothing": (require("{speedup: }"), 4, "the value is missing"),
    "list for number": (require("{speedup: [1]}"), 4, "float is needed, not [1]"),
    "zero": (require("{speedup: 0}"), 4, "above 0"),
    "negative": (require("{speedup: -1.5}"), 4, "above 0"),
    "huge": (require("{speedup: " + "9" * 400 + "}"), 4, "a number"),
    "ten digits": (require("{speedup: " + "9" * 10 + "}"), 4, "at most 1e+09"),
    "percent": (require("{share: 85}"), 4, "at most 2"),
    "unknown requirement": (
        require("{speed: 1}"),
        4,
        "unknown speed (known: speedup, library, share)",
    ),
    "require list": (require("[1.5]"), 4, "a mapping is needed, not [1.5]"),
    "require empty": (require(""), 4, "the value is missing"),
    "order": (entry(speedup="[1.3, 1.2, 1.1]"), 4, "must ascend"),
    "two limits": (entry(speedup="[1.1, 1.2]"), 4, "3 values are needed, not 2"),
    "one figure": (entry(speedup="1.2"), 4, "a list is needed"),
    "zero limit": (entry(speedup="[0, 1.2, 1.3]"), 4, "above 0"),
    "zero share": (entry(share="0"), 4, "above 0"),
    "empty share": (entry(share=""), 4, "the value is missing"),
    "runs float": (entry(runs="1.0"), 4, "int is needed"),
    "runs bool": (entry(runs="yes"), 4, "not 'yes'"),
    "runs zero": (entry(runs="0"), 4, "above 0"),
    "code number": (entry(code="123456789012"), 4, "str is needed, not 123456789012"),
    "code no": (entry(code="no"), 4, "quote it"),
    "code null": (entry(code="~"), 4, "quote it"),
    "code empty": (entry(code='""'), 4, "printable"),
    "code list": (entry(code="[a]"), 4, "str is needed, not ['a']"),
    "control": (entry(stack='"a\\eb"'), 4, "printable"),
    "surrogate": (entry(stack='"\\ud800"'), 4, ""),
    "long": (entry(stack="x" * 501), 4, "printable"),
    "date unquoted": (entry(recorded="2026-01-01"), 4, "quote it"),
    "date slip": (entry(recorded='"2026711-22"'), 4, "a day is needed, such as 2026-01-31"),
    "date compact": (entry(recorded='"20260122"'), 4, "a day is needed"),
    "date of no day": (entry(recorded='"2026-02-30"'), 4, "a day is needed"),
    "date of a week": (entry(recorded='"2026-W05-3"'), 4, "a day is needed"),
    "missing field": (entry(code=None), 4, "code is missing"),
    "unknown field": (entry(noise="1"), 4, "unknown noise"),
    "misspelt require": (
        "schema: 1\nclaims:\n  a/b:\n    requires: {speedup: 2}\n",
        4,
        "did you mean require?",
    ),
    "unknown top": ("schema: 1\nclaims: {}\nextra: 1\n", 1, "unknown extra"),
    "no schema": ("claims: {}\n", 1, "schema is missing; begin the file with `schema: 1`"),
    "no claims": ("# x\nschema: 1\n", 2, "claims is missing"),
    "schema 0": ("schema: 0\nclaims: {}\n", 1, "must be 1"),
    "schema text": ('schema: "1"\nclaims: {}\n', 1, "int is needed, not '1'"),
    "schema bool": ("schema: true\nclaims: {}\n", 1, "not 'true'"),
    "newer": ("schema: 2\nverdicts: {}\n", 1, "written by a newer pytest-aiperf (schema 2); upgr"),
    "claims empty": ("schema: 1\nclaims:\n", 2, "the value is missing"),
    "claim empty": ("schema: 1\nclaims:\n  a/b:\n", 3, "the value is missing"),
    "claim id": ("schema: 1\nclaims:\n  padded: {}\n", 3, "is not folder/name[param]"),
    "claim control": ('schema: 1\nclaims:\n  "a/b[\\x07]": {}\n', 3, "printable"),
    "claim number": ("schema: 1\nclaims:\n  12: {}\n", 3, "quote it"),
    "complex key": ("schema: 1\nclaims:\n  ? [a]\n  : {}\n", 3, "a name"),
    "gpu": ("schema: 1\nclaims:\n  a/b:\n    H 200: {}\n", 4, "is not a GPU such as h200"),
    "bound on a GPU": (
        "schema: 1\nclaims:\n  a/b:\n    h200: {speedup: 1}\n",
        4,
        "to require figures on h200, write require: {h200: {...}}",
    ),
    "sm_90": (
        "schema: 1\nclaims:\n  a/b:\n    require: {sm_90: {speedup: 1}}\n",
        4,
        "'sm_90' is not a GPU such as h100 or sm90",
    ),
    "requires": ("schema: 1\nclaims:\n  a/b:\n    requires: {speedup: 1}\n", 4, "did you mean"),
    "byte order mark": ("\ufeffschema: 1\nclaims: {}\n", 1, "is not allowed"),
    "block text": ("schema: 1\nclaims:\n  a/b: |\n    x\n", 3, "block text"),
    "list": ("- 1\n", 1, "a mapping is needed, not [1]"),
    "two documents": ("schema: 1\nclaims: {}\n---\nschema: 1\n", 3, "another document"),
    "empty": ("", 1, "is empty"),
    "only a comment": ("# nothing\n", 1, "is empty"),
    "deep": (f"schema: 1\nclaims: {'[' * 30}{']' * 30}\n", 2, "nested too deeply"),
    "very deep": (f"schema: 1\nclaims: {'[' * 20000}\n", 2, ""),
    "tab": ("schema: 1\nclaims:\n\ta/b: {}\n", 3, "not YAML"),
    "NUL": ("schema: 1\nclaims: {}\n\0", 3, "is not allowed"),
    "directive": (f"%YAML {'1' * 5000}.1\n---\nschema: 1\n", 1, ""),
    "escape": (entry(stack='"\\UFFFFFFFF"'), 4, ""),
    "torn quote": (entry()[:-20], 4, "not YAML"),
    "torn brace": (entry()[:-2], 4, "not YAML"),
    "torn name": ("schema: 1\nclaims:\n  a/b: {}\n  a/", 4, "not YAML"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_is_refused_at_its_line(trap, path, either_loader):
    text, line, message = TRAPS[trap]
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load(path)
    where = str(caught.value).removeprefix(str(path))
    assert where.startswith(f":{line}:") or not message, where
    assert message in where
    assert "\n" not in where


def test_a_file_of_too_many_values_is_refused(path, monkeypatch):
    monkeypatch.setattr(yaml_file, "MAX_NODES", 20)
    path.write_text(f"schema: 1\nclaims: [{'1, ' * 20}]\n")
    with pytest.raises(UsageError, match=r"yaml:2:\d+: nested too deeply or too long"):
        load(path)


def test_column_is_that_of_the_value(path):
    path.write_text(require("{speedup: no}"))
    with pytest.raises(
        UsageError, match=r"expectations\.yaml:4:24: claims\.a/b\.require\.speedup: "
    ):
        load(path)


def test_not_utf8_is_refused_at_its_place(path):
    path.write_bytes(b"schema: 1\nclaims: {}\n# \xff\n")
    with pytest.raises(UsageError, match=r"yaml:3:3: is not UTF-8"):
        load(path)


def test_large_files_and_folders_are_refused(path):
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        load(path)
    with pytest.raises(UsageError, match="is not a file"):
        load(path.parent)


def test_reading_imports_no_yaml_until_there_is_a_file(tmp_path):
    code = (
        "import sys, pathlib; from pytest_aiperf.records import expectations as e;"
        "e.load(pathlib.Path('missing.yaml')); assert 'yaml' not in sys.modules"
    )
    env = os.environ | {"PYTHONPATH": str(Path(expectations.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=env)


TOKENS = "{ } [ ] ' \" # , - ? ! &a *a !!int << 1 no : | --- ... %YAML \\U0011ffff"
LINES = f"schema: 1\nclaims:\n  a/b:\n    require: {{speedup: 1}}\n    h200: {ENTRY}\n"
BLANKS = " \n\t\r\0\x85\u2028\ufeff"
PIECES = st.sampled_from([*TOKENS.split(), *LINES.splitlines(keepends=True), *BLANKS, ": "])


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.lists(PIECES, max_size=12).map("".join), st.text(max_size=60)))
def test_fuzz_reads_or_refuses(tmp_path_factory, text):
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(UsageError):
        load(file)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOLDEN)), st.integers(0, 3), st.characters())
def test_fuzz_damage_never_gets_past_an_update(tmp_path_factory, at, cut, new):
    file = tmp_path_factory.getbasetemp() / "damaged.yaml"
    text = GOLDEN[:at] + new + GOLDEN[at + cut :]
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        update = propose_update(file, [result(), result("ch08/new"), result("ch07/tile")], TODAY)
    except UsageError:
        return
    file.write_bytes((update.after or "").encode())
    load(file)


def test_claim_ids():
    assert is_claim_id("ch06/bank_conflicts[padded]")
    assert is_claim_id("ch06/deep/copy[1024-bf16/x y]")
    bad = [
        "",
        "copy",
        "/copy",
        "a/",
        "a b/c",
        "a/b[",
        "a/b[]",
        "a/b[x]y",
        "a/b[\n]",
        "a/" + "b" * 500,
    ]
    assert [name for name in bad if is_claim_id(name)] == []


def test_stack_line():
    assert stack_line(STACK) == LINE
    assert stack_line({"driver": "580", "torch": "2"}) == "torch 2, driver 580"
    assert stack_line({"python": "3.12", "numpy": "2"}) == "numpy 2, python 3.12"
    assert stack_line({}) == "unknown"
    host = {"processor": "X, 2 logical CPUs", "triton": "3", "numpy": "2.4", "python": "3.12"}
    assert stack_line(host) == "Python 3.12, NumPy 2.4, processor X, 2 logical CPUs"


# which results are accepted


REFUSALS = {
    "id": ({"claim": "nowhere"}, "folder/name"),
    "invalid": ({"outcome": Outcome.INVALID, "message": "throttled"}, "INVALID: throttled"),
    "error": ({"outcome": Outcome.ERROR}, "ERROR"),
    "skipped": ({"outcome": Outcome.SKIPPED}, "SKIPPED"),
    "not run": ({"outcome": Outcome.NOT_RUN}, "NOT_RUN"),
    "host claim on a GPU": (HOST | {"gpu": H200}, "its GPU 'h200'"),
    "host claim with a GPU's key": (HOST | {"key": "h200"}, "its key is 'h200'"),
    "unknown host": (HOST | {"stack": {"python": "3.12"}}, "does not name the processor"),
    "noisy host": (HOST | {"floor": 0.21}, "differ by 21.0% (at most 20 %)"),
    "slow host": (HOST | {"speedup": Interval(0.8, 0.81, 0.82)}, "SLOWER where"),
    "cpu without a host claim": ({"key": "cpu", "gpu": None}, "its GPU ''"),
    "quick": ({"quick": True}, "--quick"),
    "reproducible": ({"conditions": {"reproducible": "seed 0"}}, "--reproducible"),
    "unchecked": ({"unchecked": ("a clock", "b")}, "not checked: a clock; b"),
    "no gpu": ({"gpu": None}, "its GPU"),
    "other gpu": ({"key": "b200"}, "its GPU"),
    "no code": ({"code": ""}, "code hash"),
    "odd code": ({"code": 'a"\n'}, "code hash"),
    "odd stack": ({"stack": {"torch": "2\n"}}, "stack"),
    "no figure": ({"speedup": None}, "no speedup"),
    "one replicate": ({"speedup": Interval(0.0, 2.0, float("inf"))}, "no speedup"),
    "disorder": ({"speedup": Interval(2.0, 1.0, 3.0)}, "no speedup"),
    "nan": ({"speedup": Interval(2.0, float("nan"), 3.0)}, "no speedup"),
    "inconclusive": ({"speedup": Interval(0.9, 1.2, 1.5)}, "INCONCLUSIVE"),
    "noisy": ({"floor": 0.03}, "differ by 3.0% (at most 2 %)"),
    "noise unknown": ({"floor": float("nan")}, "noisy"),
    "parity": ({"speedup": Interval(0.99, 1.0, 1.01), "verdict": Verdict.SAME}, "SAME where"),
    "slower": ({"speedup": Interval(0.8, 0.81, 0.82), "verdict": Verdict.SLOWER}, "SLOWER where"),
}


def test_a_cold_start_is_accepted_and_says_why(path):
    accepted = propose_update(path, [result(conditions={"cold-start": "x"})], TODAY)
    [line] = accepted.lines()
    assert line.endswith(" (--cold-start does not change the times of calls)")


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize("outcome", [Outcome.PASSED, Outcome.FAILED])
def test_each_refusal_leaves_the_file_alone(kind, outcome, path):
    changes, message = REFUSALS[kind]
    path.write_text(GOLDEN)
    poisoned = result(**({"claim": "ch08/new", "outcome": outcome} | changes))
    update = propose_update(path, [poisoned], TODAY)
    assert (update.accepted, [r for r, _ in update.refused]) == ((), [poisoned])
    assert message in update.refused[0][1]
    assert update.diff() == ""
    update.write(path.parent / "results")
    assert not (path.parent / "results").exists()
    assert path.read_text() == GOLDEN


def test_a_good_result_is_acceptable():
    assert acceptable(result(), Expectation()) is None
    assert acceptable(result(key="2xh200"), Expectation()) is None


def test_a_host_claim_is_recorded_with_its_processor(path):
    path.write_text("schema: 1\nclaims:\n  a/b:\n    require: {speedup: 1.5}\n")
    noisy = result("a/b", **HOST, floor=0.1)
    again = dataclasses.replace(noisy, run="r2")
    moved = dataclasses.replace(noisy, run="r3", stack=OTHER)
    for runs, host in ((1, noisy), (2, again), (1, moved)):
        propose_update(path, [host], TODAY).write(path.parent / "results")
        entry = load(path).claims["a/b"].recorded["cpu"]
        assert (entry.speedup, entry.runs) == ((2.0, 2.011, 2.023), runs)
        assert entry.stack == f"Python 3.12, torch 2.11.0, processor {host.stack['processor']}"
    assert [file.name for file in (path.parent / "results").iterdir()] == ["cpu.json"]
    assert load(path).claims["a/b"].require == Require(speedup=1.5)


OTHER = HOST["stack"] | {"processor": "Xeon 8480C, 16 logical CPUs"}


@pytest.mark.parametrize(
    ("before", "lowest"), [((1.9, None), 1.9), ((1.9, 1.8), 1.8), ((2.1, None), None)]
)
def test_the_lowest_estimate_of_runs_of_the_same_code_is_kept(before, lowest):
    new = result()
    old = Recorded(
        (before[0],) * 3, 3, new.code, stack_line(new.stack), "2026-11-21", 0.86, before[1]
    )
    entry = expectations._entry(new, old, TODAY)
    assert (entry.runs, entry.lowest) == (4, lowest)
    changed = dataclasses.replace(old, code="changed")
    assert expectations._entry(new, changed, TODAY).lowest is None


def test_a_failed_result_is_judged_by_the_requirements_only():
    was = Recorded((1.95, 1.97, 1.99), 3, "1a2b3c4d5e6f", LINE, "2026-11-21")
    slower = result(outcome=Outcome.FAILED, speedup=Interval(1.6, 1.61, 1.62))
    assert acceptable(slower, Expectation(Require(speedup=1.5), was, "h200")) is None
    held = acceptable(slower, Expectation(Require(speedup=1.7), was, "h200"))
    assert held is not None
    assert "below the 1.7x that" in held
    assert acceptable(slower, Expectation(Require(library=1.2), was, "h200")) is not None


def test_a_failed_result_must_reach_the_required_share():
    limits = {"optimized": Limit("copy", 4.2e12, 4.9e12, "B/s", 4.2 / 4.9)}
    failed = result(outcome=Outcome.FAILED, limits=limits, timing=timing())
    assert acceptable(failed, Expectation(Require(share=0.85))) is None
    assert "is below the 88% that" in acceptable(failed, Expectation(Require(share=0.88)))


def test_a_result_that_was_wrong_in_a_timed_block_is_refused():
    wrong = result(outcome=Outcome.FAILED, verdict=None, message="out[1] is 0, expected 1")
    why = acceptable(wrong, Expectation())
    assert why == "it failed before it was judged: out[1] is 0, expected 1"


def test_a_failed_result_passes_once_its_figure_is_recorded(path):
    path.write_text(GOLDEN)
    lost = result(claim="ch08/new", outcome=Outcome.FAILED, message="it has dropped")
    (accepted,) = propose_update(path, [lost], TODAY).accepted
    passed = dataclasses.replace(lost, outcome=Outcome.PASSED, message="")
    assert accepted == dataclasses.replace(passed, expectation=accepted.expectation)
    assert accepted.expectation.require == Require()


def test_a_passed_result_is_accepted_unchanged(path):
    passed = result(message="a note")
    assert propose_update(path, [passed], TODAY).accepted == (passed,)


def test_a_refused_result_is_named_with_its_gpu_if_it_has_one(path):
    path.write_text(GOLDEN)
    here, nowhere = result(outcome=Outcome.SKIPPED), result(outcome=Outcome.NOT_RUN, key="")
    names = [
        propose_update(path, [refused], TODAY).lines()[0].partition(":")[0]
        for refused in (here, nowhere)
    ]
    assert names == [f"refused {here.claim} on h200", f"refused {here.claim}"]


def test_a_faster_arm_without_its_evidence_is_not_acceptable():
    piece = launches(max=0.9, per="baseline")
    proven, unmet = Finding(piece, 0.5, held=True), Finding(piece, 0.95, held=False)
    assert acceptable(result(evidence=(proven,)), Expectation()) is None
    why = acceptable(result(outcome=Outcome.FAILED, evidence=(proven, unmet)), Expectation())
    assert "0.95" in why
    assert "the claim states at most 0.9" in why
    unseen = Finding(counter("dram__bytes.sum", max=1), where="the driver reserves counters")
    assert acceptable(result(evidence=(proven, unseen)), Expectation()) == (
        "evidence was not looked at: counter dram__bytes.sum (the driver reserves counters)"
    )


def test_parity_is_acceptable_where_it_was_recorded_or_required():
    same = result(speedup=Interval(0.992, 0.995, 0.998), verdict=Verdict.SAME)
    faster = Recorded((1.95, 1.97, 1.99), 3, "c", LINE, "2026-11-21")
    parity = Recorded((0.995, 1.0, 1.005), 3, "c", LINE, "2026-11-21")
    assert acceptable(same, Expectation(recorded=faster)) is not None
    assert acceptable(same, Expectation(recorded=parity)) is None
    assert acceptable(same, Expectation(Require(speedup=0.98))) is None


def test_of_two_results_the_later_counts(path):
    early = result(started="2025-03-04T05:00:00+00:00")
    late = result(speedup=Interval(1.7, 1.8, 1.9))
    update = propose_update(path, [late, early], TODAY)
    assert update.accepted == (late,)
    assert "a later result" in update.refused[0][1]


def test_each_result_has_one_line(path):
    bad = result("ch08/x", outcome=Outcome.ERROR, message="first\x1b[31m\nsecond")
    assert propose_update(path, [result(), bad], TODAY).lines() == [
        "accepted ch07/copy[vector] on h200: 2.011x [2.000, 2.022]",
        "refused ch08/x on h200: it ended ERROR: first?[31m",
    ]


# writing the file


def body(code="1a2b3c4d5e6f"):
    return (
        f'{{speedup: [2.0, 2.011, 2.023], runs: 1, code: "{code}", '
        f'stack: "{LINE}", recorded: "2026-11-22"}}'
    )


def test_only_the_measured_figures_change(path, either_loader):
    path.write_text(GOLDEN)
    propose_update(path, [result()], TODAY).write()
    [(old, new)] = changed_lines(GOLDEN, path.read_text())
    assert old.startswith("      h200: {speedup: [1.95")
    entry = body().replace("runs: 1", "runs: 4").replace("}", ", lowest: 1.97}")
    assert new == f"      h200: {entry} # note"
    assert load(path).claims["ch07/copy[vector]"].require == Require(1.5, 0.99)


BESIDE = "ch01/beside"


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        # an entry in YAML block style, a braced entry of several lines, one inside a claim's braces
        (result("ch07/tile", key="h200"), 20),
        (result("ch07/tile", key="sm90", gpu=dataclasses.replace(H200, key="sm90")), 17),
        (result("ch09/chain"), 29),
    ],
)
def test_an_entry_in_a_layout_of_its_own_is_refused_and_the_others_are_written(
    odd, line, path, either_loader
):
    path.write_text(GOLDEN)
    update = propose_update(path, [odd, result(BESIDE)], TODAY).write()
    [(refused, why)] = update.refused
    assert refused is odd
    advice = f"this layout cannot be updated; write `{odd.key}: {{...}}` on one line"
    assert f"expectations.yaml:{line}: {advice}" in why
    beside = f"  {BESIDE}:\n    h200: {body()}\n"
    assert path.read_text() == GOLDEN.replace("# end", f"{beside}# end")


def test_new_entries_are_added_in_place(path, either_loader):
    path.write_text(GOLDEN)
    fresh = [
        result("ch08/new[a b: #c]"),
        result("ch99/last"),
        result("ch01/first"),
        result("ch07/tile", key="2xh200"),
        result("ch07/copy[vector]", key="2xh200"),
    ]
    propose_update(path, fresh, TODAY).write()
    after = path.read_text().splitlines()
    old = GOLDEN.splitlines()
    added = [line for line in after if line not in old]
    assert added == [
        f"      2xh200: {body()}",
        f"    2xh200: {body()}",
        '  "ch08/new[a b: #c]":',
        f"    h200: {body()}",
        "  ch01/first:",
        f"    h200: {body()}",
        "  ch99/last:",
        f"    h200: {body()}",
    ]
    assert [line for line in after if line in old] == old
    assert after.index('  "ch08/new[a b: #c]":') == after.index("    # tail of tile") + 1
    assert after[-1] == "# end"


def test_runs_restart_when_code_or_stack_change(path):
    def runs(**changes):
        propose_update(path, [result(**changes)], TODAY).write()
        return load(path).claims["ch07/copy[vector]"].recorded["h200"].runs

    assert [runs(), runs(), runs(code="b"), runs(code="b")] == [1, 2, 1, 2]
    assert [runs(code="b", stack={"torch": "3"}), runs(code="b", stack={"torch": "3"})] == [1, 2]


def test_a_new_file_explains_who_writes_what(path):
    update = propose_update(
        path, [result("ch06/bank_conflicts[padded]", code="123456789012")], TODAY
    )
    assert update.diff().startswith("--- /dev/null\n+++ ")
    assert update.write() == update
    text = path.read_text()
    assert text.startswith("# What each claim must show. People write `require`;")
    assert text.splitlines()[2:] == [
        "schema: 1",
        "claims:",
        "  ch06/bank_conflicts[padded]:",
        f"    h200: {body('123456789012')}",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "schema: 1\nclaims: {}",
        "schema: 1\r\nclaims: {}   # none yet\r\n# end\r\n",
        "schema: 1\nclaims: {  }\n",
        "schema: 1\nclaims:\n    a/b: {}  # c\n    # d",
        "claims:\n- a\n".replace("- a", "  a/b: {}") + "schema: 1\n...\n",
        "? schema\n: 1\n? claims\n: z/z: {}\n",
        "schema: 1\nclaims:\n  z/z:\n    require: {}\n  # \U0001f600 wide\n  z/y[\U0001f600]: {}\n",
    ],
)
def test_every_layout_takes_a_new_claim(text, path, either_loader):
    path.write_bytes(text.encode())
    propose_update(path, [result(), result("ch99/x")], TODAY).write()
    after = path.read_bytes().decode()
    kept = load(path).claims
    assert {"ch07/copy[vector]", "ch99/x"} <= set(kept)
    assert ("\r\n" in after) is ("\r\n" in text)
    assert after.count("\n") == after.count("\r\n") or "\r\n" not in text
    for comment in ("# none yet", "# end", "# c", "# d", "wide"):
        assert (comment in after) is (comment in text)


@pytest.mark.parametrize("claims", ["{}", '{"a/b[c]": {},}'])
def test_claims_in_braces_are_read_but_not_updated(claims, path, either_loader):
    text = f'{{"schema": 1, "claims": {claims}}}'
    path.write_text(text)
    load(path)
    update = propose_update(path, [result()], TODAY).write()
    assert (update.accepted, update.diff()) == ((), "")
    assert "expectations.yaml:1: this layout cannot be updated" in update.refused[0][1]
    assert path.read_text() == text


def test_an_update_that_would_go_wrong_is_refused(path, monkeypatch):
    path.write_text(GOLDEN)
    monkeypatch.setattr(expectations, "_edited", lambda document, _: document.text)
    with pytest.raises(UsageError, match="cannot be updated in place"):
        propose_update(path, [result()], TODAY)


def test_diff_shows_the_change_only(path):
    path.write_text(GOLDEN)
    diff = propose_update(path, [result()], TODAY).diff().splitlines()
    changed = [line for line in diff if line[0] in "+-"]
    assert len(changed) == 4
    assert changed[2].startswith("-      h200: {speedup: [1.95")


def test_a_damaged_file_is_not_updated(path):
    path.write_text(GOLDEN + "  ch10/x: {\n")
    with pytest.raises(UsageError, match="not YAML"):
        propose_update(path, [result()], TODAY)
    assert path.read_text() == GOLDEN + "  ch10/x: {\n"


def test_an_update_of_a_file_that_changed_meanwhile_is_proposed_again(path):
    path.write_text(GOLDEN)
    first, other = (
        propose_update(path, [result()], TODAY),
        propose_update(path, [result("ch01/other")], TODAY),
    )
    other.write()
    written = first.write()
    assert written.before != first.before
    assert {"ch01/other", "ch07/copy[vector]"} <= set(load(path).claims)
    assert load(path).claims["ch07/copy[vector]"].recorded["h200"].runs == 4


def test_a_requirement_raised_meanwhile_applies(path):
    path.write_text(GOLDEN)
    update = propose_update(path, [result()], TODAY)
    stricter = GOLDEN.replace("speedup:   1.5", "speedup:   9.5")
    path.write_text(stricter)
    written = update.write(path.parent / "results")
    assert not (path.parent / "results").exists()
    assert (written.accepted, len(written.refused)) == ((), 1)
    assert path.read_text() == stricter


def writer(path, name, barrier):
    barrier.wait()
    for i in range(10):
        propose_update(path, [result(f"{name}/claim[{i}]"), result()], TODAY).write()


def test_two_writers_lose_nothing(path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    writers = [context.Process(target=writer, args=(path, n, barrier)) for n in ("ch01", "ch02")]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
        assert process.exitcode == 0
    claims = load(path).claims
    assert len(claims) == 21
    assert claims["ch07/copy[vector]"].recorded["h200"].runs == 20
    assert sorted(p.name for p in path.parent.iterdir()) == [".aiperf", "expectations.yaml"]


def test_a_read_only_file_stays(path):
    path.write_text(GOLDEN)
    path.chmod(0o444)
    with pytest.raises(UsageError, match="is read-only"):
        propose_update(path, [result()], TODAY).write()
    assert path.read_text() == GOLDEN


def test_a_failed_write_leaves_the_old_file_and_no_litter(path, monkeypatch):
    path.write_text(GOLDEN)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(expectations.os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        propose_update(path, [result()], TODAY).write()
    assert path.read_text() == GOLDEN
    assert sorted(p.name for p in path.parent.iterdir()) == [".aiperf", "expectations.yaml"]


def test_results_that_cannot_be_written_stop_the_update(path):
    path.write_text(GOLDEN)
    folder = path.parent / "results"
    folder.write_text("a file is in the way")
    with pytest.raises(UsageError, match=r"cannot write .*results"):
        propose_update(path, [result()], TODAY).write(folder)
    assert path.read_text() == GOLDEN


def test_a_figure_without_spread_lies_within_its_own_record(path):
    bytes_saved = result(speedup=Interval(1.78483, 1.78483, 1.78483))
    path.write_text("schema: 1\nclaims: {}\n")
    propose_update(path, [bytes_saved], TODAY).write()
    recorded = load(path).lookup(bytes_saved.claim, "h200", "sm90", bytes_saved.code).recorded
    assert recorded.speedup == (1.784, 1.785, 1.785)


def test_mode_and_link_survive(path, tmp_path):
    real = tmp_path / "elsewhere.yaml"
    real.write_text(GOLDEN)
    real.chmod(0o640)
    path.symlink_to(real)
    propose_update(path, [result()], TODAY).write()
    assert path.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert "2.023" in real.read_text()


@settings(max_examples=50, deadline=None)
@given(st.floats(0.98, 1e8), st.floats(0, 0.5), st.floats(0, 1))
def test_figures_survive_the_file(tmp_path_factory, value, below, above):
    low, high = value * (1 - below / 2), value * (1 + above)
    entry = expectations._entry(result(speedup=Interval(low, value, high)), None, TODAY)
    file = tmp_path_factory.getbasetemp() / "figures.yaml"
    file.write_text(f"schema: 1\nclaims:\n  a/b:\n    h200: {expectations._flow(entry)}\n")
    assert load(file).claims["a/b"].recorded["h200"] == entry
    assert entry.speedup == pytest.approx((low, value, high), rel=1e-3)
