"""A broken claim costs only itself; a run that is interrupted keeps its finished results.

Each fault is injected once per run, or 20 times with ``--hypothesis-profile=long``.
"""

import os
import re
import signal
import time

import pytest
from hypothesis import settings

from pytest_aiperf.records.journal import read_manifest, unfinished
from tests.plugin.conftest import PATIENCE_S, is_stopped, preparing_claim

TIMES = 20 if settings.get_current_profile_name() == "long" else 1
SIGNALS = ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGBUS", "SIGILL", "SIGKILL")

BAD = f"""
@pytest.fixture(autouse=True, params=range({TIMES}))
def again():
    pass

@pytest.mark.parametrize("name", {SIGNALS})
def test_signal(compare, name):
    os.kill(os.getpid(), signal.Signals[name])

def test_exit(compare):
    os._exit(0)

def test_raise(compare):
    raise ValueError("a bug")

def test_memory(compare):
    compare(**usual | {{"optimized": lambda x: bytearray(1 << 60)}})

def test_memory_limit(compare):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
    compare(**usual | {{"optimized": lambda x: bytearray(1 << 34)}})

def test_sys_exit(compare):
    sys.exit(0)

def test_after_the_verdict(compare):
    compare(**usual)
    os._exit(3)

def test_child(compare):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    compare(**usual)

def test_good(compare):
    compare(**usual)
"""

SAID = {
    **{f"ch07/signal[{name}]": ("ERROR", f"killed by {name}") for name in SIGNALS},
    "ch07/exit": ("ERROR", "ended with exit code 0 without a result"),
    "ch07/raise": ("ERROR", "ValueError: a bug"),
    "ch07/memory": ("ERROR", "MemoryError"),
    "ch07/memory_limit": ("ERROR", "MemoryError"),
    "ch07/sys_exit": ("ERROR", "SystemExit: 0"),
    "ch07/after_the_verdict": ("ERROR", "ended with exit code 3"),
    "ch07/child": ("PASSED", ""),
    "ch07/good": ("PASSED", ""),
}


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_only_the_claim_that_goes_wrong_fails(project, workers):
    project.tests(f"import resource\n{BAD}")
    words = project.command("--gpu", workers)
    done = project.pytester.runpytest_subprocess(*words, timeout=PATIENCE_S * TIMES)
    done.assert_outcomes(passed=2 * TIMES, failed=(len(SAID) - 2) * TIMES)
    results = project.results()
    assert len(results) == len(SAID) * TIMES
    for claim, found in results.items():
        outcome, message = SAID[re.sub(r"\b\d+-|\[\d+\]", "", claim)]
        assert found["outcome"] == outcome, claim
        assert message in found["message"], claim
    assert not project.processes()


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_claim_that_hangs_costs_itself(project, workers):
    # the deadline passes as soon as the claim hangs, however busy the machine is
    project.write(
        "conftest.py",
        "from pytest_aiperf.machine.isolation import _Deadline\n"
        "update = _Deadline.update\n"
        "def update_or_pass(deadline, kind):\n"
        "    update(deadline, kind)\n"
        "    if kind == 'hangs': deadline._end = 0.0\n"
        "_Deadline.update = update_or_pass\n",
    )
    project.tests(
        "from pytest_aiperf.session import SESSION\n"
        "def test_hang(compare, request):\n"
        "    print('on my way')\n"
        "    request.config.stash[SESSION].send('hangs')\n"
        "    time.sleep(600)\n"
        "def test_good(compare): compare(**usual)\n"
    )
    done = project.run("--gpu", workers, "-oaiperf_deadline=200")
    command = read_manifest((project.path / ".aiperf" / "latest").resolve()).command
    assert f"--gpu {workers} -oaiperf_deadline=200" in command
    done.assert_outcomes(passed=1, failed=1)
    assert "exceeded its deadline of 200 s" in project.results()["ch07/hang"]["message"]
    assert not project.processes()
    done.stdout.fnmatch_lines(["*Captured stdout of the lost process*", "on my way"])


def test_a_flood_of_output_costs_no_verdict(project):
    project.tests(
        f"@pytest.mark.parametrize('n', range({TIMES}))\n"
        "def test_text(compare, n):\n"
        "    print('x' * (17 << 20) + ' the end')\n"
        "    compare(**usual)\n"
        f"@pytest.mark.parametrize('n', range({TIMES}))\n"
        "def test_junk(compare, n):\n"
        "    os.write(1, os.urandom(4 << 20))\n"
        "    compare(**usual)\n"
        "def test_lost(compare):\n"
        "    print('x' * (17 << 20) + ' the end', flush=True)\n"
        "    os._exit(3)\n"
    )
    done = project.run("--gpu")
    done.assert_outcomes(passed=2 * TIMES, failed=1)
    assert {r["verdict"] for r in project.results().values()} == {"FASTER", None}
    done.stdout.fnmatch_lines(["[[]* characters before this left out]", "x* the end"])
    assert len(done.stdout.str()) < 1 << 20


STOPPED = """
@pytest.mark.parametrize("n", range(3))
def test_done(compare, n):
    compare(**usual)

@pytest.mark.parametrize("n", range(3))
def test_long(compare, n):
    time.sleep(600)
"""


def begin(project, *words):
    """Start a run, and return it once three claims are recorded and the long claims run."""
    project.tests(STOPPED)
    project.write("expectations.yaml", "schema: 1\nclaims: {}\n")
    run = project.start("--gpu", "--update-expectations", *words)
    wait(lambda: len(project.journaled()) == 3)
    wait(lambda: unfinished(next(project.path.glob(".aiperf/*/manifest.json")).parent))
    return run


def wait(until):
    limit = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < limit
        time.sleep(0.05)


def check_kept(project):
    assert project.journaled() == {f"ch07/done[{n}]": "PASSED" for n in range(3)}
    assert (project.path / "expectations.yaml").read_text() == "schema: 1\nclaims: {}\n"
    wait(lambda: not project.processes())


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_lists_finished_and_missing_claims(project, workers, signum):
    run = begin(project, workers)
    run.send_signal(signum)
    assert run.wait(PATIENCE_S) == pytest.ExitCode.INTERRUPTED
    check_kept(project)
    outcomes = [r["outcome"] for r in project.results().values()]
    assert (outcomes.count("PASSED"), outcomes.count("NOT_RUN")) == (3, 3)
    reasons = [r["message"] for r in project.results().values() if r["outcome"] == "NOT_RUN"]
    assert any(re.fullmatch(r"interrupted after \d+ s of: starting", reason) for reason in reasons)
    out = (project.path / "out").read_text()
    assert "expectations: untouched, the session was interrupted" in out
    assert "INTERNALERROR" not in out


@pytest.mark.parametrize("workers", [["-n0"], ["-n1", "--max-worker-restart=0"]])
def test_a_run_that_is_ended_while_it_collects_writes_no_incomplete_manifest(project, workers):
    project.tests("def test_it(compare): compare(**usual)")
    project.write("ch07/test_ends.py", "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    assert project.run("--gpu", *workers).ret == pytest.ExitCode.INTERRUPTED
    assert not list(project.path.glob(".aiperf/*/manifest.json"))


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_terminals_ctrl_c_reaches_all_processes_at_once(project, workers):
    run = begin(project, workers)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(PATIENCE_S) == 2
    check_kept(project)
    assert sum(r["outcome"] == "PASSED" for r in project.results().values()) == 3


@pytest.mark.parametrize("again", range(TIMES))
@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_second_ctrl_c_loses_nothing_either(project, workers, again):
    run = begin(project, workers)
    os.killpg(run.pid, signal.SIGINT)
    time.sleep(again * 0.02)  # vary the moment at which the second signal arrives
    os.killpg(run.pid, signal.SIGINT)
    run.wait(PATIENCE_S)
    check_kept(project)


def test_a_second_ctrl_c_before_pytest_has_noted_the_first_is_an_interruption(project):
    project.write("conftest.py", "def pytest_keyboard_interrupt(): raise KeyboardInterrupt")
    run = begin(project)
    run.send_signal(signal.SIGINT)
    run.wait(PATIENCE_S)
    check_kept(project)
    assert "interrupted" in (project.path / "out").read_text()


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_run_whose_controller_is_killed_keeps_its_journals(project, workers):
    run = begin(project, workers)
    run.kill()
    run.wait(PATIENCE_S)
    check_kept(project)


def test_a_worker_that_is_killed_costs_its_claim(project):
    project.tests(
        "def test_murder(compare):\n"
        "    # this process, its supervisor, the worker\n"
        "    supervisor = os.getppid()\n"
        "    worker = int(open(f'/proc/{supervisor}/stat').read().rpartition(')')[2].split()[1])\n"
        "    os.kill(worker, signal.SIGKILL)\n"
        "    time.sleep(600)\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_good(compare, n): compare(**usual)\n"
    )
    done = project.run("--gpu", "-n2")
    done.assert_outcomes(passed=4, failed=1)
    outcomes = {claim: r["outcome"] for claim, r in project.results().items()}
    assert outcomes == {f"ch07/good[{n}]": "PASSED" for n in range(4)} | {"ch07/murder": "NOT_RUN"}
    assert not project.processes()


@pytest.mark.parametrize("ends", ["os._exit(0)", "os.abort()", signal.SIGINT, signal.SIGKILL])
def test_a_claim_that_ends_while_it_is_timed_leaves_none_paused(project, ends):
    project.tests(
        "from pytest_aiperf.session.session import Session\n"
        "def double(x):\n"
        "    if Session.current.alone:\n"
        "        open('alone', 'w').close()\n"
        f"        {'time.sleep(600)' if isinstance(ends, int) else ends}\n"
        "    return x * 2\n"
        "def test_it(compare): compare(**usual | {'optimized': double})\n"
    )
    with preparing_claim(project.path / "locks", "fake-0") as other:
        run = project.start("--gpu")
        wait((project.path / "alone").exists)
        if isinstance(ends, int):
            assert is_stopped(other)
            run.send_signal(ends)
        run.wait(PATIENCE_S)
        wait(lambda: not is_stopped(other))


def test_an_unwritable_results_folder_is_reported_before_anything_runs(project):
    project.tests("def test_it(compare): compare(**usual)")
    project.write(".aiperf", "a file where the folder should be; root may write anywhere else")
    done = project.run("--gpu")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    (message,) = filter(None, done.errlines)
    pytest.LineMatcher([message]).fnmatch_lines(["ERROR: cannot write */.aiperf*: *"])


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_a_disk_that_fills_up_ends_the_run_and_keeps_what_is_there(project, workers):
    project.tests(
        "@pytest.mark.parametrize('n', range(3))\ndef test_it(compare, n): compare(**usual)"
    )
    project.write(
        "conftest.py",
        "import errno, os\n"
        "def pytest_runtest_logfinish(nodeid):\n"
        "    def full(fd):\n"
        "        raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "    os.fsync = full\n",
    )
    done = project.run("--gpu", workers)
    assert done.ret == pytest.ExitCode.INTERNAL_ERROR
    output = done.stdout.str() + done.stderr.str()
    assert "No space left on device; free some space" in output
    assert "Traceback" not in output
    assert "INTERNALERROR" not in output
    assert project.journaled()["ch07/it[0]"] == "PASSED"


def test_a_disk_that_fills_up_before_a_ladder_ends_the_run_with_a_sentence(project):
    project.tests(
        "@pytest.mark.parametrize('rung', ['a', 'b'])\ndef test_it(compare, rung): compare(**usual)"
    )
    project.write(
        "conftest.py",
        "import errno, pathlib\n"
        "mkdir = pathlib.Path.mkdir\n"
        "def full(path, *args, **words):\n"
        "    if path.name == 'ladders':\n"
        "        raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "    mkdir(path, *args, **words)\n"
        "pathlib.Path.mkdir = full\n",
    )
    done = project.run("--gpu")
    assert done.ret == pytest.ExitCode.INTERRUPTED
    output = done.stdout.str() + done.stderr.str()
    assert "No space left on device; free some space" in output
    assert "Traceback" not in output
    assert "INTERNALERROR" not in output


def test_pdb_stays_in_the_process(project):
    project.tests("def test_it(compare):\n    compare(**usual)\n    assert os.getppid() == PARENT")
    project.write(
        "conftest.py",
        "import os\ndef pytest_collection_modifyitems(items):\n"
        "    items[0].module.PARENT = os.getppid()\n",
    )
    project.run("--gpu", "--pdb").assert_outcomes(passed=1)
    assert project.results()["ch07/it"]["verdict"] == "FASTER"
