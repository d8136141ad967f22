"""Projects in temporary folders, in which tests run pytest on a fake GPU."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import scipy.special  # noqa: F401  a run of pytester's forgets what it is the first to import

from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.machine.isolation import arm_parent_death
from tests import fork_server
from tests.fake_gpu import VARIABLE

PATIENCE_S = 600
"""Seconds after which a run counts as hung: far more than it takes on a busy machine, and more than
the deadline of a claim."""

STEADY = {
    "white": 0.001, "tail": 0, "drift": 0, "ramp": 0, "throttle_per_s": 0, "layout": 0.001,
    "jump_chance": 0,
}  # fmt: skip

HEAD = '''\
"""Half the work takes half the time."""

import os, signal, subprocess, sys, time

import numpy as np
import pytest

from tests.fake_gpu import spend


def vectors(bench):
    return (np.random.default_rng(bench.seed).random(bench.size(64, check=8)),)


def doubling(microseconds):
    def double(x):
        spend(microseconds * 1e-6)
        return x * 2
    return double


slow, fast = doubling(200), doubling(100)
usual = {"baseline": slow, "optimized": fast, "inputs": vectors, "reference": lambda x: x + x}


'''


@pytest.fixture(scope="session", autouse=True)
def fake_gpu_on_path():
    """Let pytest runs in other processes import ``tests.fake_gpu``."""
    root = str(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", root, prepend=os.pathsep)
        # Python takes a module for unchanged if it was rewritten within a second, in the same size
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        yield


class Project:
    """A folder with tests, in which pytest runs."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self.path = pytester.path
        self.monkeypatch = monkeypatch
        self.runs = 0
        monkeypatch.setenv("PYTEST_AIPERF_LOCKS", str(self.path / "locks"))
        monkeypatch.setenv("COLUMNS", "140")  # transcripts must not depend on the terminal
        # the outer pytest run sets these; the inner one must not inherit them
        outer = ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
        # tests expect a thread per core, as the libraries choose by default
        threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        # with these, pytest's summary repeats whole messages, and Python buffers no output
        for name in (*outer, "CI", "BUILD_NUMBER", "PYTHONUNBUFFERED", *threads):
            monkeypatch.delenv(name, raising=False)
        self.fake(noise=STEADY)

    def fake(self, **machine: object) -> None:
        """Configure the fake machine of later runs."""
        self.monkeypatch.setenv(VARIABLE, json.dumps({"noise": STEADY} | machine))

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def tests(self, text: str, name: str = "ch07/test_double.py") -> Path:
        return self.write(name, HEAD + text)

    def command(self, *arguments: str) -> list[str]:
        plugins = ("no:cacheprovider", "no:hypothesispytest", "tests.fake_gpu")
        return [*(f"-p{name}" for name in plugins), *arguments]

    def run(self, *arguments: str) -> pytest.RunResult:
        """Run pytest, as pytester's runpytest_subprocess does, but in a fork."""
        self.runs += 1
        words = [f"--basetemp={self.path}/runpytest-{self.runs}", *self.command(*arguments)]
        print("running: pytest", *words, "\n     in:", self.path)
        outputs = f"stdout-{self.runs}", f"stderr-{self.runs}"
        begun = time.monotonic()
        process = fork_server.start(words, os.environ, self.path, outputs)
        process.join(PATIENCE_S)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            raise self.pytester.TimeoutExpired(f"pytest took more than {PATIENCE_S} s")
        seconds = time.monotonic() - begun
        out, err = ((self.path / name).read_text("utf-8").splitlines() for name in outputs)
        print(*out, *err, sep="\n")
        return pytest.RunResult(process.exitcode, out, err, seconds)

    def start(self, *arguments: str):
        """Start pytest as the leader of a session, as in a terminal, and return before it ends."""
        command = self.pytester._getpytestargs()  # as in runpytest_subprocess
        out = (self.path / "out").open("wb")
        return self.pytester.popen(
            [*command, *self.command(*arguments)],
            stdout=out,
            stderr=out,
            start_new_session=True,
            # a shell's background processes ignore SIGINT, and child processes inherit that
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    def results(self, run: str = "latest") -> dict[str, dict]:
        """Read the record of each claim from the results of a run."""
        return by_claim(json.loads((self.path / ".aiperf" / run / "results.json").read_text()))

    def journaled(self) -> dict[str, str]:
        """Read each claim's outcome from the journals of the only run."""
        lines = []
        for journal in (self.path / ".aiperf").glob("*/journal-*.jsonl"):
            complete, _, _ = journal.read_text().rpartition("\n")  # the last line may be incomplete
            lines += [json.loads(line) for line in complete.splitlines() if line]
        return {record["claim"]: record["outcome"] for record in lines}

    def processes(self) -> list[str]:
        """List the command lines of all processes whose working directory is this project."""
        commands = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                is_in_project = (process / "cwd").readlink() == self.path
                if is_in_project and int(process.name) != os.getpid():
                    commands.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # the process has ended, or belongs to another user
        return commands


@contextmanager
def preparing_claim(folder: Path, *gpus: str) -> Iterator[int]:
    """Start a claim that prepares, as one of another pytest run; yield its process id."""
    ready, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        arm_parent_death()
        with GpuLock(gpus, folder, pausable=True).shared():
            os.write(write, b"+")
            time.sleep(PATIENCE_S)
        os._exit(0)
    try:
        os.read(ready, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(write)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


def by_claim(document: dict) -> dict[str, dict]:
    records = [entry["aiperf"] for entry in document["benchmarks"] if "aiperf" in entry]
    return {r["claim"]: r for r in records + document.get("aiperf_untimed", [])}


@pytest.fixture
def project(pytester, monkeypatch) -> Project:
    return Project(pytester, monkeypatch)
