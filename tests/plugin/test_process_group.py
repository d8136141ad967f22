"""A command in a process group of its own: status, output, deadline, and nothing left behind."""

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aiperf.machine import process_group
from pytest_aiperf.machine.process_group import STOPPED_S, run_in_group

CHILD = "import os,subprocess,sys,time;print(subprocess.Popen(['sleep','60']).pid,flush=True);"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    end = time.monotonic() + 60
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


@pytest.mark.parametrize("status", [0, 3])
def test_status_and_both_outputs(tmp_path, status):
    code = (
        f"import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit({status})"
    )
    log = tmp_path / "log"
    assert run_in_group([sys.executable, "-c", code], log, 60) == status
    assert log.read_text().split() == ["out", "err"]


def test_a_signal_is_a_negative_status(tmp_path):
    code = "import os; os.kill(os.getpid(), 15)"
    assert run_in_group([sys.executable, "-c", code], tmp_path / "log", 60) == -15


@pytest.mark.parametrize("last", ["", "time.sleep(60)"])
def test_no_descendant_outlives_an_exit_or_the_deadline(tmp_path, monkeypatch, last):
    log = tmp_path / "log"

    def monotonic():  # the deadline passes as soon as the command has started its child
        return 1000.0 if last and log.stat().st_size else 0.0

    monkeypatch.setattr(process_group, "time", SimpleNamespace(monotonic=monotonic))
    status = run_in_group([sys.executable, "-c", CHILD + last], log, STOPPED_S / 2)
    assert status == (None if last else 0)
    assert ends(int(log.read_text()))


def test_stop_from_another_thread(tmp_path):
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    begun = time.monotonic()
    assert run_in_group(["sleep", "60"], tmp_path / "log", 60, stop=stop) is None
    assert time.monotonic() - begun < 30


def test_folder_and_environment(tmp_path):
    code = "import os; print(os.getcwd(), os.environ['ANSWER'])"
    env = {**os.environ, "ANSWER": "42"}
    run_in_group([sys.executable, "-c", code], tmp_path / "log", 60, cwd=tmp_path, env=env)
    assert (tmp_path / "log").read_text().split() == [str(tmp_path), "42"]


def test_a_deadline_leaves_time_to_write_what_there_is(tmp_path):
    code = (
        "import time\n"
        "print('started', flush=True)\n"
        "try: time.sleep(600)\n"
        "except KeyboardInterrupt: print('wrote its report')\n"
    )
    log, stop = tmp_path / "log", threading.Event()

    def stop_when_started():
        if "started" in log.read_text():
            stop.set()

    command = [sys.executable, "-c", code]
    status = run_in_group(command, log, 600, stop=stop, on_poll=stop_when_started, grace_s=60)
    assert status is None
    assert "wrote its report" in log.read_text()
