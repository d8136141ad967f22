"""The script of docs/runner.md for cron judges each night once, and stops if pytest cannot run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_aiperf.model import Outcome
from pytest_aiperf.records.journal import Run
from pytest_aiperf.records.results import merge_results
from tests.plugin.records import result

RUNNER = Path(__file__).parents[2] / "docs/runner.md"
PYTEST = """\
#!/bin/sh
echo "$@" >> calls
run=$(grep -c . calls)
[ -d "$run" ] && ln -sfn "../$run" .aiperf/latest
exit $(cat "status-$run")
"""


@pytest.fixture
def night(tmp_path):
    """Run the script with a pytest that leaves these results, and ends with these statuses."""
    [script] = re.findall(r"^```sh\n(.*?)^```$", RUNNER.read_text(), re.MULTILINE | re.DOTALL)
    assert script.count("/home/me/project") == 1
    bin_, python = tmp_path / ".venv/bin", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    bin_.mkdir(parents=True)
    (tmp_path / ".aiperf").mkdir()
    for name, text in (("pytest", PYTEST), ("python", python)):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    (tmp_path / "night.sh").write_text(script.replace("/home/me/project", str(tmp_path)))

    def night(*runs):
        for number, (status, record) in enumerate(runs, 1):
            (tmp_path / f"status-{number}").write_text(str(status))
            if record is not None:
                run = Run(tmp_path / str(number))
                run.write_manifest([(record.claim, record.nodeid)])
                merge_results(run.path, [record], {})
                (run.path / "h200.json").rename(run.path / "results.json")
        (tmp_path / "calls").unlink(missing_ok=True)
        process = subprocess.run(
            ["/bin/sh", str(tmp_path / "night.sh")], cwd="/", env={**os.environ, "HOME": "/"},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return process.returncode, (tmp_path / "calls").read_text().splitlines(), process.stdout

    return night


def record(outcome=Outcome.PASSED, **more):
    return result(outcome=outcome, **more)


def test_a_night_ends_with_status_0_and_is_judged_only_once(night):
    status, calls, out = night((0, record()))
    assert (status, calls) == (0, ["--gpu -n auto"])
    assert "h200: 1 claims" in out
    assert night((0, record()))[0] == 2


@pytest.mark.parametrize("status", [2, 3, 4, 5, 127])
def test_if_pytest_cannot_run_nothing_is_judged(night, status):
    night((0, record(run="yesterday")))
    assert night((status, None)) == (1, ["--gpu -n auto"], "")


def test_a_wrong_result_ends_with_status_1(night):
    wrong = record(Outcome.FAILED, speedup=None, message="wrong result")
    status, _, out = night((1, wrong))
    assert status == 1
    assert "FAILED: ch07/copy[vector]: wrong result" in out


def test_a_failure_is_measured_twice_more(night):
    night((0, record(run="yesterday")))
    worse = [record(Outcome.FAILED, run=run) for run in ("tonight", "again 1", "again 2")]
    status, calls, out = night(*((1, each) for each in worse))
    assert (status, calls) == (1, ["--gpu -n auto", *["--gpu @flagged.txt"] * 2])
    assert "confirmed: ch07/copy[vector]: FAILED" in out
    (status, _, out) = night((1, record(Outcome.FAILED, run="tomorrow")))
    assert status == 0, out
