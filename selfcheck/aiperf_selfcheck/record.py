"""The record of a self-check: its parts are run, stored and shown in tables."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pytest_aiperf import text
from pytest_aiperf.errors import UsageError
from pytest_aiperf.limits.ceilings import ProgressLine
from pytest_aiperf.model import Gpu
from pytest_aiperf.records.results import atomic_write, dumps, read_json
from pytest_aiperf.report.formatting import escape
from pytest_aiperf.schema import to_json

from .checks import FULL, PARTS, QUICK, Figures
from .ground_truth import Workbench

SCHEMA: Final = 1
"""Version of the record's JSON format."""

ALL: Final = tuple(name for name in PARTS if name != "one")
"""Parts that run by default."""

_LOCKS_ITSELF: Final = "repeat"
"""Part whose new processes acquire the GPU lock; this process must not hold it meanwhile."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of checks."""

    check: str
    """Name of the check."""
    measured: str
    """The measured figures."""
    bound: str = ""
    """The bound on the figures; empty if there is none."""
    is_met: bool | None = None
    """Whether the figures meet the bound; None if there is none."""


def parts_named(names: str | None) -> tuple[str, ...]:
    """Split the comma-separated part names of ``--only``; None selects all parts."""
    if names is None:
        return ALL
    parts = tuple(name.strip() for name in names.split(","))
    if unknown := [name for name in parts if name not in PARTS]:
        raise UsageError(f"--only={names}: no part {unknown[0]!r}; choose from {', '.join(ALL)}")
    return parts


def run(
    names: Sequence[str],
    open_workbench: Callable[[], Workbench],
    lock_scope: Callable[[], AbstractContextManager[object]],
    store: Callable[[str, Figures], None],
    progress: ProgressLine,
    *,
    quick: bool = False,
) -> None:
    """Run each part under the exclusive GPU lock, and store its figures as soon as it ends.

    If a part raises, its error is stored as ``failed``, and the remaining parts still run.
    """
    workbench: Workbench | None = None
    for name in names:
        progress(f"{name}: begins")
        started = time.monotonic()
        figures: Figures
        try:
            if workbench is None:
                with lock_scope():
                    workbench = open_workbench()
            with nullcontext() if name == _LOCKS_ITSELF else lock_scope():
                figures = PARTS[name](workbench, QUICK if quick else FULL)
                workbench.device.release()
        except Exception as why:  # noqa: BLE001  a part may fail in any way; the others still run
            progress(traceback.format_exc())
            figures = {"failed": f"{type(why).__name__}: {str(why).partition(chr(10))[0]}"}
        date = datetime.now(UTC).date().isoformat()
        store(
            name, {"date": date, "seconds": time.monotonic() - started, "quick": quick, **figures}
        )


class Record:
    """Figures of the parts on one GPU. If a file is named, it is rewritten after each part."""

    def __init__(self, gpu: Gpu, path: Path | None) -> None:
        """Keep the parts in an existing file if its GPU model, driver and torch are the same."""
        self._path = path
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "gpu": to_json(replace(gpu, uuid="")),  # the model only, not the individual GPU
            "torch": metadata.version("torch"),
            "command": "python -m pytest_aiperf prove",
            "parts": {},
        }
        if path is not None and path.exists():
            earlier = read(path)
            if all(earlier.get(k) == v for k, v in self.content.items() if k != "parts"):
                self.content["parts"] = earlier["parts"]

    def store(self, name: str, figures: Figures) -> Figures:
        """Replace a part's figures; return them rounded, as in the file."""
        rounded: Figures = _rounded(figures)
        parts = {**self.content["parts"], name: rounded}
        self.content["parts"] = {name: parts[name] for name in PARTS if name in parts}
        if self._path is not None:
            atomic_write(self._path, f"{dumps(self.content, 'proof', indent=1)}\n")
        return rounded


def _rounded(value: Any) -> Any:
    """Round floats to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def read(path: Path) -> dict[str, Any]:
    """Read a record; raise UsageError if the file is not one."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or "parts" not in content:
        raise UsageError(
            f"{path} is not a self-check record of schema {SCHEMA}: "
            "write a new one with prove --json FILE"
        )
    return content


def rows(parts: Mapping[str, Figures]) -> list[Row]:
    """Return the rows of the table of checks."""
    table = []
    for name, figures in parts.items():
        if "failed" in figures:
            table.append(Row(name, f"failed: {figures['failed']}", "", is_met=False))
        elif name in _ROWS:
            table += _ROWS[name](figures)
    return table


def _spin(f: Figures) -> Iterator[Row]:
    for mode in ("graph", "backlog", "plain"):
        yield _fit(f"spin kernels of 2 µs to 100 ms, {mode} mode", f[mode], mode)
    host = f["host_clock"]
    is_met = abs(host - 1) <= 1e-3
    yield Row("host's clock against the GPU's timer", f"{host:.5f}", "1 ± 0.001", is_met)


def _spin_ladder(f: Figures) -> Iterator[Row]:
    for mode in ("graph", "backlog", "plain"):
        if mode in f:
            yield _fit(f"spin kernels of 20 µs to 5 ms, {mode} mode{_arms(f)}", f[mode], mode)


def _fit(check: str, g: Figures, mode: str) -> Row:
    measured = f"slope {g['slope']:.5f}, {g['a_call_us']:+.2f} µs per call, "
    measured += f"{g['a_block_us']:+.2f} µs per block"
    if mode != "graph":
        return Row(check, measured)
    is_met = abs(g["slope"] - 1) <= 1e-3 and abs(g["a_call_us"]) <= 0.6
    return Row(check, measured, "slope 1 ± 0.001, at most 0.6 µs per call", is_met)


def _floor(f: Figures) -> Iterator[Row]:
    modes = ("graph", "backlog", "plain", "wall")
    yield Row("an empty kernel, per call", ", ".join(f"{mode} {f[mode]:.2f} µs" for mode in modes))


def _flush(f: Figures) -> Iterator[Row]:
    shares = {way: f[f"{way}_of_limit"] for way in ("rotated", "flushed", "warm")}
    measured = ", ".join(f"{way} {text.percent(share)}" for way, share in shares.items())
    check = f"a {f['bytes'] / (1 << 20):.3g} MiB read, share of the read limit"
    is_met = shares["rotated"] <= 1 < shares["warm"] and f["as_cold_as_flushed"] >= 0.9
    bound = "rotated as cold as flushed, at most 100 %; warm above"
    yield Row(check, measured, bound, is_met)


def _modes(f: Figures) -> Iterator[Row]:
    measured = ", ".join(f"{mode} {us:.4g} µs" for mode, us in f["us"].items())
    spread = text.percent(f["apart"], 1)
    yield Row("one copy in each mode", f"{measured}; device modes differ by {spread}")


def _drift(f: Figures) -> Iterator[Row]:
    for g in f.values():
        if not isinstance(g, Mapping):
            continue
        heat = g["slower_after_heat"]
        gpu = (
            "rested GPU" if heat is None else f"heated GPU (blocks {text.percent(heat, 1)} longer)"
        )
        harness, sequential = g["ours"], g["sequential"]
        measured = f"{harness['false_alarms']} of {g['comparisons']}{_refused(harness)}; "
        measured += f"medians in sequence: {sequential['false_alarms']}"
        # if all comparisons were refused, there was no verdict to check
        is_met = not harness["false_alarms"] and harness["refused"] < g["comparisons"]
        yield Row(f"false alarms, {gpu}", measured, "none", is_met)


def _power(f: Figures) -> Iterator[Row]:
    for share, required in (("0.005", 0.0), ("0.01", 0.8), ("0.02", 0.95), ("0.05", 1.0)):
        if share not in f:
            continue
        g = f[share]
        mean = "" if g["mean"] is None else f", mean {_percent(g['mean'])}"
        measured = f"{g['seen']} of {g['of']} detected, {g['wrong']} in the wrong direction"
        is_met = g["seen"] >= required * g["of"] and not g["wrong"]
        bound = f"at least {text.percent(required)} detected, " if required else ""
        check = f"one arm {text.percent(float(share), 1)} slower{_arms(f)}"
        yield Row(
            check,
            f"{measured}{_refused(g)}{mean}",
            f"{bound}none in the wrong direction",
            is_met,
        )
        if equal := g.get("equal"):  # arms of a ladder that are as fast as its baseline
            alarms = g["false_alarms"]
            yield Row(f"false alarms, {check}", f"{alarms} of {equal}", "none", not alarms)


def _repeat(f: Figures) -> Iterator[Row]:
    sd = f["sd"]
    measured = f"{f['ratio']:.3f}x" + ("" if sd is None else f", standard deviation {_percent(sd)}")
    is_met = sd is not None and sd <= 0.005
    check = f"one claim in {f['processes']} processes"
    yield Row(check, measured, "standard deviation at most 0.5 %", is_met)


def _aa(f: Figures) -> Iterator[Row]:
    n, alarms, beyond = f["comparisons"], f["false_alarms"], f["beyond_3_percent"]
    measured = f"{alarms} of {n}{_refused(f)}, {beyond} at 1.03x or more"
    # older records do not have this count
    measured += f", {f['without_1']} intervals without 1" if "without_1" in f else ""
    measured += f"; stopped by {f['broken']}" if f["broken"] else ""
    is_met = alarms <= 0.01 * n and not beyond and not f["broken"]
    bound = "at most 1 %, none at 1.03x or more"
    yield Row(f"false alarms on identical arms{_arms(f)}", measured, bound, is_met)
    again = f["confirmed"]
    check = f"false alarms confirmed by a repeat{_arms(f)}"
    yield Row(check, f"{again} of {n}", "at most 0.1 %", again <= 0.001 * n)
    width = f["half_width"]
    if width is not None:
        measured = f"{_percent(width)}, {f['seconds_each']:.2g} s per comparison"
        check = f"median half-width of an interval{_arms(f)}"
        yield Row(check, measured, "at most 0.5 %", width <= 0.005)


def _arms(f: Figures) -> str:
    """Return the end of a check's name: the arms of a ladder; nothing for pairs of arms."""
    arms = f.get("arms", 2)
    return f", ladders of {arms} arms" if arms > 2 else ""


def _refused(f: Figures) -> str:
    return f" ({f['refused']} refused)" if f["refused"] else ""


_ROWS: Final[Mapping[str, Callable[[Figures], Iterator[Row]]]] = {
    "spin": _spin, "spin_ladder": _spin_ladder, "floor": _floor, "flush": _flush, "modes": _modes,
    "drift": _drift, "power": _power, "power_ladder": _power, "repeat": _repeat, "aa": _aa,
    "aa_ladder": _aa,
}  # fmt: skip


def tables(parts: Mapping[str, Figures], escape_cell: Callable[[str], str] = str) -> str:
    """Return the parts' figures as Markdown tables; ``escape_cell`` escapes the text of a cell."""
    met = {None: "", True: "yes", False: "NO"}
    checks = [(r.check, r.measured, r.bound, met[r.is_met]) for r in rows(parts)]
    sections = [_table(("check", "measured", "bound", "met"), checks, escape_cell)]
    for f in (parts.get("aa", {}), parts.get("aa_ladder", {})):
        if "kinds" not in f:
            continue
        arms = f"identical arms{_arms(f)}"
        head = (arms, "false alarms", "half-width", "sd of replicates", "sd of rounds")
        kinds = [
            (kind, f"{g['false_alarms']} of {g['comparisons']}",
             *(_percent(g[name]) for name in ("half_width", "replicate_sd", "round_sd")))
            for kind, g in f["kinds"].items()
        ]  # fmt: skip
        sections.append(_table(head, kinds, escape_cell))
    if "ways" in (f := parts.get("rivals", {})):
        columns = ("timer", "false alarms", "detected", "bias", "mean error", "worst error", "time")
        timers = [
            ("pytest-aiperf" if timer == "ours" else timer,
             f"{g['false_alarms']} of {g['identical']}", f"{g['seen']} of {g['different']}",
             *(_percent(g[name]) for name in ("bias", "error", "worst")),
             f"{g['seconds_each']:.2f} s")
            for timer, g in f["ways"].items()
        ]  # fmt: skip
        sections.append(_table(columns, timers, escape_cell))
    if "ratio" in (f := parts.get("one", {})):
        sections.append(f"{f['ratio']:.4f}x ± {_percent(f['half_width'])}")
    return "\n\n".join(sections)


def lines(parts: Mapping[str, Figures]) -> list[str]:
    """Return the tables as lines for a terminal; no lines if no part has figures yet."""
    return tables(parts).splitlines() if parts else []


def _percent(share: float | None) -> str:
    return "-" if share is None else text.percent(share, 2)


def _table(
    head: Sequence[str], table: Sequence[Sequence[str]], escape_cell: Callable[[str], str]
) -> str:
    cells = text.pad([head, *([escape_cell(cell) for cell in row] for row in table)], "<")
    cells.insert(1, ["-" * len(cell) for cell in cells[0]])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def section(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown: its machine and date, then its tables."""
    gpu, parts = record["gpu"], record["parts"]
    dates = sorted({f["date"] for f in parts.values()})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "no parts"
    stack = f"{gpu['name']}, driver {gpu['driver']}, torch {record['torch']}, {when}"
    return f"{escape(stack)}, `{record['command']}`:\n\n{tables(parts, escape)}"
