"""Results files are strict, complete, and in the format of pytest-benchmark."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import (
    Finding,
    Gpu,
    Interval,
    Metric,
    Outcome,
    Replicate,
    Round,
    Work,
)
from pytest_aiperf.records import results
from pytest_aiperf.records.results import read_record
from pytest_aiperf.rules import evidence
from pytest_aiperf.schema import to_json
from tests.plugin.records import H200, files_up_to, result, timing

NOW = datetime(2025, 3, 4, 5, 6, 7, 89, tzinfo=UTC)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    results.atomic_write(path, "old")
    with files_up_to(10), pytest.raises(UsageError, match=r"cannot write .*results\.json"):
        results.atomic_write(path, "new" * 100)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    results.atomic_write(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"floor": float("nan")}, r"ch07/copy\[vector\].*\.floor: nan"),
        ({"speedup": Interval(0.0, 1.0, float("inf"))}, r"\.speedup\.high: inf"),
        ({"work": Work(read=1j)}, r"\.work\.read: a complex cannot"),
    ],
)
def test_a_figure_that_json_cannot_hold_is_named_with_its_place(changes, place):
    broken = result(**changes)
    with pytest.raises(ValueError, match=place):
        results.dumps(to_json(broken), broken.claim)


def test_the_document_is_pytest_benchmarks_with_records_inside():
    untimed = result("ch07/broken", timing=None, speedup=None, outcome=Outcome.ERROR, verdict=None)
    score = result("score", timing=timing(metric=Metric.SCORE, unit="tok/s"))
    info = {"python_version": "3.11"}
    blocks = {"baseline": (2e-3, 2.1e-3), "optimized": (1e-3, 1.1e-3)}
    later = Round("OBBO", {"baseline": (2.2e-3, 2e-3), "optimized": (1e-3, 1.2e-3)})
    uneven = timing(replicates=(Replicate(1, (Round("BOOB", blocks),)), Replicate(2, (later,))))
    timed = result(timing=uneven)
    content = json.loads(results.dumps(results.document([timed, untimed, score], info, NOW), "x"))
    assert set(content) == {
        "machine_info", "commit_info", "benchmarks", "datetime", "version", "aiperf_untimed",
    }  # fmt: skip
    assert content["machine_info"] == info
    assert content["commit_info"] == {}
    assert content["datetime"] == NOW.isoformat()
    assert content["aiperf_untimed"] == [to_json(untimed), to_json(score)]
    [entry] = content["benchmarks"]
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
    assert entry["aiperf"] == to_json(timed)
    assert set(entry["stats"]) == {
        "min", "max", "mean", "stddev", "rounds", "median", "iqr", "q1", "q3", "iqr_outliers",
        "stddev_outliers", "outliers", "ld15iqr", "hd15iqr", "ops", "total", "iterations",
    }  # fmt: skip
    assert entry["stats"]["min"] == 1e-3
    assert entry["stats"]["mean"] == pytest.approx(1.075e-3)
    assert (entry["stats"]["rounds"], entry["stats"]["iterations"]) == (4, 20)


def test_a_document_is_read_as_it_was_written(tmp_path):
    untimed = result("x", timing=None)
    path = tmp_path / "r.json"
    path.write_text(results.dumps(results.document([result(), untimed], {}, NOW), "x"))
    assert results.read_results(path) == [result(), untimed]


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        (
            '"seed": 7',
            '"seed": NaN',
            r"r\.benchmarks\[0\]\.aiperf\.seed: nan is not a finite number",
        ),
        ('"seed": 7', '"seed": -Infinity', r"\.seed: -inf is not a finite"),
        ('"floor": 0.004', '"floor": 1e999', r"\.floor: inf is not a finite"),
        ('"seed": 7', '"seed": 7, "seed": 8', r"benchmarks\[0\]\.aiperf\.seed occurs twice"),
        ('"seed": 7', '"seed": true', r"benchmarks\[0\]\.aiperf\.seed: int is needed"),
        ('"seed": 7', '"seed": ' + "9" * 5000, "limit"),
        ('"seed": 7', '"sed": 7', r"\.aiperf: unknown sed"),
        ('"schema": 3', '"schema": 99', "schema 99 is newer than 3.*upgrade"),
        ('"seed": 7', '"seed" 7', r"r\.json:1:\d+: not JSON, or incomplete \(Expecting ':'"),
        ('"seed": 7', '"seed": ' + "[" * 99999, r"r\.json: .*recursion"),
        (
            '"aiperf_untimed": []',
            '"aiperf_untimed": 3',
            "aiperf_untimed must be lists",
        ),
    ],
)
def test_a_damaged_results_file_is_one_sentence_with_its_place(tmp_path, old, new, place):
    path = tmp_path / "r.json"
    text = results.dumps(results.document([result()], {}, NOW), "x")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=place) as caught:
        results.read_results(path)
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
    with pytest.raises(UsageError, match=why):
        results.read_results(path)


def test_accepted_results_join_those_of_other_claims(tmp_path):
    folder = tmp_path / "results"
    path = folder / "h200.json"
    results.merge_results(folder, [result("b"), result("c")], {})
    results.merge_results(folder, [result("a"), result("b", seed=8)], {"system": "Linux"})
    unnamed = dataclasses.replace(H200, uuid="")
    kept = [result("a"), result("b", seed=8), result("c")]
    assert results.read_results(path) == [dataclasses.replace(r, gpu=unnamed) for r in kept]
    assert json.loads(path.read_text())["machine_info"] == {"system": "Linux"}
    path.write_text("{")
    with pytest.raises(UsageError, match=r"h200\.json:1:2"):
        results.merge_results(folder, [result("d")], {})
    assert path.read_text() == "{"


def test_an_accepted_ladder_replaces_the_claim_that_it_was(tmp_path):
    def accept(*claims):
        results.merge_results(tmp_path, [result(claim) for claim in claims], {})
        return [r.claim for r in results.read_results(tmp_path / "h200.json")]

    assert accept("a/x", "a/xy", "a/y[1]") == ["a/x", "a/xy", "a/y[1]"]
    assert accept("a/x[a]") == ["a/x[a]", "a/xy", "a/y[1]"]
    assert accept("a/x[b]") == ["a/x[a]", "a/x[b]", "a/xy", "a/y[1]"]
    assert accept("a/x", "a/y") == ["a/x", "a/xy", "a/y"]
    assert accept("a/y", "a/y[HIDDEN]") == ["a/x", "a/xy", "a/y", "a/y[HIDDEN]"]


def test_the_machine_is_described_without_its_name():
    gpu = Gpu("NVIDIA H200", "h200", "GPU-secret", "sm90", 132, 1, 1, "580.1")
    info = results.machine_info([gpu])
    assert info["gpus"] == [{"name": "NVIDIA H200", "driver": "580.1"}]
    assert info["cpu"]["brand_raw"] in Path("/proc/cpuinfo").read_text() + platform.machine()
    assert len(info["cpu"]["brand_raw"]) > 3
    assert info["cpu"]["count"] == len(os.sched_getaffinity(0))
    text = json.dumps(info)
    assert "secret" not in text
    assert os.uname().nodename not in info.values()


def test_a_document_has_one_record_per_line():
    content = results.document([result("ch06/a"), result("ch06/b", timing=None)], {"gpus": []}, NOW)
    text = results.document_text(content)
    assert json.loads(text) == content
    assert sum(line.startswith("  {") for line in text.splitlines()) == 2
    assert json.loads(results.document_text({"benchmarks": [], "version": "5"})) == {
        "benchmarks": [],
        "version": "5",
    }


def test_a_record_of_schema_2_is_upgraded():
    looked = Finding(evidence.launches(max=0.5, per="baseline"), 0.25, held=True)
    unseen = Finding(evidence.counter("dram__bytes_read.sum", max=0.5, per="baseline"))
    new = result("ch07/copy[vector]", ladder="ch07/copy", evidence=(looked, unseen))
    old = to_json(new)
    old["schema"], old["timing"]["calls"] = 2, 20
    old["evidence"][1]["held"] = True  # schema 2 had no third state
    del old["ladder"]
    assert read_record(old, "old") == new
    assert read_record(old, "old") == new
    with pytest.raises(UsageError, match="schema 1 is no longer read; run again"):
        read_record({**old, "schema": 1}, "old")
    del old["timing"]["replicates"]
    with pytest.raises(UsageError, match="replicates"):
        read_record(old, "old")
