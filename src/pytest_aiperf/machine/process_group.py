"""Run a command as a process group that does not outlive the call."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

POLL_S: Final = 0.02
"""Seconds between two checks whether the process has ended: short compared with a build."""
STOPPED_S: Final = 1.0
"""If more time than this passes between two checks, this process and the command were stopped."""


def run_in_group(
    command: Sequence[str],
    log: Path,
    deadline_s: float,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
    is_paused: Callable[[], bool] = lambda: False,
    on_poll: Callable[[], object] = lambda: None,
    grace_s: float = 0.0,
) -> int | None:
    """Run a command and return its exit status; stdout and stderr go to the file ``log``.

    Returns None when the deadline passed or another thread set ``stop``. Time in which
    ``is_paused`` returns true does not count towards the deadline. In every case the command and
    all that it started in its process group are dead before this returns or raises.

    ``on_poll`` is called while the command runs. A command that did not end by itself is
    interrupted as by Ctrl-C, and has ``grace_s`` to write what it has before it is killed.
    """
    stop = stop or threading.Event()
    # a background job of a shell ignores Ctrl-C, and so would the command
    is_deaf = bool(grace_s) and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_interrupt if is_deaf else None,  # noqa: PLW1509  calls no lock
        )
    last, left_s = time.monotonic(), deadline_s
    done: object = None
    # WNOWAIT leaves a zombie: while it exists, its process group id is not reused
    exited = os.WEXITED | os.WNOWAIT | os.WNOHANG
    try:
        while not (done := os.waitid(os.P_PID, process.pid, exited)):
            if left_s < 0 or stop.wait(POLL_S):
                break
            now = time.monotonic()
            passed_s = min(now - last, STOPPED_S)
            left_s, last = left_s - (0.0 if is_paused() else passed_s), now
            on_poll()
    finally:
        try:
            if not done and grace_s:
                os.killpg(process.pid, signal.SIGINT)
                until = time.monotonic() + grace_s
                while not os.waitid(os.P_PID, process.pid, exited) and time.monotonic() < until:
                    time.sleep(POLL_S)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode if done else None


def _heed_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
