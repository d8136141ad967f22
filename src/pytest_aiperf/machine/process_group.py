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


def run_in_group(
    command: Sequence[str],
    log: Path,
    deadline_s: float,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
    is_paused: Callable[[], bool] = lambda: False,
) -> int | None:
    """Run a command and return its exit status; stdout and stderr go to the file ``log``.

    Returns None when the deadline passed or another thread set ``stop``. Time in which
    ``is_paused`` returns true does not count towards the deadline. In every case the command and
    all that it started in its process group are dead before this returns or raises.
    """
    stop = stop or threading.Event()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    last, left_s = time.monotonic(), deadline_s
    try:
        # WNOWAIT leaves a zombie: while it exists, its process group id is not reused
        exited = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while not (done := os.waitid(os.P_PID, process.pid, exited)):
            if left_s < 0 or stop.wait(POLL_S):
                break
            now = time.monotonic()
            left_s, last = left_s - (0.0 if is_paused() else now - last), now
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode if done else None
