"""Load, clocks, power and memory of GPUs over a run, sampled by a process of its own.

Claims run in forks of the session. A thread of the session could hold a lock of NVML while it
forks, and the claim would then wait for that lock for ever; a process with a low priority cannot.
"""

import csv
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

from pytest_aiperf.model import GpuLoad

from . import nvml
from .isolation import arm_parent_death

FILE: Final = "telemetry.csv"  #: Name of the file with the samples, in the folder of the run.
PERIOD_S: Final = 0.1
"""Seconds between samples: NVML averages the utilization over 1/6 s or longer, so that more samples
would repeat its values."""
_HEAD: Final = ("time_s", "gpu", *GpuLoad._fields)
"""Columns of the file: seconds since 1970, the GPU's UUID and the fields of GpuLoad."""

Samples = Mapping[str, Sequence[tuple[float, GpuLoad]]]
"""Times and loads of each GPU, by its UUID."""


class Recorder:
    """A process that samples GPUs until :meth:`stop`, or until the process that started it ends."""

    def __init__(self, uuids: Sequence[str], file: Path) -> None:
        # -P: a file of the user's in the current folder must not hide a module of Python
        command = [sys.executable, "-P", "-m", __name__, str(file), *uuids]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, start_new_session=True
        )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def record(uuids: Sequence[str], file: TextIO, pause: Callable[[float], object]) -> None:
    """Write a row per GPU and period to a file, until ``pause`` raises."""
    rows = csv.writer(file)
    rows.writerow(_HEAD)
    while True:
        for uuid in uuids:
            rows.writerow([f"{time.time():.3f}", uuid, *nvml.load(uuid)])
        file.flush()
        pause(PERIOD_S)


def read(file: Path) -> Samples:
    """Read the samples of a run; a last row that is incomplete is left out."""
    samples = defaultdict(list)
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.reader(line for line in lines if line.endswith("\n")):
            if len(row) == len(_HEAD) and row != list(_HEAD):
                values = (float(value) if value else None for value in row[2:])
                samples[row[1]].append((float(row[0]), GpuLoad(*values)))
    return samples


def main(path: str, *uuids: str) -> None:
    arm_parent_death()
    os.nice(19)
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        record(uuids, file, time.sleep)


if __name__ == "__main__":
    main(*sys.argv[1:])
