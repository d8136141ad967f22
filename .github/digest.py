"""Summarize the results of GPU jobs, extend the history and accept what passed.

usage: python .github/digest.py UNTRUSTED PAST

UNTRUSTED is the folder of downloaded artifacts, PAST the history so far. Later jobs commit
published/history and published/accepted. Artifacts are read as data only: nothing in UNTRUSTED is
executed, no link is followed, and no file name is reused.
"""

from __future__ import annotations

import contextlib
import filecmp
import io
import json
import os
import secrets
import shutil
import sys
from pathlib import Path

from pytest_aiperf.cli import DONE, main
from pytest_aiperf.model import Outcome

MAX_BYTES = 64 << 20
"""Largest results file that is read: dozens of times the size of a full run's."""
SENTINELS = str(Path(__file__).with_name("sentinels.txt"))


def validate(untrusted: Path, name: str) -> Path | None:
    """Validate a results file against the schema and rewrite it; return None if it is invalid."""
    if untrusted.is_symlink() or not untrusted.is_file():
        return None
    valid = Path("valid", name)
    if (
        untrusted.stat().st_size > MAX_BYTES
        or main(["merge", str(untrusted), "-o", str(valid)]) != DONE
    ):
        sys.stdout.write("skipped: not a valid results file\n")
        return None
    return valid


def only_passed(valid: Path) -> Path:
    """Write a results file without the claims that did not pass.

    `accept` would take a claim that failed only because it dropped. A drop that is meant to last is
    accepted by a person, not by a pull request of each night.
    """
    content = json.loads(valid.read_text(encoding="utf-8"))
    for name, rows in content.items():
        if name in ("benchmarks", "aiperf_untimed"):
            content[name] = [r for r in rows if r.get("aiperf", r)["outcome"] == Outcome.PASSED]
    passed = valid.with_name("passed.json")
    passed.write_text(json.dumps(content), encoding="utf-8")
    return passed


def digest(untrusted: Path, past: Path) -> None:
    history, accepted = Path("published/history"), Path("published/accepted")
    history.mkdir(parents=True)
    for file in past.glob("*.jsonl"):
        shutil.copy(file, history)
    committed = {Path("expectations.yaml"), *Path("results").glob("*.json")}
    for file in committed:
        if file.exists():
            (accepted / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, accepted / file)
    summary = Path(os.environ.get("GITHUB_STEP_SUMMARY", "published/summary.md"))
    nights = sorted(untrusted.rglob("results.json"))
    for number, results in enumerate(nights):
        night = validate(results, f"{number}.json")
        if night is None:
            continue
        repeats = [
            again
            for i in (1, 2)
            if (again := validate(results.with_name(f"again-{i}.json"), f"{number}-{i}.json"))
        ]
        arguments = ["--again", *map(str, repeats)] if repeats else []
        # its exit status is ignored: the nightly workflow has failed for a regression already,
        # and here the gate only extends the history
        arguments += ["--history", str(history), "--sentinels", SENTINELS]
        main(["gate", str(night), *arguments])
        main(["report", str(night), "--format=md", "-o", "valid/summary.md"])
        with summary.open("a", encoding="utf-8") as file:
            file.write(Path("valid/summary.md").read_text(encoding="utf-8") + "\n")
        expectations, folder = str(accepted / "expectations.yaml"), str(accepted / "results")
        passed = only_passed(night)
        main(["accept", str(passed), "--expectations", expectations, "--results", folder])
    drifts = io.StringIO()
    with contextlib.redirect_stdout(drifts):
        for file in sorted(history.glob("*.jsonl")):
            main(["drift", str(file)])
    if drifts.getvalue():  # `merge` refuses names with line breaks, which could end the code block
        with summary.open("a", encoding="utf-8") as file:
            file.write(f"Lasting changes in the history:\n\n```text\n{drifts.getvalue()}```\n")
    shutil.rmtree(accepted / ".aiperf", ignore_errors=True)  # the lock that `accept` took
    for file in committed:
        if file.exists() and filecmp.cmp(file, accepted / file, shallow=False):
            (accepted / file).unlink()


if __name__ == "__main__":
    # an untrusted name in the output must not act as a workflow command
    resume = secrets.token_hex(16)
    sys.stdout.write(f"::stop-commands::{resume}\n")
    digest(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write(f"::{resume}::\n")
