"""Start pytest in a fork of a process that has imported it, which saves each run a second."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])


def start(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    outputs: tuple[str, str] = ("stdout", "stderr"),
) -> BaseProcess:
    """Start ``python -m pytest`` in ``folder`` as the leader of a session, as in a terminal.

    Args:
        arguments: Its command line.
        environ: Its environment; Python's own variables other than PYTHONPATH have no effect.
        folder: Its working directory.
        outputs: The files in ``folder`` to which it appends its output and its errors.

    """
    process = _context.Process(target=_run, args=(arguments, dict(environ), folder, outputs))
    process.start()
    return process


def _run(
    arguments: Sequence[str], environ: dict[str, str], folder: Path, outputs: tuple[str, str]
) -> None:
    from . import preloaded  # only here: it runs pytest

    os.setsid()
    os.chdir(folder)
    for number, name in enumerate(outputs, 1):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    paths = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [str(folder), *paths, *preloaded.PATH]
    sys.argv[:] = [str(Path(pytest.__file__).with_name("__main__.py")), *arguments]
    sys.exit(pytest.console_main())
