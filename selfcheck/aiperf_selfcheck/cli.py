"""`python -m pytest_aiperf prove`."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.report import formatting
from pytest_aiperf.report import terminal as views
from pytest_aiperf.session.cuda_machine import CudaMachine, measurable_gpus

from . import ground_truth, record

DONE, FAILED = 0, 1


def add_command(subcommands: Any) -> None:
    """Add ``prove`` to the subcommands of `python -m pytest_aiperf` (an entry point)."""
    duty = inspect.getdoc(prove) or ""
    parser = subcommands.add_parser("prove", help=duty.partition("\n")[0], description=duty)
    parser.set_defaults(run=prove)
    add = parser.add_argument
    add("record", metavar="PROOF.json", type=Path, nargs="?", help="a record, for --readme")
    add("--only", metavar="PART,...", help=f"of {', '.join(record.ALL)} (default: all)")
    add("--quick", action="store_true", help="fewer tries of each part: about 90 seconds")
    add("--json", metavar="FILE", type=Path, help="write each part there as it ends; keep others")
    add("--readme", metavar="FILE", type=Path, help="put PROOF.json's tables between FILE's marks")


def prove(arguments: argparse.Namespace) -> int:
    """Check the harness on this machine's first GPU, where the right answer is known.

    Kernels that spin for a known time in each timing mode, the timer's floor, cold caches,
    identical arms, slowdowns of 0.5 to 5 %, a heater between blocks, fresh processes, and the same
    comparisons judged by other timers. Takes about 8 minutes. The exit status is 1 where a part
    fails or misses its bound. `--readme` measures nothing: it replaces the text between
    `<!-- proof -->` and `<!-- /proof -->`.
    """
    if (arguments.readme is None) != (arguments.record is None):
        raise UsageError("--readme FILE goes with a record: prove --readme README.md PROOF.json")
    if arguments.readme:
        views.embed(arguments.readme, "proof", record.section(record.read(arguments.record)))
        return DONE
    names = record.parts_named(arguments.only)
    gpus = measurable_gpus(CudaMachine())[:1]
    proof = record.Record(gpus[0], arguments.json)
    done: dict[str, Any] = {}

    def make() -> ground_truth.Workbench:
        return ground_truth.on_gpu(CudaMachine().open_device(gpus[0]), progress)

    def keep(name: str, figures: dict[str, Any]) -> None:
        done[name] = proof.keep(name, figures)

    lock = GpuLock([g.uuid for g in gpus], on_wait=progress)
    try:
        record.run(names, make, lock.exclusive_host, keep, progress, quick=arguments.quick)
    except KeyboardInterrupt:
        progress("interrupted: the parts that ended are kept")
        return FAILED
    finally:
        sys.stdout.write("".join(f"{formatting.clean(line)}\n" for line in record.lines(done)))
    missed = any(row.holds is False for row in record.rows(done))
    return FAILED if missed else DONE


def progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
