"""Finished results survive crashes, full disks and damaged files."""

from __future__ import annotations

import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Outcome
from pytest_aiperf.records import journal
from pytest_aiperf.records.results import document, read_results
from tests.plugin.records import files_up_to, result

NOW = datetime(2025, 3, 4, 5, 6, 7, 89, tzinfo=UTC)


@pytest.fixture
def run(tmp_path):
    return journal.open_run(tmp_path / ".aiperf", journal.new_run_id(NOW, 42))


def test_run_ids_sort_by_start_and_differ_by_process():
    later = NOW.replace(microsecond=90)
    ids = [journal.new_run_id(NOW, 9), journal.new_run_id(NOW, 10), journal.new_run_id(later, 1)]
    assert len(set(ids)) == 3
    assert max(ids) == ids[2]


def test_a_run_from_collection_to_results(run):
    run.write_manifest([("a/one", "a/test_x.py::test_one"), ("a/two", "a/test_x.py::test_two")])
    manifest = journal.read_manifest(run.path)
    assert manifest.claims == {"a/one": "a/test_x.py::test_one", "a/two": "a/test_x.py::test_two"}
    run.journal("main").append(result("a/one"))
    done = journal.complete(manifest, journal.read_journals(run.path)[0], lambda _: "budget")
    assert [(r.claim, r.outcome, r.message) for r in done] == [
        ("a/one", Outcome.PASSED, ""),
        ("a/two", Outcome.NOT_RUN, "budget"),
    ]
    assert (done[1].nodeid, done[1].run, done[1].started) == (
        "a/test_x.py::test_two",
        run.id,
        manifest.started,
    )
    assert read_results(run.finish(document(done, {}, NOW))) == done
    assert sorted(p.name for p in run.path.parent.iterdir()) == sorted(
        [".gitignore", "CACHEDIR.TAG", "latest", run.id]
    )


def test_a_manifest_has_the_environment_without_private_values(run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "name-of-a-customer")
    monkeypatch.setenv("HF_TOKEN", "secret")
    run.write_manifest([], "-m ch07", {"aiperf_deadline": "60"})
    manifest = journal.read_manifest(run.path)
    assert manifest.settings == {"aiperf_deadline": "60"}
    assert manifest.environment["OMP_NUM_THREADS"] == "4"
    assert manifest.environment["NCCL_SOCKET_IFNAME"] == "<set>"
    text = (run.path / "manifest.json").read_text()
    assert "HF_TOKEN" not in text
    assert "customer" not in text


def test_the_first_manifest_stays(run):
    assert not run.collected
    run.write_manifest([("ch/x", "a.py::x")])
    assert run.collected
    run.write_manifest([])
    assert journal.read_manifest(run.path).claims == {"ch/x": "a.py::x"}


def test_a_journal_cut_at_any_byte_keeps_every_complete_line(run):
    bare = {"timing": None, "agreement": (), "gpu": None, "stack": {}}  # short lines: fewer cuts
    results = [result("a/0", **bare), result("a/1", **bare)]
    writer = run.journal("gw0")
    lines = []
    for r in results:
        before = writer.path.read_bytes() if writer.path.exists() else b""
        writer.append(r)
        lines.append(writer.path.read_bytes()[len(before) :])
    whole = b"".join(lines)
    for cut in range(len(lines[0]), len(whole) + 1):
        writer.path.write_bytes(whole[:cut])
        into = cut - len(lines[0])
        kept = len(lines[1]) - 1 <= into  # a line that lacks only its newline is kept
        torn = into > 1 and not kept  # the newline before a line is no torn line
        assert journal.read_journals(run.path) == (results[: 1 + kept], torn)


@pytest.mark.parametrize("junk", [b'{"claim": "a', b"\x00\x00\x00", b'{"m": "\xff"}', b"[" * 99999])
def test_a_torn_line_does_not_merge_with_the_next_one(run, junk):
    writer = run.journal("gw0")
    writer.append(result("a/0"))
    with writer.path.open("ab") as file:
        file.write(junk)
    writer.append(result("a/1"))
    assert journal.read_journals(run.path) == ([result("a/0"), result("a/1")], 1)


def test_a_complete_line_that_is_no_result_is_refused(run):
    writer = run.journal("gw0")
    writer.append(result())
    writer.path.write_text(writer.path.read_text() + '{"claim": 1}\n')
    with pytest.raises(UsageError, match=r"gw0-\d+\.jsonl:3: .* is missing"):
        journal.read_journals(run.path)


def test_merging_is_idempotent_and_the_last_attempt_wins(run):
    first, second = result("a/x", attempts=1), result("a/x", attempts=2, outcome=Outcome.FAILED)
    other = result("a/y", started="2025-01-01")
    newer = result("a/y", started="2025-01-02")
    run.journal("gw1").append(second)
    run.journal("gw1").append(newer)
    for r in (first, other, second, first):
        run.journal("gw0").append(r)
    results, torn = journal.read_journals(run.path)
    assert (results, torn) == ([second, newer], 0)
    assert journal.latest([*results, first, *results, other]) == results
    assert journal.latest([result("a", seed=1), result("a", seed=2)]) == journal.latest(
        [result("a", seed=2), result("a", seed=1)]
    )


def test_completing_leaves_one_outcome_each_and_drops_nothing():
    manifest = journal.Manifest("run", "2025", {"b": "t::b", "a": "t::a"})
    done = journal.complete(
        manifest, [result("a"), result("stray"), result("a")], lambda _: "killed"
    )
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
        with pytest.raises(
            UsageError, match=rf"cannot write {folder}.*: Permission denied; make the"
        ):
            journal.open_run(folder / ".aiperf", "run")
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
        folder.rmdir()


def test_a_full_folder_is_refused_at_session_start(tmp_path):
    with files_up_to(1), pytest.raises(UsageError, match=r"cannot write .*: .*; free some space"):
        journal.open_run(tmp_path / ".aiperf", "run")
    assert list((tmp_path / ".aiperf").iterdir()) == []


def test_a_run_never_enters_the_folder_of_another(run):
    with pytest.raises(UsageError, match="File exists"):
        journal.open_run(run.path.parent, run.id)


def test_a_full_disk_is_one_sentence_and_harms_no_earlier_line(run):
    writer = run.journal("main")
    writer.append(result("a/0"))
    before = writer.path.read_bytes()
    with (
        files_up_to(len(before) + 100),
        pytest.raises(UsageError, match=r"cannot write .*jsonl: .*; f"),
    ):
        writer.append(result("a/1"))
    assert writer.path.read_bytes().startswith(before)
    writer.append(result("a/1"))
    assert journal.read_journals(run.path) == ([result("a/0"), result("a/1")], 1)
    with pytest.raises(
        UsageError, match="cannot write /dev/full: No space left on device; free some"
    ):
        journal.Journal(Path("/dev/full")).append(result())


def test_each_result_is_on_disk_when_append_returns(run, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real(fd)),
    )
    writer = run.journal("main")
    writer.append(result("a/0"))
    writer.append(result("a/1"))
    assert synced == [str(writer.path), str(run.path), str(writer.path)]


def test_a_failed_fsync_is_an_error(run, monkeypatch):
    def failing(fd):
        raise OSError(5, "Input/output error")

    writer = run.journal("main")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(UsageError, match="Input/output error"):
        writer.append(result())


def test_a_figure_that_json_cannot_hold_is_named_with_its_claim(run):
    with pytest.raises(
        ValueError, match=r"^ch07/copy\[vector\]\.floor: nan is not a finite number"
    ):
        run.journal("main").append(result(floor=float("nan")))


def test_a_damaged_manifest_is_one_sentence(run):
    (run.path / "manifest.json").write_text('{"run": "x"}')
    with pytest.raises(UsageError, match=r"manifest\.json: manifest: started is missing"):
        journal.read_manifest(run.path)


def test_latest_points_at_the_last_run_that_finished(tmp_path):
    folder = tmp_path / ".aiperf"
    for name in ("first", "second"):
        journal.open_run(folder, name).finish({})
    journal.open_run(folder, "cut-short")
    assert (folder / "latest").resolve() == folder / "second"


def test_phases_tell_what_claims_that_have_not_ended_were_doing(run):
    phases = run.phases("gw0")
    phases.append("a/one", "warming up")
    phases.append("a/one", journal.ENDED)
    before = time.time()
    for phase in ("warming up", "waiting for GPU 0", "waiting for GPU 0"):
        phases.append("a/two", phase)
    run.phases("gw1").append("a/three", "building")
    unfinished = journal.unfinished(run.path)
    assert {claim: phase for claim, (phase, _) in unfinished.items()} == {
        "a/two": "waiting for GPU 0",
        "a/three": "building",
    }
    assert before <= unfinished["a/two"][1] <= time.time()
    assert len(phases.path.read_text().splitlines()) == 4


def test_phases_that_cannot_be_written_or_read_cost_nothing(run):
    phases = run.phases("gw0")
    phases.path.mkdir()
    phases.append("a/one", "warming up")
    torn = run.path / "phases-gw1-1.jsonl"
    torn.write_text('{"time": 1.0, "claim": "a/two", "phase"')
    assert journal.unfinished(run.path) == {}
    later = '{"time": 2.0, "claim": "a/two", "phase": "measuring"}\n'
    torn.write_text('{"time": 1.0, "cla' + later + later)
    assert journal.unfinished(run.path) == {"a/two": ("measuring", 2.0)}
