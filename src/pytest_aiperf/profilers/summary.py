"""Captures of commands as tables: one capture, or two of them before and after a change."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_aiperf.model import Profile
from pytest_aiperf.text import percent, shorten, si
from pytest_aiperf.text import table as columns

from .command import CRASHES, EXPIRED, INTERRUPTED, CommandRecord, Part, ToolCapture
from .ranges import RangeTime
from .timeline import GPU_COUNTS

RANGE_COLUMNS: Final = (
    *("range", "count", "host time", "GPU time", "share", "gaps"),
    *("kernels", "launches", "copies", "copied"),
)
"""Columns of the table of ranges; the share is that of the GPU time of the whole profile."""
OUTSIDE: Final = "(outside of all ranges)"  #: Name of the row of work that no range launched.
_KERNELS: Final = 5  #: Maximum number of kernels that a comparison names as new or gone.


@dataclass(frozen=True, slots=True)
class Section:
    """A table with its heading and remarks."""

    title: str
    rows: Sequence[Sequence[str]] = ()  #: The first row is the table's head.
    remarks: Sequence[str] = ()


def capture(record: CommandRecord) -> Iterator[Section]:
    """Yield the sections of a capture: per tool its figures, then its ranges by process or GPU.

    Errors are remarks of the tool's section.
    """
    for each in record.captures:
        yield _figures(each)
        for part in each.parts:
            if part.ranges:
                title = f"{each.tool}: time per range, {part.profile.arm}"
                yield Section(title, [list(RANGE_COLUMNS), *_range_rows(part)])


def comparison(before: CommandRecord, after: CommandRecord) -> Iterator[Section]:
    """Yield the figures and ranges of two captures side by side, tool by tool.

    Processes and GPUs are paired in their order, or by name if their numbers differ.
    """
    found = {capture.tool: capture for capture in after.captures}
    for old in before.captures:
        if (new := found.get(old.tool)) is None:
            yield Section(f"{old.tool}: only before")
            continue
        parts = {part.profile.arm: part for part in new.parts}
        if len(old.parts) == len(new.parts):  # a name may have a process id, which differs
            pairs = zip(old.parts, new.parts, strict=True)
            parts = {first.profile.arm: second for first, second in pairs}
        for part in old.parts:
            arm = part.profile.arm
            title = f"{old.tool}: {arm}"
            yield (
                _compared(title, part, parts[arm])
                if arm in parts
                else Section(title, remarks=["only before"])
            )
        names = {part.profile.arm for part in old.parts}
        yield from (
            Section(f"{old.tool}: {arm}", remarks=["only after"]) for arm in parts.keys() - names
        )
        for label, side in (("before", old), ("after", new)):
            if side.error:
                yield Section(f"{old.tool}: {label}", remarks=[side.error])
    tools = {capture.tool for capture in before.captures}
    yield from (Section(f"{tool}: only after") for tool in found if tool not in tools)


def text(sections: Iterable[Section]) -> list[str]:
    """Lay out sections for a terminal, with an empty line between two of them."""
    lines: list[str] = []
    for section in sections:
        lines += ["", *([section.title] if section.title else [])]
        lines += [f"  {line}" for line in columns(section.rows)] if section.rows else []
        lines += [f"  {remark}" for remark in section.remarks]
    return lines[1:]


def markdown(title: str, sections: Iterable[Section]) -> str:
    """Lay out sections as Markdown with a title."""
    parts = [f"# {_code(title)}"]
    for section in sections:
        parts.append(f"## {_escape(section.title)}")
        if section.rows:
            head, *body = section.rows
            rule = ["---", *["---:"] * (len(head) - 1)]
            rows = [map(_escape, head), rule, *([_code(r[0]), *map(_escape, r[1:])] for r in body)]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
        if section.remarks:
            parts.append("\n".join(f"- {_code(remark)}" for remark in section.remarks))
    return "\n\n".join(parts) + "\n"


def heading(record: CommandRecord) -> str:
    """Return the command line of a record; empty for that of a single file."""
    return shlex.join(record.command)


def _figures(each: ToolCapture) -> Section:
    preset = f" ({each.preset})" if each.preset else ""
    remarks = []
    for part in each.parts:
        arm = f"{part.profile.arm}: " if len(each.parts) > 1 else ""
        remarks += [f"{arm}{note}" for note in part.profile.notes]
        remarks += [f"{arm}{part.diagnosis}"] if part.diagnosis else []
    remarks += list(dict.fromkeys(part.profile.artifact for part in each.parts))
    if each.error:
        remarks.append(f"no figures: {each.error}")
    if each.log:
        remarks.append(f"{each.log}: {_ending(each.status)} after {si(each.seconds, 's')}")
    profiles = [part.profile for part in each.parts]
    names = dict.fromkeys(name for profile in profiles for name in profile.figures)
    rows = [[name, *(_figure(profile, name) for profile in profiles)] for name in names]
    head = [["figure", *(profile.arm for profile in profiles)]] if rows else []
    return Section(f"{each.tool}{preset}", [*head, *rows], remarks)


def _ending(status: int | None) -> str:
    if status is None:
        return "the command did not start"
    endings = {EXPIRED: "interrupted by --deadline", INTERRUPTED: "interrupted"}
    endings |= {code: f"exit status {code} ({name})" for code, name in CRASHES.items()}
    return endings.get(status, f"exit status {status}")


def _range_rows(part: Part) -> Iterator[list[str]]:
    busy = part.profile.figures.get("busy", 0.0)
    is_counted = GPU_COUNTS[0] in part.profile.figures
    for row in part.ranges:
        counts = (row.kernels, row.launches, row.copies)
        yield [
            f"{'  ' * row.depth}{row.name or OUTSIDE}",
            str(row.count) if row.name else "",
            si(row.seconds, "s") if row.name else "",
            si(row.busy, "s") if row.busy else "-",
            percent(row.busy / busy) if busy else "-",
            si(row.gaps, "s") if row.gaps else "-",
            *(str(count) if is_counted else "-" for count in counts),
            si(row.copied_bytes, "B") if row.copies else "-",
        ]


def _compared(title: str, before: Part, after: Part) -> Section:
    old, new = before.profile, after.profile
    rows = [["figure", "before", "after", "ratio"]]
    for name in dict.fromkeys([*old.figures, *new.figures]):
        figures = old.figures.get(name), new.figures.get(name)
        rows.append([name, _figure(old, name), _figure(new, name), _ratio(*figures)])
    sides = [{row.name: row for row in part.ranges} for part in (before, after)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        first, second = (side.get(name) for side in sides)
        for what, unit in (("busy", "s"), ("gaps", "s"), ("kernels", ""), ("copied_bytes", "B")):
            values = [_value(row, what) for row in (first, second)]
            if any(values):
                label = {"busy": "GPU time", "copied_bytes": "copied"}.get(what, what)
                cells = ["-" if value is None else _amount(value, unit) for value in values]
                rows.append([f"{name or OUTSIDE}: {label}", *cells, _ratio(*values)])
    remarks = []
    for label, names, others in (
        ("only before", old.kernels, new.kernels), ("only after", new.kernels, old.kernels),
    ):  # fmt: skip
        if single := [name for name in names if name not in others]:
            more = f" and {len(single) - _KERNELS} more" if len(single) > _KERNELS else ""
            remarks.append(f"{label}: {', '.join(map(shorten, single[:_KERNELS]))}{more}")
    for label, part in (("before", before), ("after", after)):
        if part.diagnosis:
            remarks.append(f"{label}: {part.diagnosis}")
    return Section(title, rows, remarks)


def _value(row: RangeTime | None, name: str) -> float | None:
    return None if row is None else float(getattr(row, name))


def _ratio(before: float | None, after: float | None) -> str:
    return f"{after / before:.3g}x" if before and after is not None else "-"


def _figure(profile: Profile, name: str) -> str:
    value = profile.figures.get(name)
    return "-" if value is None else _amount(value, profile.units.get(name, ""))


def _amount(value: float, unit: str) -> str:
    if unit == "share":
        return percent(value, 1)
    return f"{value:.0f}" if not unit and value.is_integer() else si(value, unit)


def _code(content: str) -> str:
    """Return Markdown that shows text as code, also in a table."""
    safe = "".join(c if c.isprintable() else "?" for c in content)
    indent = len(safe) - len(safe.lstrip(" "))  # Markdown drops spaces at the start of a cell
    return "&nbsp;" * indent + "`" + safe.strip().replace("`", "'").replace("|", "\\|") + "`"


def _escape(content: str) -> str:
    return content.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*")
