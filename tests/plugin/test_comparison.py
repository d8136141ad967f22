"""Two runs are compared claim by claim."""

import csv
import dataclasses
import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pytest_aiperf import cli
from pytest_aiperf.model import Interval, Metric, Outcome
from pytest_aiperf.records.comparison import State, changes, ratio_of, stack_changes
from pytest_aiperf.records.results import document, document_text
from tests.plugin.records import H200, result, timing, timing_of


def claim(name="ch07/copy", speedup=2.0, half=0.002, **more):
    ratio = Interval(speedup / (1 + half), speedup, speedup * (1 + half))
    usual = {"key": "h200", "code": "abc", "timing": timing_of(baseline=ratio)}
    record = result(name, **usual | more)
    return dataclasses.replace(record, speedup=ratio) if "timing" in more else record


def without(name, **more):
    """A claim that was not measured."""
    return dataclasses.replace(
        claim(name, timing=None), speedup=None, outcome=Outcome.ERROR, **more
    )


@pytest.mark.parametrize(
    ("speedup", "half", "state"),
    [
        (2.0, 0.002, State.SAME),
        (1.95, 0.002, State.SAME),  # sessions may differ by 3.5 %
        (1.90, 0.002, State.REGRESSED),
        (1.90, 0.08, State.INCONCLUSIVE),  # the interval is too wide for a verdict
        (2.00, 0.10, State.INCONCLUSIVE),
        (2.06, 0.01, State.INCONCLUSIVE),  # above the margin only in part
        (2.10, 0.002, State.IMPROVED),
    ],
)
def test_the_interval_decides(speedup, half, state):
    [change] = changes([claim()], [claim(speedup=speedup, half=half)])
    assert change.state is state
    assert change.ratio.value == pytest.approx(speedup / 2.0)


def test_new_gone_and_stale():
    old = [claim("a"), claim("b"), claim("c")]
    broken = without("c", message="why\nand where")
    listed = {c.claim: c for c in changes(old, [claim("b", code="other"), broken, claim("d")])}
    states = {name: c.state for name, c in listed.items()}
    assert states == {"a": State.GONE, "b": State.STALE, "c": State.GONE, "d": State.NEW}
    assert listed["c"].why == "ERROR: why"


def test_a_claim_measured_in_one_run_is_new_or_gone():
    assert [c.state for c in changes([without("a")], [claim("a")])] == [State.NEW]
    assert [c.state for c in changes([claim("a")], [without("a")])] == [State.GONE]
    [never] = changes([without("a")], [without("a")])
    assert (never.state, never.why) == (State.SAME, "measured in neither run")


@pytest.mark.parametrize(
    ("more", "uuid", "state"),
    [
        ({"timing": timing(metric=Metric.WALL)}, "GPU-2", State.MOVED),
        ({"timing": timing(metric=Metric.WALL)}, "GPU-1", State.REGRESSED),
        ({"host": True, "gpu": None}, None, State.MOVED),
        ({}, "GPU-2", State.REGRESSED),
        ({"timing": timing(metric=Metric.SCORE, unit="s (p95)")}, "GPU-2", State.MOVED),
        ({"timing": timing(metric=Metric.SCORE, unit="tokens/s")}, "GPU-2", State.MOVED),
        ({"timing": timing(metric=Metric.SCORE, unit="tokens per pass")}, "GPU-2", State.REGRESSED),
    ],
    ids=[
        *("wall, another machine", "wall, the same", "a host claim", "device time"),
        *("latency", "rate", "count"),
    ],
)
def test_a_figure_that_depends_on_the_host_moves_instead_of_regressing(more, uuid, state):
    gpu = uuid and dataclasses.replace(H200, uuid=uuid)
    [change] = changes([claim(**more)], [claim(speedup=1.5, **more | {"gpu": gpu})])
    assert change.state is state


def test_a_claim_is_compared_on_its_own_gpu_only():
    listed = changes([claim()], [claim(key="b200", speedup=1.0)])
    assert {(c.key, c.state) for c in listed} == {("h200", State.GONE), ("b200", State.NEW)}


def test_the_worst_come_first():
    old = [claim("a"), claim("b"), claim("c")]
    new = [claim("a"), claim("b", speedup=3.0), claim("c", speedup=1.0)]
    assert [c.claim for c in changes(old, new)] == ["c", "b", "a"]


def test_errors_of_both_runs_count():
    ratio = ratio_of(Interval(1.94, 2.0, 2.06), Interval(0.96, 1.0, 1.04))
    assert ratio.value == 2.0
    assert math.log(ratio.high / 2.0) == pytest.approx(math.hypot(0.03, 0.04), rel=0.05)
    assert math.isinf(ratio_of(Interval(0, 1, math.inf), Interval(1, 1, 1)).high)


def test_differences_of_the_stack_are_listed():
    old = [claim(stack={"torch": "2.10", "driver": "580"})]
    new = [claim(stack={"torch": "2.11", "driver": "580", "cuda": "13.0"})]
    assert stack_changes(old, new) == ["cuda none -> 13.0", "torch 2.10 -> 2.11"]
    [line] = stack_changes(old, [claim(stack=old[0].stack | {"torch": "2" * 10**6})])
    assert line == f"torch 2.10 -> {'2' * 80}... (1000000 characters)"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a function that writes results below a folder, which becomes the current one."""
    monkeypatch.chdir(tmp_path)

    def write(name, *results):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document_text(document(results, {}, datetime.now(UTC))))

    return write


def compared(capsys, *words):
    status = cli.main(["compare", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_folder_stands_for_its_latest_results(folder, capsys, tmp_path):
    folder("old/.aiperf/1/results.json", claim(speedup=9.0))
    folder("old/.aiperf/2/results.json", claim(speedup=2.0))
    (tmp_path / "old/.aiperf/latest").symlink_to("2")
    folder("runs/20260101/results.json", claim(speedup=9.0))
    folder("runs/20260102/results.json", claim(speedup=1.0))
    (tmp_path / "runs/20260102/floor-host.json").write_text("0.02")
    folder("accepted/h200.json", claim(speedup=1.0))
    folder("accepted/b200.json", claim(key="b200"))
    (tmp_path / "accepted/ceilings-h200.json").write_text("{}")
    lost = "regressed     h200  ch07/copy  0.500x [0.499, 0.501]\n"
    olds = ("old", "old/.aiperf", "old/.aiperf/2", "old/.aiperf/2/results.json")
    for new in ("runs", "runs/20260102"):
        for old in olds:
            assert compared(capsys, old, new) == (1, f"{lost}1 regressed\n", "")
    status, out, _ = compared(capsys, "old", "accepted")
    assert (status, out) == (1, f"{lost}new           b200  ch07/copy\n1 regressed, 1 new\n")
    assert compared(capsys, "old", "old")[:2] == (
        0,
        "same          h200  ch07/copy  1.000x [0.997, 1.003]\n1 same\n",
    )
    (tmp_path / "empty").mkdir()
    for wrong in ("empty", "absent"):
        status, _, err = compared(capsys, "old", wrong)
        assert (status, err) == (
            2,
            f"compare: {wrong} is not a results file, nor a folder with results of a run\n",
        )


def test_a_report_takes_a_folder_as_well(folder, capsys):
    assert cli.main(["report", ".aiperf/latest"]) == 2
    assert capsys.readouterr().err == (
        "report: .aiperf/latest: there is no run yet: pytest --gpu or pytest --cpu writes one\n"
    )
    folder(".aiperf/latest/results.json", claim())
    for name in (".aiperf/latest/results.json", ".aiperf/latest", ".aiperf", "."):
        assert cli.main(["report", name, "--format=csv"]) == 0
        assert "ch07/copy,h200," in capsys.readouterr().out
    assert cli.main(["report", ".aiperf/latest"]) == 0
    assert Path("report.html").exists()


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        ("compare a.json a.json", ""),
        ("compare a.json a.json", "1"),
        ("report --format=csv a.json", ""),
        ("report --format=csv a.json", "1"),
        ("--help", ""),  # if it is unbuffered, argparse ignores the error
    ],
)
def test_a_command_whose_output_nobody_reads_ends_without_a_message(words, unbuffered, folder):
    folder("a.json", claim())
    inlet, outlet = os.pipe()
    os.close(inlet)
    done = subprocess.run(
        [sys.executable, "-m", "pytest_aiperf", *words.split()],
        stdout=outlet,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(outlet)
    assert (done.returncode, done.stderr) == (141, "")


def test_runs_without_a_common_claim_are_no_success(folder, capsys):
    folder("a.json", claim(stack={}))
    folder("b.json", claim(key="b200", stack={}))
    status, out, _ = compared(capsys, "a.json", "b.json")
    assert status == 1
    assert out.endswith("the two runs have no claim on the same kind of GPU in common\n")


def test_a_pull_request_shows_what_changed(folder, capsys):
    folder("a.json", claim("ch07/a_b"), claim("b"), claim("c"))
    folder("b.json", claim("ch07/a_b", speedup=1.0), claim("b"), claim("c", speedup=2.1, half=0.1))
    status, out, _ = compared(capsys, "a.json", "b.json", "--format=md")
    assert status == 1
    assert out.split("\n") == [
        "**1 regressed, 1 inconclusive, 1 same**",
        "",
        "| state | claim | GPU | new / old speedup | note |",
        "|:--|:--|:--|--:|:--|",
        r"| regressed | ch07/a\_b | h200 | 0.500x \[0.499, 0.501\] |  |",
        (
            r"| inconclusive | c | h200 | 1.050x \[0.955, 1.155\] | "
            "the interval is not within 3.5% of 1, nor outside |"
        ),
        "",
    ]
    assert compared(capsys, "a.json", "a.json", "--format=md")[1] == "**3 same**\n"


def test_ratios_and_verdicts_are_written_as_csv(folder, capsys):
    folder("a.json", claim(), without('=HYPERLINK("x")', message="why, and\nwhere"))
    assert cli.main(["report", "a.json", "--format=csv"]) == 0
    measured, formula = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (measured["claim"], measured["gpu"], measured["verdict"]) == (
        "ch07/copy", "h200", "FASTER",
    )  # fmt: skip
    ratio, low, high = (float(measured[name]) for name in ("ratio", "low", "high"))
    assert (ratio, low, high) == pytest.approx((2.0, 1.996, 2.004), abs=5e-4)
    assert float(measured["baseline"]) / float(measured["optimized"]) == pytest.approx(ratio)
    assert (measured["metric"], measured["unit"]) == ("device", "s")
    assert formula["claim"] == '\'=HYPERLINK("x")'  # a spreadsheet does not evaluate it
    assert formula["message"] == "why, and where"
    assert (formula["ratio"], formula["baseline"], formula["verdict"]) == ("", "", "ERROR")


def test_a_comparison_is_written_as_csv(folder, capsys):
    folder("a.json", claim(), claim("b"))
    folder("b.json", claim(speedup=1.0), claim("b"))
    status, out, _ = compared(capsys, "a.json", "b.json", "--format=csv")
    assert status == 1
    worst, same = csv.DictReader(out.splitlines())
    assert (worst["claim"], worst["state"], float(worst["ratio"])) == (
        "ch07/copy", "regressed", pytest.approx(0.5),
    )  # fmt: skip
    assert (same["state"], same["note"]) == ("same", "")


def test_ratios_are_written_for_github_action_benchmark(folder, capsys):
    folder("a.json", claim(), without("lost"))
    assert cli.main(["report", "a.json", "--format=github-action-benchmark"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "ch07/copy (h200)",
            "unit": "x",
            "value": pytest.approx(2.0),
            "range": "[1.996, 2.004]",
            "extra": "FASTER",
        }
    ]
