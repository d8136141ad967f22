"""The command `python -m pytest_aiperf prove`."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.report import formatting
from pytest_aiperf.session.cuda_machine import CudaMachine, measurable_gpus

from . import ground_truth, record

OK: Final = 0
"""Exit status if every part ran and met its bounds."""

FAILED: Final = 1
"""Exit status if a part failed or missed a bound, or if the run was interrupted."""


def add_command(subcommands: Any) -> None:
    """Add ``prove`` to the subcommands of `python -m pytest_aiperf`; the entry point."""
    description = inspect.getdoc(prove) or ""
    summary = description.partition("\n")[0].rstrip(".")
    parser = subcommands.add_parser("prove", help=summary, description=description)
    parser.set_defaults(run=prove)
    add = parser.add_argument
    add("--only", metavar="PART,...", help=f"parts to run, out of {', '.join(record.ALL)}")
    add("--quick", action="store_true", help="smaller samples: about 2 minutes")
    add("--json", metavar="FILE", type=Path, help="write each part's figures to this record")


def prove(arguments: argparse.Namespace) -> int:
    """Check the harness on this machine's first GPU, against known answers.

    Measures kernels that spin for a known time, an empty kernel, cold and warm reads, identical
    arms, arms slowed by 0.5 to 5 %, ladders of five such arms, arms on a GPU that is heated between
    blocks, and one claim in several processes. Other timers judge some of these comparisons, too.
    Takes about 11 minutes. The exit status is 1 if a part fails or misses its bound.
    """
    names = record.parts_named(arguments.only)
    gpus = measurable_gpus(CudaMachine())[:1]
    file = record.Record(gpus[0], arguments.json)
    parts: dict[str, Any] = {}

    def open_workbench() -> ground_truth.Workbench:
        return ground_truth.on_gpu(CudaMachine().open_device(gpus[0]), progress)

    def store(name: str, figures: dict[str, Any]) -> None:
        parts[name] = file.store(name, figures)

    lock = GpuLock([g.uuid for g in gpus], on_wait=progress)
    try:
        record.run(
            names, open_workbench, lock.exclusive_host, store, progress, quick=arguments.quick
        )
    except KeyboardInterrupt:
        progress("interrupted: the parts that ended are recorded")
        return FAILED
    finally:
        lines = (formatting.clean(line) for line in record.lines(parts))
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    is_missed = any(row.is_met is False for row in record.rows(parts))
    return FAILED if is_missed else OK


def progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
