"""`python -m pytest_aiperf accept`, and the command line that all commands share."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aiperf import cli
from pytest_aiperf.cli import main
from pytest_aiperf.model import SCHEMA, Interval, Outcome
from pytest_aiperf.records import expectations
from pytest_aiperf.records.results import read_results
from pytest_aiperf.schema import to_json
from tests.plugin.records import result, timing_of

MACHINE = {"system": "Linux", "gpus": [{"name": "NVIDIA H200", "driver": "580.159"}]}


def document(*results):
    benchmarks = [{"name": r.claim, "aiperf": to_json(r)} for r in results]
    return {"machine_info": MACHINE, "benchmarks": benchmarks}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Write a results file and accept it; return the exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(content, *options):
        text = content if isinstance(content, str) else json.dumps(content)
        Path("run.json").write_text(text)
        try:
            status = main(["accept", "run.json", *options])
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


def files():
    return sorted(str(p) for p in Path().rglob("*") if p.is_file() and ".aiperf" not in p.parts)


def test_accepts_and_says_what_it_wrote(run):
    status, out, err = run(document(result("ch06/a"), result("ch06/b[x]", quick=True)))
    assert (status, err) == (0, "")
    assert out.splitlines()[:2] == [
        "accepted ch06/a on h200: 2.011x [2.000, 2.022]",
        "refused ch06/b[x] on h200: it was measured with --quick; measure it without",
    ]
    assert "+  ch06/a:" in out
    assert out.splitlines()[-1] == "1 accepted, 1 refused; expectations.yaml written"
    assert list(expectations.load(Path("expectations.yaml")).claims) == ["ch06/a"]
    assert [r.claim for r in read_results(Path("results/h200.json"))] == ["ch06/a"]


def test_results_are_replaced_claim_by_claim(run):
    run(document(result("ch06/a"), result("ch06/b")))
    faster = result("ch06/b", run="r2", timing=timing_of(baseline=Interval(2.9, 3.0, 3.1)))
    lost = result("ch06/a", run="r2", outcome=Outcome.INVALID, speedup=None)
    assert run(document(lost, faster))[0] == 0
    kept = read_results(Path("results/h200.json"))
    assert [(r.claim, r.run) for r in kept] == [("ch06/a", "run"), ("ch06/b", "r2")]
    assert json.loads(Path("results/h200.json").read_text())["machine_info"] == MACHINE


def test_a_result_is_accepted_once(run):
    accepted, other = result("ch06/a"), result("ch06/b")
    run(document(accepted))
    before = Path("expectations.yaml").read_text()
    status, out, _ = run(document(accepted))
    assert (status, Path("expectations.yaml").read_text()) == (0, before)
    assert out.splitlines() == [
        "already accepted ch06/a on h200: of run run",
        "0 accepted, 0 refused, 1 already accepted; expectations.yaml unchanged",
    ]
    assert "1 accepted, 0 refused, 1 already accepted" in run(document(accepted, other))[1]
    run(document(result("ch06/a", run="r2")))  # another run with the same figures counts
    recorded = expectations.load(Path("expectations.yaml")).claims
    assert [recorded[f"ch06/{name}"].recorded["h200"].runs for name in "ab"] == [2, 1]


def test_a_result_is_accepted_if_its_entry_was_lost(run):
    run(document(result("ch06/a")))
    Path("expectations.yaml").unlink()
    assert run(document(result("ch06/a")))[1].startswith("accepted ch06/a on h200")
    assert list(expectations.load(Path("expectations.yaml")).claims) == ["ch06/a"]


def test_each_gpu_has_its_results(run):
    several = result("ch06/a", key="2xh200")
    assert run(document(result("ch06/a"), several), "--results", "out")[0] == 0
    assert files() == ["expectations.yaml", "out/2xh200.json", "out/h200.json", "run.json"]
    assert set(expectations.load(Path("expectations.yaml")).claims["ch06/a"].recorded) == {
        "h200",
        "2xh200",
    }


def test_another_expectations_file(run):
    assert run(document(result("ch06/a")), "--expectations", "other.yaml")[0] == 0
    assert "other.yaml" in files()
    assert "expectations.yaml" not in files()


def test_the_folder_of_a_run_stands_for_its_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/results.json").write_text(json.dumps(document(result("ch06/a"))))
    assert main(["accept", "run"]) == 0
    assert json.loads(Path("results/h200.json").read_text())["machine_info"] == MACHINE
    assert main(["merge", "run", "-o", "merged.json"]) == 0
    assert json.loads(Path("merged.json").read_text())["machine_info"] == MACHINE


def test_dry_run_writes_nothing(run):
    status, out, _ = run(document(result("ch06/a")), "--dry-run")
    assert status == 0
    assert "+  ch06/a:" in out
    assert out.endswith("expectations.yaml unchanged\n")
    assert files() == ["run.json"]


def test_everything_refused_is_status_1(run):
    status, out, err = run(document(result("ch06/a", quick=True)))
    assert (status, err, files()) == (1, "", ["run.json"])
    assert out.endswith("0 accepted, 1 refused; expectations.yaml unchanged\n")


def test_nothing_to_do_is_status_0(run):
    status, out, _ = run({"benchmarks": [], "aiperf_untimed": []})
    assert (status, files()) == (0, ["run.json"])
    assert out == "0 accepted, 0 refused; expectations.yaml unchanged\n"


GOOD = json.dumps(document(result("ch06/a")))
BAD = {
    "torn": (GOOD[: len(GOOD) // 2], "run.json:1:"),
    "empty": ("", "run.json:1:1"),
    "nan": (GOOD.replace('"floor": 0.004', '"floor": NaN'), "floor"),
    "infinite": (GOOD.replace('"floor": 0.004', '"floor": 1e999'), "floor"),
    "key twice": (GOOD.replace('"floor": 0.004', '"floor": 0.004, "floor": 0.1'), "twice"),
    "wrong type": (GOOD.replace('"quick": false', '"quick": 0'), "quick"),
    "unknown field": (GOOD.replace('"quick"', '"quicker"'), "quicker"),
    "newer": (GOOD.replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}'), "newer"),
    "list": ("[]", "an object is needed"),
    "no claims": ("{}", "no record of a claim"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_sentence_and_status_2(kind, run):
    text, message = BAD[kind]
    status, out, err = run(text)
    assert (status, out) == (2, "")
    assert err.startswith("accept: ")
    assert message in err
    assert err.count("\n") == 1
    assert "expectations.yaml" not in files()
    assert not Path("results").exists()


def test_a_missing_or_binary_file_is_status_2(run, capsys):
    assert main(["accept", "missing.json"]) == 2
    assert "cannot read missing.json" in capsys.readouterr().err
    Path("binary.json").write_bytes(b"\xff\x00")
    assert main(["accept", "binary.json"]) == 2
    assert capsys.readouterr().err.startswith("accept: binary.json: ")


def test_bad_expectations_are_status_2_and_left_alone(run):
    text = "schema: 1\nclaims:\n  a/b: {}\n  a/b: {}\n"
    Path("expectations.yaml").write_text(text)
    status, _, err = run(document(result("ch06/a")))
    assert status == 2
    assert err.startswith("accept: expectations.yaml:4:3: claims: a/b occurs twice")
    assert Path("expectations.yaml").read_text() == text
    assert not Path("results").exists()


def test_results_that_cannot_be_written_leave_the_expectations_alone(run):
    Path("results").write_text("a file where a folder is needed")
    status, _, err = run(document(result("ch06/a")))
    assert (status, err.count("\n")) == (2, 1)
    assert "results" in err
    assert not Path("expectations.yaml").exists()


def test_a_damaged_results_file_stops_the_update(run):
    Path("results").mkdir()
    Path("results/h200.json").write_text("{")
    status, _, err = run(document(result("ch06/a")))
    assert status == 2
    assert "results/h200.json" in err
    assert not Path("expectations.yaml").exists()


def test_a_lock_file_that_cannot_be_opened_is_status_2(run):
    Path(".aiperf/expectations.yaml.lock").mkdir(parents=True)
    status, _, err = run(document(result("ch06/a")))
    assert status == 2
    assert re.fullmatch(r"accept: cannot write \S+\.lock: Is a directory; a folder has .*\n", err)
    assert files() == ["run.json"]


def test_a_read_only_file_is_status_2(run):
    run(document(result("ch06/a")))
    before = Path("results/h200.json").read_text(), Path("expectations.yaml").read_text()
    Path("expectations.yaml").chmod(0o444)
    status, _, err = run(document(result("ch06/a", run="r2")))
    assert status == 2
    assert "is read-only" in err
    assert (Path("results/h200.json").read_text(), Path("expectations.yaml").read_text()) == before


@pytest.mark.parametrize("arguments", [[], ["publish"], ["accept"], ["accept", "a", "--force"]])
def test_wrong_arguments_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m pytest_aiperf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--help"], "accept    Write a run's figures into expectations.yaml and results/"),
        (["accept", "--help"], "--dry-run            show what would change, and write nothing"),
    ],
)
def test_help_reads_well(arguments, message, tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(expectations.__file__).parents[2]), "COLUMNS": "100"}
    command = [sys.executable, "-m", "pytest_aiperf", *arguments]
    shown = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert message in shown.stdout
    assert shown.stderr == ""


def test_commands_of_other_packages_are_found(monkeypatch, capsys):
    def add_command(subcommands):
        parser = subcommands.add_parser("greet", help="greet somebody")
        parser.add_argument("name_")
        parser.set_defaults(run=lambda given: print("hello", given.name_) or 3)

    entry = SimpleNamespace(load=lambda: add_command)
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry])
    assert main(["greet", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"


def test_a_command_that_cannot_be_loaded_costs_only_itself(monkeypatch, capsys):
    def load():
        loaded.append("broken")
        raise ModuleNotFoundError("No module named 'gone'")

    loaded = []
    entries = [
        SimpleNamespace(name="prove", value="theirs.cli:add", load=load),
        SimpleNamespace(name="drift", load=lambda: lambda commands: commands.add_parser("drift")),
    ]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)
    assert main(["prove", "--any-option"]) == 2
    why = "(ModuleNotFoundError: No module named 'gone')"
    message = f"prove: theirs.cli:add cannot be loaded {why}; install it again\n"
    assert capsys.readouterr() == ("", message)
    with pytest.raises(SystemExit, match="0"):
        main(["drift", "--help"])
    assert loaded == ["broken"] * 2
    with pytest.raises(SystemExit, match="0"):
        main(["clean", "--help"])
    assert loaded == ["broken"] * 2  # a built-in command loads no entry point


@pytest.mark.parametrize(
    ("command", "folder"), [("prove", "selfcheck"), ("gate", "nightly"), ("drift", "nightly")]
)
def test_a_command_of_a_missing_distribution_names_what_to_install(
    command, folder, monkeypatch, capsys
):
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    assert main([command, "--any-option"]) == 2
    message = f"{command}: not installed; install it from a clone: pip install ./{folder}\n"
    assert capsys.readouterr() == ("", message)
    assert (Path(__file__).parents[2] / folder / "pyproject.toml").is_file()
