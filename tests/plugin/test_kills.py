"""Kill any process of a session at any time: finished results stay, and no process is left.

12 kills per run; ``pytest tests/plugin/test_kills.py -n 4 --hypothesis-profile=long`` tries 1,000.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from pytest_aiperf.machine import gpu_lock
from pytest_aiperf.records import expectations, journal, results
from pytest_aiperf.schema import to_json
from tests import fake_gpu, fork_server
from tests.plugin.conftest import HEAD, PATIENCE_S, STEADY

KILLS = 1_000 if settings.get_current_profile_name() == "long" else 12
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CLAIMS = 4

TESTS = f"{HEAD}@pytest.mark.parametrize('n', range({CLAIMS}))\ndef test_it(compare, n):\n"


@dataclass
class Session:
    folder: Path
    words: tuple[str, ...]

    def __post_init__(self):
        plugins = ("no:cacheprovider", "no:hypothesispytest", "tests.fake_gpu")
        words = [*(f"-p{name}" for name in plugins), "--gpu", "-v", *self.words]
        outer = ("PYTEST_", "TRITON_")  # set by the outer pytest run
        environ = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
        environ |= {
            gpu_lock.VARIABLE: str(self.folder / "locks"),
            fake_gpu.VARIABLE: json.dumps({"noise": STEADY}),
        }
        self.process = fork_server.start(words, environ, self.folder, ("out", "out"))

    @property
    def runs(self):
        return self.process.exitcode is None

    def roles(self):
        """Map roles to process ids: each role's processes are children of the previous role's."""
        names = ["controller", "worker", "supervisor", "claim"]
        if "-n0" in self.words:
            names.remove("worker")
        parents, found, level = family(self.folder), {}, {self.process.pid}
        for name in names:
            if level:
                found[name] = sorted(level)
            level = {pid for pid, parent in parents.items() if parent in level}
        return found

    def ends(self):
        """Wait until the session and all its descendants have ended; return whether they have."""
        self.process.join(PATIENCE_S)
        wait(lambda: not family(self.folder), PATIENCE_S)
        return not self.runs and not family(self.folder)


def family(folder):
    """Map each process to its parent, for the processes whose working directory is ``folder``."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if (process / "cwd").readlink() == folder:
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                found[int(process.name)] = int(parent)
    return found


def wait(until, seconds):
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.005)


def shown(folder):
    """Return the claims that the terminal shows as faster, with and without xdist."""
    out = (folder / "out").read_text() if (folder / "out").exists() else ""
    found = re.findall(r"(it\[\d\]) FASTER|FASTER 2x \S+::test_(it\[\d\])", out)
    return {f"ch07/{a or b}" for a, b in found}


def journaled(folder):
    found = {}
    for path in folder.glob(".aiperf/*/journal-*.jsonl"):
        *lines, _ = path.read_text().split("\n")  # the last line is incomplete without its newline
        found |= {record["claim"]: record for record in map(json.loads, filter(None, lines))}
    return found


def records(path):
    return {r.claim: to_json(r) for r in results.read_results(path)}


def attack(folder, draw):
    """Start a session and kill one of its processes; return None if that process had ended."""
    (folder / "ch07").mkdir(parents=True)
    (folder / "ch07" / "test_double.py").write_text(f"{TESTS}    compare(**usual)\n")
    (folder / "expectations.yaml").write_text("schema: 1\nclaims: {}\n")
    update = draw.choice([(), ("--update-expectations",)])
    attacked = Session(folder, (draw.choice(["-n0", "-n2"]), *update))
    after, signum = draw.randint(0, CLAIMS), draw.choice(SIGNALS)
    wait(lambda: len(journaled(folder)) >= after or not attacked.runs, PATIENCE_S)
    time.sleep(draw.random() * (0.15 if after else 2.0 if "-n2" in attacked.words else 0.5))
    roles = attacked.roles()
    role = draw.choice(sorted(roles))
    # in this order: a claim is journaled before it is shown
    finished = shown(folder), journaled(folder)
    try:
        os.kill(draw.choice(roles[role]), signum)
    except ProcessLookupError:
        return None
    return attacked, role, signum, *finished


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_kill_costs_no_finished_result_and_leaves_no_process(tmp_path, seed, record_property):
    draw = random.Random(seed)
    tries = (attack(tmp_path / str(n), draw) for n in itertools.count())
    attacked, role, signum, shown_claims, kept = next(filter(None, tries))
    folder = attacked.folder
    case = f"{signum.name} to the {role} of {' '.join(attacked.words)}, {len(kept)} finished"
    record_property("case", case)  # for --junitxml
    assert attacked.ends(), f"{case}: a hang, or orphans: {family(folder)}"
    assert shown_claims <= kept.keys(), case

    for path in folder.rglob("*.json"):
        results.read_json(path)
    expectations.load(folder / "expectations.yaml")
    for manifest in folder.glob(".aiperf/*/manifest.json"):
        found, torn = journal.read_journals(manifest.parent)
        assert not torn, case
        assert kept.items() <= {r.claim: to_json(r) for r in found}.items(), case
    merged = folder / ".aiperf" / "latest" / "results.json"
    if merged.exists():
        assert kept.items() <= records(merged).items(), case
        assert len(records(merged)) == CLAIMS, case
    # without a manifest, a worker died while starting, and xdist ended the session
    if role != "controller" and list(folder.glob(".aiperf/*/manifest.json")):
        outcomes = [record["outcome"] for record in records(merged).values()]
        stops = role == "worker" and signum != signal.SIGKILL  # the worker then ends by itself
        assert stops or outcomes.count("PASSED") >= CLAIMS - 1, case

    following = Session(folder, ("-n0",))
    assert following.ends(), f"after {case}: a hang"
    assert following.process.exitcode == 0, f"after {case}"
    passed = [record["outcome"] for record in records(merged).values()]
    assert passed == ["PASSED"] * CLAIMS, f"after {case}"
