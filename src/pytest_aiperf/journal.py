"""Nothing that finished is lost: run folders, journals and results files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .errors import Misuse
from .model import SCHEMA, Gpu, Outcome, Result, from_json, to_json


@dataclass(frozen=True, slots=True)
class Collected:
    """A claim that pytest collected."""

    claim: str
    nodeid: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run set out to do; each of its claims must end in exactly one outcome."""

    run: str
    started: str
    claims: tuple[Collected, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The folder of one pytest session: manifest, journals and, at the end, results."""

    path: Path

    @property
    def id(self) -> str:
        """Name the run."""
        return self.path.name

    @property
    def collected(self) -> bool:
        """Whether the manifest has been written."""
        return (self.path / "manifest.json").exists()

    def manifest(self, claims: Iterable[tuple[str, str]], started: str | None = None) -> Manifest:
        """Write down what was collected, as (claim, nodeid), before the first claim runs.

        Under xdist every worker has collected the same: the first writes, FileExistsError tells
        the others.
        """
        collected = tuple(Collected(*pair) for pair in claims)
        first: dict[str, str] = {}
        for c in collected:
            if first.setdefault(c.claim, c.nodeid) != c.nodeid:
                raise Misuse(
                    f"{first[c.claim]} and {c.nodeid} are both the claim {c.claim}: "
                    "rename one of the two tests"
                )
        path = self.path / "manifest.json"
        if self.collected:
            raise FileExistsError(f"{path} exists: a manifest is written once")
        manifest = Manifest(self.id, started or datetime.now(UTC).isoformat(), collected)
        atomic_write(path, dumps(to_json(manifest), "manifest", indent=1))
        return manifest

    def journal(self, worker: str) -> Journal:
        """Give this process a journal of its own."""
        if not re.fullmatch(r"\w[\w.-]*", worker):
            raise Misuse(f"{worker!r} cannot name a journal: use letters, digits, dot and dash")
        return Journal(self.path / f"journal-{worker}-{os.getpid()}.jsonl")

    def finish(self, document: Mapping[str, Any]) -> Path:
        """Write results.json, then point ``latest`` at this run: a run cut short never gets it."""
        path = self.path / "results.json"
        atomic_write(path, dumps(document, "results", indent=1))
        link = self.path.parent / "latest"
        fresh = self.path.parent / f".latest-{os.getpid()}"
        with _writing(link):
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(self.id)
            fresh.replace(link)
        return path


def new_run_id(now: datetime, pid: int) -> str:
    """Name a run so that names sort by start and two processes never share one."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%S.%f}-{pid}"


def open_run(folder: Path, run_id: str) -> Run:
    """Create a run's folder, and prove now that results will fit, not when hours are lost."""
    path = folder / run_id
    with _writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        try:
            probe = path / ".probe"
            with probe.open("wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            probe.unlink()
            ignore = folder / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n", encoding="utf-8")
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
    return Run(path)


@dataclass(frozen=True, slots=True)
class Journal:
    """Finished results of one process, a line each, on disk before the next claim starts."""

    path: Path

    def append(self, result: Result) -> None:
        """Add a result; whatever goes wrong, the earlier lines stay as they are."""
        line = dumps(to_json(result), result.claim).encode() + b"\n"
        with _writing(self.path):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(self.path, flags, 0o666)
            try:
                size = os.fstat(fd).st_size
                if size and os.pread(fd, 1, size - 1) != b"\n":
                    line = b"\n" + line  # an earlier write was cut short: it stays a line alone
                try:
                    while line:
                        line = line[os.write(fd, line) :]
                    os.fsync(fd)
                except OSError:
                    with contextlib.suppress(OSError):  # a device cannot be cut; readers cope
                        os.ftruncate(fd, size)
                    raise
            finally:
                os.close(fd)
            if not size:
                _sync_folder(self.path.parent)


def read_journals(folder: Path) -> tuple[list[Result], int]:
    """Read a run's journals: the last record of each claim, and how many lines were torn.

    Only a line cut short by a crash is passed over; a whole line that is no result is refused.
    """
    results: list[Result] = []
    torn = 0
    for path in sorted(folder.glob("journal-*.jsonl")):
        for number, line in enumerate(_read(path).split(b"\n"), 1):
            if not line:
                continue
            try:
                record = loads(line.decode(), f"{path}:{number}")
            except (ValueError, RecursionError):
                torn += 1
                continue
            results.append(_result(record, f"{path}:{number}"))
    return latest(results), torn


def latest(results: Iterable[Result]) -> list[Result]:
    """Keep the last record of each claim, sorted by claim: any order and repetition agree."""
    last: dict[str, Result] = {}
    for result in results:
        known = last.setdefault(result.claim, result)
        if known is not result and _order(result) > _order(known):
            last[result.claim] = result
    return [last[claim] for claim in sorted(last)]


def _order(result: Result) -> tuple[int, str, str]:
    return result.attempts, result.started, dumps(to_json(result), result.claim)


def read_manifest(folder: Path) -> Manifest:
    """Read what a run set out to do."""
    path = folder / "manifest.json"
    try:
        return from_json(Manifest, loads(_read(path).decode(), "manifest"), "manifest")
    except (ValueError, RecursionError) as error:
        raise Misuse(f"{path}: {error}; the journals beside it can still be read") from error


def complete(manifest: Manifest, results: Iterable[Result], reason: str) -> list[Result]:
    """Give every collected claim exactly one outcome, in collection order.

    Claims without a result are NOT_RUN for ``reason``. A result that nobody collected is kept, at
    the end: it finished.
    """
    finished = {result.claim: result for result in latest(results)}
    ordered: list[Result] = []
    for c in dict.fromkeys(manifest.claims):
        missing = Result(
            claim=c.claim,
            nodeid=c.nodeid,
            title="",
            outcome=Outcome.NOT_RUN,
            key="",
            run=manifest.run,
            started=manifest.started,
            seed=0,
            message=reason,
        )
        ordered.append(finished.pop(c.claim, missing))
    return [*ordered, *finished.values()]


def atomic_write(path: Path, text: str) -> None:
    """Replace a file as a whole: readers and crashes see the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _writing(path):
        try:
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Misuse(
            f"cannot write {path}: {error.strerror or error}; "
            "free some space there or make the folder writable, then run again"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Misuse(
            f"cannot read {path}: {error.strerror or error}; name a file that a run wrote"
        ) from error


@dataclass(frozen=True, slots=True)
class _Odd:
    """Stands in a parsed document where strict JSON is broken, so that the place can be named."""

    why: str


def dumps(value: object, where: str, indent: int | None = None) -> str:
    """Write strict JSON; raise ValueError that names the claim and the figure it cannot hold."""
    _plain(value, where)
    return json.dumps(value, allow_nan=False, indent=indent)


def loads(text: str, where: str) -> Any:
    """Read strict JSON (no NaN, no infinity, no key twice); ValueError names the place."""
    value = json.loads(
        text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite
    )
    _plain(value, where)
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> object:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    keys = [key for key, _ in pairs]
    return _Odd(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands twice")


def _constant(name: str) -> object:
    return _Odd(f"{name} is no figure")


def _finite(text: str) -> object:
    value = float(text)
    return value if math.isfinite(value) else _Odd(f"{text} is no finite figure")


def _plain(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _plain(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _plain(inner, f"{where}[{index}]")
    elif isinstance(value, _Odd):
        raise ValueError(f"{where}: {value.why}")  # noqa: TRY004 - the text is wrong, not a type
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {value} is no finite figure and cannot be recorded")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ValueError(
            f"{where}: a {type(value).__name__} cannot be recorded, use a plain number"
        )


def read_results(path: Path) -> list[Result]:
    """Read the claims' records of a results file, ours or one that pytest-benchmark saved."""
    try:
        content = loads(_read(path).decode(), "results")
    except json.JSONDecodeError as error:
        raise Misuse(f"{path}:{error.lineno}:{error.colno}: {error.msg}; run it anew") from error
    except (ValueError, RecursionError) as error:
        raise Misuse(f"{path}: {error}; run it anew") from error
    if not isinstance(content, Mapping):
        raise Misuse(f"{path}: an object is needed, not a {type(content).__name__}")
    entries = {name: content.get(name, []) for name in ("benchmarks", "aiperf_untimed")}
    for name, entry in entries.items():
        if not isinstance(entry, list):
            raise Misuse(f"{path}: {name}: a list is needed, not a {type(entry).__name__}")
    timed = [
        _result(entry["aiperf"], f"{path}: benchmarks[{i}].aiperf")
        for i, entry in enumerate(entries["benchmarks"])
        if isinstance(entry, Mapping) and "aiperf" in entry  # else a benchmark, not a claim
    ]
    untimed = [
        _result(entry, f"{path}: aiperf_untimed[{i}]")
        for i, entry in enumerate(entries["aiperf_untimed"])
    ]
    if not timed and "aiperf_untimed" not in content:
        raise Misuse(f"{path} holds no record of a claim; name a results.json that a run wrote")
    return timed + untimed


def _result(record: object, where: str) -> Result:
    schema = record.get("schema") if isinstance(record, Mapping) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise Misuse(
            f"{where}: schema {schema} is newer than {SCHEMA}, the newest that this version reads; "
            "upgrade pytest-aiperf"
        )
    try:
        return from_json(Result, record, where)
    except ValueError as error:
        raise Misuse(str(error)) from error


def document(
    results: Iterable[Result],
    machine_info: Mapping[str, Any],
    commit_info: Mapping[str, Any],
    now: datetime,
) -> dict[str, Any]:
    """Lay results out in pytest-benchmark's schema; each must be finite (ValueError names it).

    A benchmark's ``stats`` are of the optimized arm, a call; its ``aiperf`` key holds our record.
    Records without a figure stand under ``aiperf_untimed``.
    """
    from pytest_benchmark import __version__  # late: not needed to measure

    benchmarks: list[dict[str, Any]] = []
    untimed: list[Any] = []
    for result in results:
        if figures(result):
            entry = benchmark(result).as_dict(include_data=False)
            benchmarks.append(entry)
        else:
            entry = to_json(result)
            untimed.append(entry)
        _plain(entry, result.claim)
    return {
        "machine_info": dict(machine_info),
        "commit_info": dict(commit_info),
        "benchmarks": benchmarks,
        "datetime": now.astimezone(UTC).isoformat(),
        "version": __version__,
        "aiperf_untimed": untimed,
    }


def merge_results(path: Path, results: Iterable[Result], machine_info: Mapping[str, Any]) -> None:
    """Put results into a results file; the other claims that it holds stay."""
    known = read_results(path) if path.exists() else []
    merged = {result.claim: result for result in [*known, *results]}
    content = document([merged[c] for c in sorted(merged)], machine_info, {}, datetime.now(UTC))
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, dumps(content, "results", indent=1) + "\n")


def machine_info(gpus: Iterable[Gpu]) -> dict[str, Any]:
    """Say what machine this is; never which one (no host name, no serial number)."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "processor": platform.processor(),
        "python_implementation": platform.python_implementation(),
        "python_version": platform.python_version(),
        "gpus": [{"name": gpu.name, "driver": gpu.driver} for gpu in gpus],
    }


def figures(result: Result) -> tuple[float, ...]:
    """Collect what each block of the optimized arm measured, a call."""
    if result.timing is None:
        return ()
    rounds = (r for replicate in result.timing.replicates for r in replicate.rounds)
    return tuple(figure for r in rounds for figure in r.seconds.get("optimized", ()))


def benchmark(result: Result) -> Any:
    """Make a result with figures into a benchmark of pytest-benchmark's own kind.

    The rungs of one ladder form a group, so that its tables compare what can be compared.
    """
    from pytest_benchmark.stats import Metadata  # late: not needed to measure

    assert result.timing is not None
    test, bracket, parameter = result.nodeid.partition("[")
    fixture = SimpleNamespace(
        name=test.rsplit("::", 1)[-1] + bracket + parameter,
        fullname=result.nodeid,
        group=result.claim.partition("[")[0],
        param=parameter.removesuffix("]") if bracket else None,
        params=None,
        extra_info={} if result.timing.unit == "s" else {"unit": result.timing.unit},
        cprofile_stats=None,
        has_error=False,
    )
    made = Metadata(fixture, result.timing.calls, {"timer": result.timing.mode.value})
    for figure in figures(result):
        made.stats.update(figure)
    made.as_dict = partial(_as_dict, made.as_dict, to_json(result))
    return made


def _as_dict(as_dict: Callable[..., dict[str, Any]], record: Any, **options: Any) -> dict[str, Any]:
    return {**as_dict(**options), "aiperf": record}
