"""Run a failing command and pack how it ended: exit status and last lines of each rank.

The output of a command may hold anything. What this machine knows to be private is replaced, and
what looks like a secret; a person should still read the files before they send them.
"""

import csv
import getpass
import io
import os
import re
import shlex
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import quote

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import telemetry
from pytest_aiperf.machine.process_group import run_in_group
from pytest_aiperf.model import GpuLoad
from pytest_aiperf.profilers.command import EXPIRED, INTERRUPTED, Echo
from pytest_aiperf.records.results import dumps

GRACE_S: Final = 20.0  #: Seconds in which an interrupted launcher may stop its ranks.
_LINES: Final = 200  #: Last lines of a log that are packed: a traceback and what led to it.
_TAIL_BYTES: Final = 1 << 20  #: End of a log that is read; the first half is only searched.
_SAMPLES: Final = 3000  #: Last samples of a GPU's load that are packed: those of five minutes.
_SETTINGS: Final = {
    # a crash prints the stack of Python, and NCCL its topology and the cause of an error
    "PYTHONFAULTHANDLER": "1", "NCCL_DEBUG": "INFO",
    # torchrun takes defaults of its options from PET_*: 3 is stdout and stderr
    "PET_TEE": "3",
}  # fmt: skip
"""Variables that are set for the command unless they are set already."""

_HIDDEN: Final = "<hidden>"
_SECRET_NAME: Final = re.compile(r"key|token|secret|passw|credential|auth|cookie", re.IGNORECASE)
_SECRET_CHARACTERS: Final = 3  #: Shortest value that is replaced if the name is a _SECRET_NAME.
_CHARACTERS: Final = 6
"""Shortest value of any other variable that is replaced: shorter ones are words such as "1" or
"info"."""
_PATTERNS: Final = {
    r"(?i)(--[\w-]*(?:key|token|secret|password)[= ]\s*)\S+": rf"\1{_HIDDEN}",
    r"(?i)((?:key|token|secret|password|passwd)[\"']?\s*[=:]\s*[\"']?)[^\s\"',;]+": rf"\1{_HIDDEN}",
    r"(?i)(bearer\s+)\S+": rf"\1{_HIDDEN}",
    r"(://)[^/\s@]+@": rf"\1{_HIDDEN}@",
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w.-]{12,}": _HIDDEN,
    r"/(home|Users)/[^/\s\"':]+": r"/\1/<user>",
    r"(?i)\b(GPU|MIG)-[0-9a-f-]{36}": r"\1-<uuid>",
    r"\b(?!127\.|0\.0\.)\d{1,3}(?:\.\d{1,3}){3}\b": "<ip>",
    r"(?i)\b(?:[0-9a-f]{1,4}:){4,}[0-9a-f:]*|\bfe80:[0-9a-f:]+": "<ip>",
}
"""Patterns of secrets and names, and what replaces them."""


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    private: Mapping[str, str],
    deadline_s: float,
    output: BinaryIO | None = None,
    *,
    uuids: Sequence[str] = (),
) -> tuple[dict[str, str], int]:
    """Run a command and return the files that describe its end, by name, and its exit status.

    The status is 128 and the signal's number if a signal killed it. ``private`` are the variables
    of ``environ`` whose values are replaced. ``output`` receives the command's output, as it is.
    The load of the GPUs with these ``uuids`` is sampled meanwhile.
    """
    started = time.monotonic()
    ended: int | None = INTERRUPTED
    with tempfile.TemporaryDirectory(prefix="pytest-aiperf-") as scratch:
        log, ranks = Path(scratch, "log"), Path(scratch, "ranks")
        settings = _SETTINGS | {"PET_LOG_DIR": str(ranks)}
        echo, samples = Echo(log, output), Path(scratch, telemetry.FILE)
        recorder = telemetry.Recorder(uuids, samples) if uuids else None
        try:
            with suppress(KeyboardInterrupt):
                ended = run_in_group(
                    *(command, log, deadline_s),
                    env={**settings, **environ},
                    on_poll=echo,
                    grace_s=GRACE_S,
                )
        except OSError as error:
            if error.filename != command[0]:
                raise
            raise UsageError(f"{command[0]} cannot be run: {error.strerror or error}") from error
        finally:
            if recorder:
                recorder.stop()
        echo()
        code = EXPIRED if ended is None else ended
        status = code if code >= 0 else 128 - code
        endings = {
            EXPIRED: "by its deadline, or with status 124",
            INTERRUPTED: "by Ctrl-C or SIGTERM",
        }
        facts = {
            # word by word first, because quoting may take a value apart
            "command": _scrubbed(shlex.join(_scrubbed(word, private) for word in command), private),
            "status": status,
            "ended": "by a signal" if code < 0 else endings.get(status, "by itself"),
            "seconds": round(time.monotonic() - started, 1),
        }
        logs = {"run.log": log, **dict(_logs_of_ranks(ranks))}
        files = {name: _scrubbed(_tail(file), private) for name, file in logs.items()}
        loads = {telemetry.FILE: _loads(samples, uuids)} if samples.exists() else {}
    files = {name: "".join(_last_lines(text)) for name, text in files.items()} | loads
    return {"run.json": dumps(facts, "run", indent=1), **files}, status


def _logs_of_ranks(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the logs that torchrun wrote: RUN/attempt_N/RANK/stdout.log and stderr.log."""
    for file in sorted(folder.glob("*/attempt_*/*/*.log")):
        attempt, rank = file.parts[-3].removeprefix("attempt_"), file.parts[-2]
        if file.stat().st_size:
            again = f"-attempt-{attempt}" if attempt != "0" else ""
            yield f"rank-{rank}{again}.{file.stem}.log", file


def _loads(file: Path, uuids: Sequence[str]) -> str:
    """Return the last samples of each GPU as CSV, with its number and seconds from the start."""
    text, samples = io.StringIO(), telemetry.read(file)
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("time_s", "gpu", *GpuLoad._fields))
    begun = min((each[0][0] for each in samples.values()), default=0.0)
    for number, uuid in enumerate(uuids):
        for at, load in samples.get(uuid, ())[-_SAMPLES:]:
            rows.writerow((f"{at - begun:.1f}", number, *load))
    return text.getvalue()


def _tail(file: Path) -> str:
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        return log.read().decode(errors="replace")


def _last_lines(text: str) -> list[str]:
    """Return the last lines, without the first half of a long text, which may begin in a secret."""
    return text[-_TAIL_BYTES // 2 :].splitlines(keepends=True)[-_LINES:]


def _scrubbed(text: str, private: Mapping[str, str]) -> str:
    """Return text without the values of private variables, names of machine and user, secrets."""
    values: dict[str, str] = {}
    for name, value in private.items():
        if len(value) >= (_SECRET_CHARACTERS if _SECRET_NAME.search(name) else _CHARACTERS):
            values |= {value: f"<{name}>", quote(value, safe=""): f"<{name}>"}
    if (home := private.get("HOME", "")) not in ("", "/"):
        values[home] = "~"
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, values[value])
    for pattern, replacement in _PATTERNS.items():
        text = re.sub(pattern, replacement, text)
    names = {socket.gethostname(): "<host>", _user(): "<user>"}
    for name, replacement in names.items():
        if len(name) >= _SECRET_CHARACTERS and name not in ("root", "localhost"):
            text = re.sub(rf"\b{re.escape(name)}\b", replacement, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return str(os.getuid())
