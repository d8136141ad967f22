"""The proof of the harness as a record: run its parts, keep what they found, lay it out."""

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

from pytest_aiperf.errors import UsageError
from pytest_aiperf.limits.ceilings import ProgressLine
from pytest_aiperf.model import Gpu
from pytest_aiperf.records.results import atomic_write, dumps, read_json
from pytest_aiperf.report.formatting import escape
from pytest_aiperf.schema import to_json

from .checks import FULL, PARTS, QUICK, Figures
from .ground_truth import Workbench

SCHEMA: Final = 1
ALL: Final = tuple(name for name in PARTS if name != "one")
_UNLEASED: Final = "repeat"  # its processes take the lease themselves


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the proof: what was tried, what came out, what was wanted of it."""

    proof: str
    found: str
    wanted: str = ""
    holds: bool | None = None


def parts_named(text: str | None) -> tuple[str, ...]:
    """Read the names of parts; all of them where none is named."""
    if text is None:
        return ALL
    names = tuple(word.strip() for word in text.split(","))
    if unknown := [name for name in names if name not in PARTS]:
        raise UsageError(
            f"--only={text}: no part is called {unknown[0]!r}; known are {', '.join(ALL)}"
        )
    return names


def run(
    names: Sequence[str],
    make: Callable[[], Workbench],
    alone: Callable[[], AbstractContextManager[object]],
    keep: Callable[[str, Figures], None],
    say: ProgressLine,
    *,
    quick: bool = False,
) -> None:
    """Run parts of the proof, each with the GPU to itself, and keep each as soon as it ends.

    A part that breaks costs no other: it is kept as ``failed``, and why.
    """
    workbench: Workbench | None = None
    for name in names:
        say(f"{name}: begins")
        begun = time.monotonic()
        figures: Figures
        try:
            if workbench is None:
                with alone():
                    workbench = make()
            with nullcontext() if name == _UNLEASED else alone():
                figures = PARTS[name](workbench, QUICK if quick else FULL)
                workbench.device.release()
        except Exception as why:  # noqa: BLE001  whatever it is, the other parts go on
            say(traceback.format_exc())
            figures = {"failed": f"{type(why).__name__}: {str(why).partition(chr(10))[0]}"}
        date = datetime.now(UTC).date().isoformat()
        about = {"date": date, "seconds": time.monotonic() - begun, "quick": quick}
        keep(name, {**about, **figures})


class Record:
    """What was proven, of one kind of machine; on disk after each part, where a file is named."""

    def __init__(self, gpu: Gpu, path: Path | None) -> None:
        """Parts that the file knows of the same GPU, driver and torch stay."""
        self._path = path
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "gpu": to_json(replace(gpu, uuid="")),  # what GPU it was, not which one
            "torch": metadata.version("torch"),
            "command": "python -m pytest_aiperf prove",
            "parts": {},
        }
        if path is not None and path.exists():
            known = read(path)
            if all(known.get(k) == v for k, v in self.content.items() if k != "parts"):
                self.content["parts"] = known["parts"]

    def keep(self, name: str, figures: Figures) -> Figures:
        """Put a part in the place of what was known of it; return it as it was written."""
        kept: Figures = _rounded(figures)
        parts = {**self.content["parts"], name: kept}
        self.content["parts"] = {name: parts[name] for name in PARTS if name in parts}
        if self._path is not None:
            atomic_write(self._path, f"{dumps(self.content, 'proof', indent=1)}\n")
        return kept


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value


def read(path: Path) -> dict[str, Any]:
    """Read a record; Misuse where it is none."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or "parts" not in content:
        raise UsageError(f"{path} is no proof of schema {SCHEMA}: write it anew with prove --json")
    return content


# as people read it


def rows(parts: Mapping[str, Figures]) -> list[Row]:
    """Say what was found of each part, beside what was wanted."""
    found = []
    for name, figures in parts.items():
        if "failed" in figures:
            found.append(Row(name, f"failed: {figures['failed']}", "", holds=False))
        elif name in _ROWS:
            found += _ROWS[name](figures)
    return found


def _spin(f: Figures) -> Iterator[Row]:
    wanted = "slope 1 +- 0.001, at most 0.6 us a call"
    for mode in ("graph", "backlog", "plain"):
        g, graph = f[mode], mode == "graph"
        said = f"slope {g['slope']:.5f}, {g['a_call_us']:+.2f} us a call, "
        said += f"{g['a_block_us']:+.2f} us a block"
        holds = abs(g["slope"] - 1) <= 1e-3 and abs(g["a_call_us"]) <= 0.6
        proof = f"kernels that spin from 2 us to 100 ms: {mode}"
        yield Row(proof, said, wanted if graph else "", holds if graph else None)
    host = f["host_clock"]
    yield Row("the truth of these against the host's clock", f"{host:.5f}", "1 +- 0.001",
              abs(host - 1) <= 1e-3)  # fmt: skip


def _floor(f: Figures) -> Iterator[Row]:
    modes = ("graph", "backlog", "plain", "wall")
    yield Row("a kernel that does nothing", ", ".join(f"{mode} {f[mode]:.2f} us" for mode in modes))


def _flush(f: Figures) -> Iterator[Row]:
    share = {way: f[f"{way}_of_limit"] for way in ("rotated", "flushed", "warm")}
    said = ", ".join(f"{way} {_percent(value, 0)}" for way, value in share.items())
    proof = f"a read of {f['bytes'] / (1 << 20):.3g} MiB, of the read ceiling"
    holds = share["rotated"] <= 1 < share["warm"] and f["as_cold_as_flushed"] >= 0.9
    yield Row(proof, said, "rotated as flushed, and at most 100 %; warm above", holds)


def _modes(f: Figures) -> Iterator[Row]:
    said = ", ".join(f"{mode} {us:.4g} us" for mode, us in f["us"].items())
    yield Row("one copy in each mode", f"{said}; {_percent(f['apart'], 1)} apart without wall")


def _drift(f: Figures) -> Iterator[Row]:
    for g in f.values():
        if not isinstance(g, Mapping):
            continue
        heat = g["slower_after_heat"]
        how = "after a rest" if heat is None else f"heated (blocks {_percent(heat, 1)} longer)"
        ours, theirs = g["ours"], g["sequential"]
        said = f"{ours['false_alarms']} of {g['comparisons']}{_refused(ours)}; "
        said += f"sequential medians {theirs['false_alarms']}"
        # that every one was refused would prove nothing
        holds = not ours["false_alarms"] and ours["refused"] < g["comparisons"]
        yield Row(f"false alarms, {how}", said, "0", holds)


def _power(f: Figures) -> Iterator[Row]:
    for share, wanted in (("0.005", 0.0), ("0.01", 0.8), ("0.02", 0.95), ("0.05", 1.0)):
        g = f[share]
        mean = "" if g["mean"] is None else f", by {_percent(g['mean'])} on average"
        said = f"{g['seen']} of {g['of']} seen, {g['wrong']} the wrong way{_refused(g)}{mean}"
        holds = g["seen"] >= wanted * g["of"] and not g["wrong"]
        least = f"at least {_percent(wanted, 0)}" if wanted else "none the wrong way"
        yield Row(f"one arm {_percent(float(share), 1)} slower", said, least, holds)


def _repeat(f: Figures) -> Iterator[Row]:
    sd = f["sd"]
    said = f"{f['ratio']:.3f}x" + ("" if sd is None else f", sd {_percent(sd)}")
    holds = sd is not None and sd <= 0.005
    yield Row(f"one claim in {f['processes']} processes", said, "sd at most 0.5 %", holds)


def _aa(f: Figures) -> Iterator[Row]:
    n, alarms, beyond = f["comparisons"], f["false_alarms"], f["beyond_3_percent"]
    said = f"{alarms} of {n}{_refused(f)}, {beyond} at 1.03x or more"
    said += f"; then {f['broken']}" if f["broken"] else ""
    holds = alarms <= 0.01 * n and not beyond and not f["broken"]
    yield Row("false alarms of identical arms", said, "at most 1 %, 0", holds)
    again = f["confirmed"]
    yield Row("the same, measured again", f"{again} of {n}", "at most 0.1 %", again <= 0.001 * n)
    width = f["half_width"]
    if width is not None:
        said = f"{_percent(width)}, {f['seconds_each']:.2g} s each"
        yield Row("median half-width of an interval", said, "at most 0.5 %", width <= 0.005)


def _refused(f: Figures) -> str:
    return f" ({f['refused']} refused)" if f["refused"] else ""


_ROWS: Final[Mapping[str, Callable[[Figures], Iterator[Row]]]] = {
    "spin": _spin, "floor": _floor, "flush": _flush, "modes": _modes, "drift": _drift,
    "power": _power, "repeat": _repeat, "aa": _aa,
}  # fmt: skip


def tables(parts: Mapping[str, Figures], shown: Callable[[str], str] = str) -> str:
    """Lay parts out in Markdown tables; ``shown`` escapes what a cell says."""
    made = [
        _table(
            ("proof", "found", "wanted", "holds"),
            [(r.proof, r.found, r.wanted, {None: "", True: "yes", False: "NO"}[r.holds])
             for r in rows(parts)],
            shown,
        )
    ]  # fmt: skip
    if "kinds" in (f := parts.get("aa", {})):
        head = ("identical arms", "false alarms", "half-width", "sd of replicates", "sd of rounds")
        made.append(_table(head, [
            (kind, f"{g['false_alarms']} of {g['comparisons']}", _percent(g["half_width"]),
             _percent(g["replicate_sd"]), _percent(g["round_sd"]))
            for kind, g in f["kinds"].items()], shown))  # fmt: skip
    if "ways" in (f := parts.get("rivals", {})):
        columns = ("way", "false alarms", "seen", "bias", "mean error", "worst", "seconds")
        made.append(_table(columns, [
            (way, f"{g['false_alarms']} of {g['identical']}", f"{g['seen']} of {g['different']}",
             *(_percent(g[name]) for name in ("bias", "error", "worst")),
             f"{g['seconds_each']:.2f}") for way, g in f["ways"].items()], shown))  # fmt: skip
    if "ratio" in (f := parts.get("one", {})):
        made.append(f"{f['ratio']:.4f}x +- {_percent(f['half_width'])}")
    return "\n\n".join(made)


def lines(parts: Mapping[str, Figures]) -> list[str]:
    """Lay parts out for a terminal; nothing where there are none."""
    return tables(parts).splitlines() if parts else []


def _percent(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], shown: Callable[[str], str]) -> str:
    cells = [list(head), *([shown(cell) for cell in line] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in cells]
    padded.insert(1, ["-" * w for w in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def section(record: Mapping[str, Any]) -> str:
    """Write what a README says of a record."""
    gpu, parts = record["gpu"], record["parts"]
    dates = sorted({f["date"] for f in parts.values()})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "never"
    stack = f"{gpu['name']}, driver {gpu['driver']}, torch {record['torch']}, {when}"
    return f"{escape(stack)}, `{record['command']}`:\n\n{tables(parts, escape)}"
