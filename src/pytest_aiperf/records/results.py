"""Read and write results files: strict JSON in pytest-benchmark's schema."""

import contextlib
import errno
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import SCHEMA, Gpu, Result
from pytest_aiperf.schema import from_json, to_json

from .consistency import contradiction

MAX_MESSAGE: Final = 300
"""Longest message about an invalid file, in characters: names of fields may be any length."""
_DUPLICATE: Final = object()
"""Stands for the value of a key that occurs twice, until ``_strict`` raises an error for it."""


def dumps(value: object, where: str, indent: int | None = None) -> str:
    """Format strict JSON; raise ValueError with the place of a value that JSON cannot contain."""
    _strict(value, where)
    return json.dumps(value, allow_nan=False, indent=indent)


def loads(text: str, where: str) -> Any:
    """Parse JSON; raise ValueError with the place of a NaN, infinity or duplicate key."""
    value = json.loads(text, object_pairs_hook=_object)
    _strict(value, where)
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        mapping[key] = _DUPLICATE if key in mapping else value
    return mapping


def _strict(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _strict(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _strict(inner, f"{where}[{index}]")
    elif value is _DUPLICATE:
        raise ValueError(f"{where} occurs twice")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: {value} is not a finite number")
    elif value is not None and not isinstance(value, (str, int, float)):
        kind = type(value).__name__
        raise ValueError(f"{where}: a {kind} cannot be recorded, use a plain number")


_REMEDIES: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "make the folder writable, or name another"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a file has that name: remove or rename it"),
    errno.EISDIR: "a folder has that name: remove or rename it",
}
"""What to do about a file that cannot be written, by errno."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError in the block into a UsageError: "cannot write ``path``"."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "name another place")
        raise UsageError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


def atomic_write(path: Path, text: str) -> None:
    """Replace a file so that, after a crash, it contains either the old text or the new text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


def sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_json(path: Path) -> Any:
    """Read a strict JSON file, or the results in the folder of a run.

    UsageError names the file and the place in it.
    """
    path = path / "results.json" if path.is_dir() else path
    try:
        return loads(path.read_text(encoding="utf-8"), path.stem)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot read {path}: {reason}; name a file that a run wrote") from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}:{error.lineno}:{error.colno}: not JSON, or incomplete ({error.msg}); name a "
            "file that a run wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {_sentence(str(error))}; run again") from error


def _sentence(message: str) -> str:
    """Return a message about a file, as a short line of printable characters."""
    return "".join(c if c.isprintable() else "?" for c in message[:MAX_MESSAGE])


def read_record(record: object, where: str) -> Result:
    """Read the record of one claim; UsageError names an invalid field or a contradiction."""
    schema = record.get("schema") if isinstance(record, Mapping) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise UsageError(
            f"{where}: schema {str(schema)[:20]} is newer than {SCHEMA}, the newest that this "
            "version reads; upgrade pytest-aiperf"
        )
    if isinstance(schema, int) and schema < 2:
        raise UsageError(f"{where}: schema {str(schema)[:20]} is no longer read; run again")
    if schema == 2 and isinstance(record, Mapping):
        record = _upgraded(record)
    try:
        result = from_json(Result, record, where)
    except ValueError as error:
        raise UsageError(where + _sentence(str(error).removeprefix(where))) from error
    if problem := contradiction(result):
        raise UsageError(f"{where}: the record contradicts itself: {problem}; measure again")
    return result


def _upgraded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a record of schema 2; leave invalid parts for ``from_json`` to refuse."""
    upgraded = {**record, "schema": SCHEMA}
    ladder, _, rung = str(record.get("claim", "")).partition("[")
    upgraded["ladder"] = ladder if rung else ""
    with contextlib.suppress(TypeError, KeyError, IndexError):
        for timing in filter(None, (record.get("timing"), *record.get("also", ()))):
            arms = timing["replicates"][0]["rounds"][0]["seconds"]
            if isinstance(calls := timing["calls"], int):
                timing["calls"] = dict.fromkeys(arms, calls)
        for finding in record.get("evidence", ()):
            if finding["value"] is None:  # schema 2 had no third state
                finding["held"] = None
    return upgraded


def read_results(path: Path) -> list[Result]:
    """Read the records of a results file of this plugin or of ``--benchmark-json``.

    ``path`` may be the folder of a run.
    """
    content = read_json(path)
    if not isinstance(content, Mapping):
        raise UsageError(f"{path}: an object is needed, not a {type(content).__name__}; run again")
    benchmarks, untimed = (content.get(name, []) for name in ("benchmarks", "aiperf_untimed"))
    if not isinstance(benchmarks, list) or not isinstance(untimed, list):
        raise UsageError(f"{path}: benchmarks and aiperf_untimed must be lists; run again")
    records = [
        (f"benchmarks[{i}].aiperf", entry["aiperf"])
        for i, entry in enumerate(benchmarks)
        if isinstance(entry, Mapping) and "aiperf" in entry  # other entries are not claims
    ]
    records += [(f"aiperf_untimed[{i}]", record) for i, record in enumerate(untimed)]
    if not records and "aiperf_untimed" not in content:
        raise UsageError(f"{path} holds no record of a claim; name a results.json that a run wrote")
    return [read_record(record, f"{path}: {where}") for where, record in records]


def document(
    results: Sequence[Result],
    machine_info: Mapping[str, Any],
    now: datetime,
    commit_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arrange results in pytest-benchmark's schema.

    ``stats`` of a benchmark are seconds per call of the optimized arm, ``aiperf`` is the whole
    record. Results without times, such as scores, are listed under ``aiperf_untimed``.
    """
    from pytest_benchmark import __version__  # imported late: measuring does not need it

    return {
        "machine_info": machine_info,
        "commit_info": commit_info or {},
        "benchmarks": [benchmark(r).as_dict(include_data=False) for r in results if is_timed(r)],
        "datetime": now.astimezone(UTC).isoformat(),
        "version": __version__,
        "aiperf_untimed": [to_json(r) for r in results if not is_timed(r)],
    }


def document_text(content: Mapping[str, Any]) -> str:
    """Format a document with one record per line, so that a new measurement changes one line."""
    parts = []
    for key, value in content.items():
        if isinstance(value, list) and value:
            rows = ",\n".join(f"  {dumps(row, f'{key}[{i}]')}" for i, row in enumerate(value))
            parts.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {dumps(value, key)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def merge_results(folder: Path, results: Iterable[Result], machine: Mapping[str, Any]) -> None:
    """Write results into the file of their GPU, ``<key>.json``, and keep the other claims in it.

    A claim that has become a ladder, or was one, is dropped: it names no test any more.
    """
    new: dict[str, list[Result]] = {}
    for result in results:
        # remove the GPU's UUID, because these files are published
        gpu = result.gpu and replace(result.gpu, uuid="")
        new.setdefault(result.key, []).append(replace(result, gpu=gpu))
    for key, new_results in new.items():
        path = folder / f"{key}.json"
        old_results = read_results(path) if path.exists() else []
        shapes = {result.claim.partition("[")[:2] for result in new_results}
        renamed = {(test, "" if bracket else "[") for test, bracket in shapes} - shapes
        kept = [r for r in old_results if r.claim.partition("[")[:2] not in renamed]
        merged = {result.claim: result for result in [*kept, *new_results]}
        content = document([merged[c] for c in sorted(merged)], machine, datetime.now(UTC))
        atomic_write(path, document_text(content))


def machine_info(gpus: Iterable[Gpu]) -> dict[str, Any]:
    """Describe this machine without its host name and serial numbers."""
    names = ("system", "machine", "python_implementation", "python_version")
    info = {name: getattr(platform, name)() for name in names}
    cpu = {"brand_raw": _cpu_model(), "count": len(os.sched_getaffinity(0))}
    return {**info, "cpu": cpu, "gpus": [{"name": g.name, "driver": g.driver} for g in gpus]}


def processor() -> str:
    """Return the CPU's model, and how many logical CPUs this process may use."""
    return f"{_cpu_model()}, {len(os.sched_getaffinity(0))} logical CPUs"


def _cpu_model() -> str:
    """Return the CPU's model as Linux names it; its architecture if Linux has no name for it."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), platform.machine())


def block_times(result: Result) -> tuple[float, ...]:
    """Return the optimized arm's value per call in each block; empty if it was not timed."""
    replicates = result.timing.replicates if result.timing else ()
    return tuple(s for r in replicates for b in r.rounds for s in b.seconds.get("optimized", ()))


def is_timed(result: Result) -> bool:
    """Whether the samples are seconds; other tools would take bytes and scores for seconds, too."""
    return result.timing is not None and result.timing.unit == "s" and bool(block_times(result))


def benchmark(result: Result) -> Any:
    """Convert a result with times to pytest-benchmark's own class.

    The rungs of a ladder form a group, so that pytest-benchmark shows them in one table.
    """
    from pytest_benchmark.stats import Metadata  # imported late: measuring does not need it

    assert result.timing is not None
    test, bracket, parameter = result.nodeid.partition("[")
    fixture = SimpleNamespace(
        name=test.rsplit("::", 1)[-1] + bracket + parameter,
        fullname=result.nodeid,
        group=result.claim.partition("[")[0],
        param=parameter.removesuffix("]") if bracket else None,
        params=None,
        extra_info={},
        cprofile_stats=None,
        has_error=False,
    )
    calls = result.timing.calls["optimized"]
    metadata = Metadata(fixture, calls, {"timer": result.timing.mode.value})
    for value in block_times(result):
        metadata.stats.update(value)
    as_dict, record = metadata.as_dict, to_json(result)
    metadata.as_dict = lambda **options: {**as_dict(**options), "aiperf": record}
    return metadata
