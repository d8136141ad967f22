"""Read what GPU jobs left, as data: a summary, their history and what can be accepted of them.

usage: python .github/digest.py HOSTILE PAST

HOSTILE holds the artefacts, PAST the history so far. published/history and published/accepted are
what the later jobs commit. Nothing of HOSTILE is run, no link in it followed, no name of it used.
"""

from __future__ import annotations

import contextlib
import filecmp
import io
import os
import secrets
import shutil
import sys
from pathlib import Path

from pytest_aiperf.__main__ import main
from pytest_aiperf.commands import DONE

LARGEST = 64 << 20
"""More bytes than this are not read into memory."""


def clean(hostile: Path, name: str) -> Path | None:
    """Rewrite a results file by way of the schema; None, and a word in the log, where it fails."""
    if hostile.is_symlink() or not hostile.is_file():
        return None
    written = Path("clean", name)
    if (
        hostile.stat().st_size > LARGEST
        or main(["merge", str(hostile), "-o", str(written)]) != DONE
    ):
        sys.stdout.write("passed over: results that no night writes\n")
        return None
    return written


def digest(hostile: Path, past: Path) -> None:
    history, accepted = Path("published/history"), Path("published/accepted")
    history.mkdir(parents=True)
    for file in past.glob("*.jsonl"):
        shutil.copy(file, history)
    now = {Path("expectations.yaml"), *Path("results").glob("*.json")}
    for file in now:
        if file.exists():
            (accepted / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, accepted / file)
    summary = Path(os.environ.get("GITHUB_STEP_SUMMARY", "published/summary.md"))
    nights = sorted(hostile.rglob("results.json"))
    for number, results in enumerate(nights):
        night = clean(results, f"{number}.json")
        if night is None:
            continue
        fresh = [
            again
            for i in (1, 2)
            if (again := clean(results.with_name(f"again-{i}.json"), f"{number}-{i}.json"))
        ]
        words = ["--again", *map(str, fresh)] if fresh else []
        # what it finds has failed the night itself: here it only writes the history
        main(["gate", str(night), "--history", str(history), *words])
        main(["report", str(night), "--format=md", "-o", "clean/summary.md"])
        with summary.open("a", encoding="utf-8") as file:
            file.write(Path("clean/summary.md").read_text(encoding="utf-8") + "\n")
        where = ("--expectations", "expectations.yaml"), ("--results", "results")
        main(["accept", str(night), *(w for o, p in where for w in (o, str(accepted / p)))])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for file in sorted(history.glob("*.jsonl")):
            main(["drift", str(file)])
    if said.getvalue():  # `merge` took no name with a line break, so the block ends where it does
        with summary.open("a", encoding="utf-8") as file:
            file.write(f"Lasting steps in the history:\n\n```text\n{said.getvalue()}```\n")
    shutil.rmtree(accepted / ".aiperf", ignore_errors=True)  # the lock of what is accepted
    for file in now:
        if file.exists() and filecmp.cmp(file, accepted / file, shallow=False):
            (accepted / file).unlink()


if __name__ == "__main__":
    # what is printed of hostile names must not be read as a command to the runner
    resume = secrets.token_hex(16)
    sys.stdout.write(f"::stop-commands::{resume}\n")
    digest(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write(f"::{resume}::\n")
