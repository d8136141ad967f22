"""A session is split over several machines, and missing results are named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aiperf.cli import main
from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Outcome
from pytest_aiperf.records import shards
from pytest_aiperf.records.journal import Run, open_run
from pytest_aiperf.records.results import read_results
from pytest_aiperf.schema import to_json
from tests.plugin.records import result

ROOT = Path(__file__).parents[2]
IDS = [f"t.py::test_{i}" for i in range(9)]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/b", "-1/2", "1/2/3"])
def test_a_malformed_shard_is_refused(text):
    with pytest.raises(UsageError, match="not a shard"):
        shards.parse(text)


def test_the_longest_come_first_and_go_to_the_least_loaded():
    seconds = {IDS[0]: 10.0, IDS[1]: 6.0, IDS[2]: 5.0}
    assert shards.split(IDS[:3], seconds, 2) == [{IDS[0]}, {IDS[1], IDS[2]}]


def test_an_unmeasured_test_counts_as_the_median():
    seconds = {IDS[0]: 8.0, IDS[1]: 4.0, IDS[2]: 4.0}
    assert shards.split([*IDS[:3], "new"], seconds, 2) == [{IDS[0], "new"}, {IDS[1], IDS[2]}] or (
        shards.split([*IDS[:3], "new"], seconds, 2) == [{IDS[0], IDS[2]}, {IDS[1], "new"}]
    )


@given(
    st.lists(st.sampled_from(IDS), unique=True),
    st.dictionaries(st.sampled_from(IDS), st.floats(0, 1e4)),
    st.integers(1, 5),
    st.randoms(),
)
def test_each_test_is_in_one_shard_whatever_the_order(ids, seconds, count, random):
    split = shards.split(ids, seconds, count)
    assert len(split) == count
    assert sorted(i for shard in split for i in shard) == sorted(ids)
    shuffled = list(ids)
    random.shuffle(shuffled)
    assert shards.split(shuffled, seconds, count) == split


@given(st.sets(st.text()), st.text(), st.integers(1, 5))
def test_by_its_id_a_test_stays_in_its_shard_when_others_come_or_go(ids, new, count):
    split = shards.split_by_id(ids - {new}, count)
    assert sorted(i for shard in split for i in shard) == sorted(ids - {new})
    more = shards.split_by_id(ids | {new}, count)
    assert [shard - {new} for shard in more] == split


def test_by_their_ids_the_claims_of_the_course_are_split_evenly():
    seconds = shards.recorded_s(ROOT / "results")
    assert len(seconds) > 200
    for shard in shards.split_by_id(seconds, 4):
        assert 0.15 < len(shard) / len(seconds) < 0.35


def test_a_short_item_waits_behind_each_workers_first_long_one():
    assert shards.paired([9, 8, 7, 6, 5, 2, 1], 2) == [9, 1, 8, 2, 7, 6, 5]
    assert shards.paired([9, 8, 7, 6, 5, 2, 1], 14) == [9, 1, 8, 2, 7, 5, 6]
    assert shards.paired([9], 2) == [9]
    assert shards.paired([], 2) == []


CLAIMS = """
@pytest.mark.parametrize("size", "abcd")
def test_it(compare, size):
    compare(**usual)


def test_no_claim(gpu):
    assert gpu.sms
"""


def accepted(project, file="fake", **seconds):
    name = "ch07/test_double.py::test_it"
    records = [
        result(f"ch07/it[{k}]", nodeid=f"{name}[{k}]", seconds=s) for k, s in seconds.items()
    ]
    content = {"benchmarks": [{"name": r.claim, "aiperf": to_json(r)} for r in records]}
    project.write(f"results/{file}.json", json.dumps(content))


def test_shards_measure_everything_once(project, monkeypatch, capsys):
    project.tests(CLAIMS)
    accepted(project, a=9.0, b=1.0, c=1.0, d=1.0)
    measured = []
    for shard in ("1/2", "2/2"):
        ran = project.run("--gpu", "--quick", f"--shard={shard}")
        assert ran.ret == 0
        measured.append(set(project.results()))
    assert measured[0] == {"ch07/it[a]"}
    assert measured[1] == {"ch07/it[b]", "ch07/it[c]", "ch07/it[d]"}
    monkeypatch.chdir(project.path)
    assert main(["complete", ".aiperf"]) == 0
    assert capsys.readouterr().out.endswith("\n4 claims: 4 PASSED\n")


def test_shards_on_different_gpus_measure_everything_once(project):
    project.tests(CLAIMS)
    times = {"fake": {"a": 9.0, "b": 1.0, "c": 1.0, "d": 1.0}, "h100": {"a": 1.0, "d": 90.0}}
    project.write("results/ceilings-h100.json", "{}")
    measured = []
    for shard, (gpu, other) in (("1/2", ("fake", "h100")), ("2/2", ("h100", "fake"))):
        # each machine finds the times of its own GPU under the name of the fake one
        accepted(project, "fake", **times[gpu])
        accepted(project, "h100", **times[other])
        assert project.run("--gpu", "--quick", f"--shard={shard}").ret == 0
        measured += project.results()
    assert sorted(measured) == [f"ch07/it[{k}]" for k in "abcd"]


def test_profiled_shards_do_not_depend_on_recorded_times(project):
    project.tests(CLAIMS)
    listed = []
    for times in ({}, {"a": 9.0, "b": 1.0, "c": 1.0, "d": 1.0}, {"d": 9.0}):
        accepted(project, **times)
        ran = project.run("--profile=nsys", "--shard=1/2", "--collect-only", "-q")
        listed.append(re.findall(r"test_it\[\w\]", ran.stdout.str()))
    assert listed[0]
    assert listed == 3 * listed[:1]


def test_a_shard_that_never_ran_is_reported(project, monkeypatch, capsys):
    project.tests(CLAIMS)
    assert project.run("--gpu", "--quick", "--shard=1/4").ret == 0
    (measured,) = project.results()
    monkeypatch.chdir(project.path)
    assert main(["complete", ".aiperf"]) == 1
    out = capsys.readouterr().out
    assert out.count("no outcome: ch07/it[") == 3
    assert f"no outcome: {measured}\n" not in out
    assert out.endswith("4 claims: 3 NOT_RUN, 1 PASSED\n")


@pytest.mark.parametrize(
    ("broken", "words", "order"),
    [(False, [], "cadb"), (True, [], "abcd"), (False, ["--budget=300s"], "abcd")],
)
def test_workers_measure_the_longest_first_and_a_short_one_behind_it(project, broken, words, order):
    project.tests(CLAIMS)
    accepted(project, a=1.0, b=2.0, c=9.0, d=5.0)
    if broken:
        project.write("results/fake.json", "{")
    ran = project.run("--gpu", "--quick", "-n", "1", "-v", *words)
    assert ran.ret == 0
    ended = "".join(re.findall(r"^\[gw0\].*test_it\[(.)\]", ran.stdout.str(), re.MULTILINE))
    assert ended == order
    assert list(project.results()) == [f"ch07/it[{k}]" for k in "abcd"]


@pytest.mark.parametrize(("words", "chunk"), [([], 1), (["--maxschedchunk=3"], 3)])
def test_workers_get_claims_one_by_one(project, words, chunk):
    project.tests(CLAIMS)
    project.write(
        "conftest.py",
        "def pytest_sessionfinish(session):\n"
        "    option = session.config.option\n"
        "    print('chunk', option.maxschedchunk)\n",
    )
    ran = project.run("--gpu", "--quick", "-n", "2", "-s", *words)
    assert ran.ret == 0
    ran.stdout.fnmatch_lines([f"*chunk {chunk}"])


def test_a_shard_needs_a_measuring_run(project):
    project.tests(CLAIMS)
    ran = project.run("--shard=1/2")
    assert ran.ret == 4
    ran.stderr.fnmatch_lines(["*--shard only affects measuring: add --gpu or --cpu"])
    assert project.run("--gpu", "--shard=3/2").ret == 4


@pytest.fixture
def night(tmp_path):
    run = open_run(tmp_path / "shards", "20250304T050607.000000-1")
    run.write_manifest(
        [("ch06/a", "tests/ch06/test_x.py::test_a"), ("ch06/b", "tests/ch06/test_x.py::test_b")]
    )
    return tmp_path, run


def complete(path, capsys):
    return main(["complete", str(path)]), capsys.readouterr().out


def test_a_killed_run_counts_with_its_journals(night, capsys):
    path, run = night
    run.journal("main").append(result("ch06/a"))
    assert complete(path, capsys) == (1, "no outcome: ch06/b\n2 claims: 1 NOT_RUN, 1 PASSED\n")


def test_claims_that_broke_are_named(night, capsys):
    path, run = night
    run.journal("main").append(result("ch06/a", outcome=Outcome.FAILED))
    broke = result("ch06/b", outcome=Outcome.ERROR, speedup=None, message="it crashed\nfar away")
    run.journal("main").append(broke)
    status, out = complete(path, capsys)
    assert (status, out.splitlines()[0]) == (1, "ERROR: ch06/b: it crashed")
    assert out.count("\n") == 2


def test_of_two_shards_a_later_outcome_counts(night, capsys):
    path, run = night
    for claim in ("ch06/a", "ch06/b"):
        run.journal("main").append(result(claim, outcome=Outcome.NOT_RUN, speedup=None))
    again = Run(path / "shards" / "20250304T060607.000000-2")
    again.write_manifest([("ch06/b", "tests/ch06/test_x.py::test_b")])
    again.journal("main").append(result("ch06/b"))
    assert complete(path, capsys)[1].splitlines() == [
        "no outcome: ch06/a",
        "2 claims: 1 NOT_RUN, 1 PASSED",
    ]


def test_a_later_run_counts_even_if_the_earlier_one_needed_a_second_attempt(night, capsys):
    path, run = night
    broke = {"outcome": Outcome.ERROR, "speedup": None, "message": "it crashed"}
    for claim in ("ch06/a", "ch06/b"):
        started = "2025-03-04T05:06:07+00:00"
        run.journal("main").append(result(claim, run=run.id, started=started, attempts=2, **broke))
    again = Run(path / "20250304T060607.000000-2")
    again.write_manifest([("ch06/b", "tests/ch06/test_x.py::test_b")])
    again.journal("main").append(
        result("ch06/b", run=again.id, started="2025-03-04T06:06:07+00:00")
    )
    assert complete(path, capsys)[1].splitlines() == [
        "ERROR: ch06/a: it crashed",
        "2 claims: 1 ERROR, 1 PASSED",
    ]


def test_a_merged_result_replaces_the_record_of_a_claim_that_did_not_run(tmp_path, capsys):
    """A run that ends early records claims without a result, some without the kind of GPU."""
    bare = {"timing": None, "speedup": None, "library": None, "verdict": None}

    def not_run(claim, key=""):
        return result(claim, outcome=Outcome.NOT_RUN, key=key, **bare)

    parts = {
        "early": [result("a/x"), not_run("a/y"), not_run("a/z"), not_run("a/w", "b200")],
        "late": [not_run("a/x"), result("a/y"), not_run("a/z"), result("a/w")],
        "budget": [not_run("a/x", "h200")],
    }
    for name, records in parts.items():
        document = {"aiperf_untimed": [to_json(r) for r in records]}
        (tmp_path / name).write_text(json.dumps(document))
    merged = tmp_path / "merged.json"
    assert main(["merge", *(str(tmp_path / name) for name in parts), "-o", str(merged)]) == 0
    assert capsys.readouterr().out.startswith("5 claims written")
    found = [(r.claim, r.key, r.outcome is Outcome.PASSED) for r in read_results(merged)]
    assert sorted(found) == [
        ("a/w", "b200", False),
        ("a/w", "h200", True),
        ("a/x", "h200", True),
        ("a/y", "h200", True),
        ("a/z", "", False),
    ]


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    assert main(["complete", str(tmp_path)]) == 2
    assert "there is no run below these folders" in capsys.readouterr().err
