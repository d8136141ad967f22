"""Results survive crashes, full disks and damaged files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pytest_aiperf import journal
from pytest_aiperf.errors import Misuse
from pytest_aiperf.model import (
    Against,
    Gpu,
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
    to_json,
)

NOW = datetime(2025, 3, 4, 5, 6, 7, 89, tzinfo=UTC)


def timing(**changes):
    one = Round("ABBA", {"baseline": (2e-3, 2.1e-3), "optimized": (1e-3, 1.1e-3)}, 1980, 0)
    two = Round("BAAB", {"baseline": (2.2e-3, 2e-3), "optimized": (1e-3, 1.2e-3)}, 1980, 4)
    made = Timing(Metric.DEVICE, Mode.GRAPH, 20, "cold", 3, (Replicate(1, (one, two)),))
    return dataclasses.replace(made, **changes)


def result(claim="ch07/copy[vector]", **changes):
    folder, _, name = claim.rpartition("/")
    made = Result(
        claim=claim,
        nodeid=f"tests/{folder}/test_x.py::test_{name}",
        title="Wide loads are faster",
        outcome=Outcome.PASSED,
        key="h200",
        run="run",
        started="2025-03-04T05:06:07+00:00",
        seed=7,
        against=Against.IDIOMATIC,
        verdict=Verdict.FASTER,
        speedup=Interval(1.9, 2.0, 2.1),
        timing=timing(),
        work=Work(bytes=4e9),
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture
def run(tmp_path):
    return journal.open_run(tmp_path / ".aiperf", journal.new_run_id(NOW, 42))


@contextlib.contextmanager
def files_up_to(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_run_ids_sort_by_start_and_differ_by_process():
    later = NOW.replace(microsecond=90)
    ids = [journal.new_run_id(NOW, 9), journal.new_run_id(NOW, 10), journal.new_run_id(later, 1)]
    assert len(set(ids)) == 3
    assert max(ids) == ids[2]


def test_a_run_from_collection_to_latest(run):
    manifest = run.manifest([("a/one", "t::one"), ("a/two", "t::two")], "2025")
    assert journal.read_manifest(run.path) == manifest
    run.journal("main").append(result("a/one"))
    done = journal.complete(manifest, journal.read_journals(run.path)[0], "session budget")
    assert [(r.claim, r.outcome, r.message) for r in done] == [
        ("a/one", Outcome.PASSED, ""),
        ("a/two", Outcome.NOT_RUN, "session budget"),
    ]
    assert (done[1].nodeid, done[1].run, done[1].started) == ("t::two", run.id, "2025")
    path = run.finish(journal.document(done, {}, {}, NOW))
    assert journal.read_results(path) == done
    assert (run.path.parent / "latest").readlink() == Path(run.id)
    assert sorted(p.name for p in run.path.parent.iterdir()) == [".gitignore", run.id, "latest"]


def test_latest_moves_on_only_when_a_run_has_finished(run, tmp_path):
    run.finish({})
    second = journal.open_run(tmp_path / ".aiperf", journal.new_run_id(NOW, 43))
    link = tmp_path / ".aiperf" / "latest"
    assert link.readlink() == Path(run.id)
    link.with_name(f".latest-{os.getpid()}").symlink_to("of a run that was killed here")
    second.finish({})
    assert link.readlink() == Path(second.id)


def test_a_manifest_is_written_once_and_one_id_is_one_test(run):
    with pytest.raises(Misuse, match=r"a\.py::x and b\.py::x are both the claim ch/x"):
        run.manifest([("ch/x", "a.py::x"), ("ch/x", "b.py::x")])
    assert not run.collected
    run.manifest([])
    assert run.collected
    with pytest.raises(FileExistsError, match="written once"):
        run.manifest([])


@pytest.mark.parametrize("worker", ["../x", "", "a/b", "-x", "a\n"])
def test_a_worker_cannot_lead_out_of_the_folder(run, worker):
    with pytest.raises(Misuse, match="cannot name a journal"):
        run.journal(worker)


def test_a_journal_torn_anywhere_keeps_every_whole_line(run, monkeypatch):
    results = [result(f"a/{i}", message="é::\n", timing=None) for i in range(5)]
    mine = run.journal("gw0")
    for r in results:
        mine.append(r)
    whole = mine.path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == 0x0A]
    assert len(ends) == 5
    starts = [0] + [end + 1 for end in ends]
    assert journal.read_journals(run.path) == (results, 0)
    written = {r.claim: (to_json(r), r) for r in results}

    def known(kind, record, where):  # reading thousands of records in full would take seconds
        expected, r = written[record["claim"]]
        assert record == expected
        return r

    monkeypatch.setattr(journal, "from_json", known)
    for cut in range(len(whole)):
        mine.path.write_bytes(whole[:cut])
        found, torn = journal.read_journals(run.path)
        kept = sum(end <= cut for end in ends)  # a line without its newline is whole
        assert found == results[:kept]
        assert torn == (cut not in ends and cut not in starts)


@pytest.mark.parametrize("junk", [b'{"claim": "a', b"\x00\x00\x00", b'{"m": "\xff"}', b"[" * 99999])
def test_a_torn_line_stays_alone_when_the_journal_goes_on(run, junk):
    mine = run.journal("gw0")
    mine.append(result("a/0"))
    with mine.path.open("ab") as file:
        file.write(junk)
    mine.append(result("a/1"))
    assert journal.read_journals(run.path) == ([result("a/0"), result("a/1")], 1)


def test_a_whole_line_that_is_no_result_is_not_passed_over(run):
    mine = run.journal("gw0")
    mine.append(result())
    mine.path.write_text(mine.path.read_text() + '{"claim": 1}\n')
    with pytest.raises(Misuse, match=r"gw0-\d+\.jsonl:2: .* is missing"):
        journal.read_journals(run.path)


def test_merging_is_idempotent_and_the_last_attempt_wins(run):
    first, second = result("a/x", attempts=1), result("a/x", attempts=2, outcome=Outcome.FAILED)
    other = result("a/y", started="2025-01-01")
    newer = result("a/y", started="2025-01-02")
    run.journal("gw1").append(second)
    run.journal("gw1").append(newer)
    for r in (first, other, second, first):
        run.journal("gw0").append(r)
    found, torn = journal.read_journals(run.path)
    assert (found, torn) == ([second, newer], 0)
    assert journal.latest([*found, first, *found, other]) == found
    assert journal.latest([result("a", seed=1), result("a", seed=2)]) == journal.latest(
        [result("a", seed=2), result("a", seed=1)]
    )


def test_completing_leaves_one_outcome_each_and_drops_nothing():
    collected = tuple(journal.Collected(c, f"t::{c}") for c in ("b", "a", "b"))
    manifest = journal.Manifest("run", "2025", collected)
    done = journal.complete(manifest, [result("a"), result("stray"), result("a")], "killed")
    assert [(r.claim, r.outcome) for r in done] == [
        ("b", Outcome.NOT_RUN),
        ("a", Outcome.PASSED),
        ("stray", Outcome.PASSED),
    ]


def test_a_read_only_folder_is_refused_at_session_start():
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        with pytest.raises(Misuse, match=rf"cannot write {folder}.*: Permission denied; free some"):
            journal.open_run(folder / ".aiperf", "run")
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
        folder.rmdir()


def test_a_full_folder_is_refused_at_session_start(tmp_path):
    with files_up_to(100), pytest.raises(Misuse, match=r"cannot write .*run: .*; free some space"):
        journal.open_run(tmp_path / ".aiperf", "run")
    assert list((tmp_path / ".aiperf").iterdir()) == []


def test_a_run_never_enters_the_folder_of_another(run):
    with pytest.raises(Misuse, match="File exists"):
        journal.open_run(run.path.parent, run.id)


def test_a_full_disk_is_one_sentence_and_harms_no_earlier_line(run):
    mine = run.journal("main")
    mine.append(result("a/0"))
    before = mine.path.read_bytes()
    with (
        files_up_to(len(before) + 100),
        pytest.raises(Misuse, match=r"cannot write .*jsonl: .*; f"),
    ):
        mine.append(result("a/1"))
    assert mine.path.read_bytes() == before
    mine.append(result("a/1"))
    assert journal.read_journals(run.path) == ([result("a/0"), result("a/1")], 0)
    with pytest.raises(Misuse, match="cannot write /dev/full: No space left on device; free some"):
        journal.Journal(Path("/dev/full")).append(result())


def test_each_result_is_on_disk_when_append_returns(run, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real(fd)),
    )
    mine = run.journal("main")
    mine.append(result("a/0"))
    mine.append(result("a/1"))
    assert synced == [str(mine.path), str(run.path), str(mine.path)]


def test_a_failed_fsync_takes_the_line_back(run, monkeypatch):
    def failing(fd):
        raise OSError(5, "Input/output error")

    mine = run.journal("main")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(Misuse, match="Input/output error"):
        mine.append(result())
    assert mine.path.read_bytes() == b""


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    journal.atomic_write(path, "old")
    with files_up_to(10), pytest.raises(Misuse, match=r"cannot write .*results\.json"):
        journal.atomic_write(path, "new" * 100)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    journal.atomic_write(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"floor": float("nan")}, r"ch07/copy\[vector\].*\.floor: nan"),
        ({"speedup": Interval(0.0, 1.0, float("inf"))}, r"\.speedup\.high: inf"),
        ({"work": Work(bytes=1j)}, r"\.work\.bytes: a complex cannot"),
    ],
)
def test_a_figure_that_json_cannot_hold_is_named_with_its_claim(run, changes, place):
    broken = result(**changes)
    with pytest.raises(ValueError, match=place):
        run.journal("main").append(broken)
    with pytest.raises(ValueError, match=place):
        journal.document([broken], {}, {}, NOW)
    with pytest.raises(ValueError, match=place):
        journal.document([dataclasses.replace(broken, timing=None)], {}, {}, NOW)


def test_the_document_is_pytest_benchmarks_with_our_record_inside():
    untimed = result("ch07/broken", timing=None, speedup=None, outcome=Outcome.ERROR, verdict=None)
    score = result("score", timing=timing(metric=Metric.SCORE, unit="tok/s"))
    info = {"python_version": "3.11"}
    made = json.loads(
        journal.dumps(journal.document([result(), untimed, score], info, {"id": "abc"}, NOW), "x")
    )
    assert set(made) == {
        "machine_info", "commit_info", "benchmarks", "datetime", "version", "aiperf_untimed",
    }  # fmt: skip
    assert made["machine_info"] == info
    assert made["commit_info"] == {"id": "abc"}
    assert made["datetime"] == NOW.isoformat()
    assert made["aiperf_untimed"] == [to_json(untimed)]
    entry, second = made["benchmarks"]
    assert {
        k: entry[k] for k in ("group", "name", "fullname", "param", "params", "extra_info")
    } == {
        "group": "ch07/copy",
        "name": "test_copy[vector]",
        "fullname": "tests/ch07/test_x.py::test_copy[vector]",
        "param": "vector",
        "params": None,
        "extra_info": {},
    }
    assert entry["aiperf"] == to_json(result())
    assert set(entry["stats"]) == {
        "min", "max", "mean", "stddev", "rounds", "median", "iqr", "q1", "q3", "iqr_outliers",
        "stddev_outliers", "outliers", "ld15iqr", "hd15iqr", "ops", "total", "iterations",
    }  # fmt: skip
    assert entry["stats"]["min"] == 1e-3
    assert entry["stats"]["mean"] == pytest.approx(1.075e-3)
    assert (entry["stats"]["rounds"], entry["stats"]["iterations"]) == (4, 20)
    assert (second["param"], second["extra_info"]) == (None, {"unit": "tok/s"})


def test_reading_gives_back_what_was_written(tmp_path):
    untimed = result("x", timing=None)
    path = tmp_path / "r.json"
    path.write_text(journal.dumps(journal.document([result(), untimed], {}, {}, NOW), "x"))
    assert journal.read_results(path) == [result(), untimed]


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"seed": 7', '"seed": NaN', r"results\.benchmarks\[0\]\.aiperf\.seed: NaN is no figure"),
        ('"seed": 7', '"seed": -Infinity', r"\.seed: -Infinity"),
        ('"floor": 0.0', '"floor": 1e999', r"\.floor: 1e999 is no finite"),
        ('"seed": 7', '"seed": 7, "seed": 8', r"benchmarks\[0\]\.aiperf: the key 'seed' stands tw"),
        ('"seed": 7', '"seed": true', r"benchmarks\[0\]\.aiperf\.seed: int is needed"),
        ('"seed": 7', '"seed": ' + "9" * 5000, "limit"),
        ('"seed": 7', '"sed": 7', r"\.aiperf: unknown sed"),
        ('"schema": 1', '"schema": 99', "schema 99 is newer than 1.*upgrade"),
        ('"seed": 7', '"seed" 7', r"r\.json:1:\d+: Expecting ':'"),
        ('"seed": 7', '"seed": ' + "[" * 99999, r"r\.json: .*recursion"),
        (
            '"aiperf_untimed": []',
            '"aiperf_untimed": 3',
            "aiperf_untimed: a list is needed, not a int",
        ),
    ],
)
def test_a_damaged_results_file_is_one_sentence_with_its_place(tmp_path, old, new, place):
    path = tmp_path / "r.json"
    text = journal.dumps(journal.document([result()], {}, {}, NOW), "x")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(Misuse, match=place) as caught:
        journal.read_results(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value"),
        (b"[]", "an object is needed"),
        (b"\xff", "utf-8"),
        (b"{}", "no record of a claim"),
        (b'{"benchmarks": [{"name": "theirs"}]}', "no record of a claim"),
        (None, "cannot read .*No such file"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content, why):
    path = tmp_path / "r.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Misuse, match=why):
        journal.read_results(path)


def test_accepted_results_join_those_of_other_claims(tmp_path):
    path = tmp_path / "results" / "h200.json"
    journal.merge_results(path, [result("b"), result("c")], {})
    journal.merge_results(path, [result("a"), result("b", seed=8)], {"system": "Linux"})
    assert journal.read_results(path) == [result("a"), result("b", seed=8), result("c")]
    assert json.loads(path.read_text())["machine_info"] == {"system": "Linux"}
    path.write_text("{")
    with pytest.raises(Misuse, match=r"h200\.json:1:2"):
        journal.merge_results(path, [result("d")], {})
    assert path.read_text() == "{"


def test_a_damaged_manifest_is_one_sentence(run):
    (run.path / "manifest.json").write_text('{"run": "x"}')
    with pytest.raises(Misuse, match=r"manifest\.json: manifest: started is missing"):
        journal.read_manifest(run.path)


def test_the_machine_is_described_without_its_name():
    gpu = Gpu("NVIDIA H200", "h200", "GPU-secret", "sm90", 132, 1, 1, "580.1")
    info = journal.machine_info([gpu])
    assert info["gpus"] == [{"name": "NVIDIA H200", "driver": "580.1"}]
    text = json.dumps(info)
    assert "secret" not in text
    assert os.uname().nodename not in info.values()
