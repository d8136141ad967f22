"""Time per range: what a program's own NVTX ranges or record_function blocks cost on the GPU."""

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from pytest_aiperf.device import trace
from pytest_aiperf.device.trace import Activity
from pytest_aiperf.text import si

MAX_NUMBERED: Final = 32
"""Names that differ only in their numbers, such as "step 17", have rows of their own up to this
many: a model has some tens of layers, while a loop has thousands of steps."""


class ApiCall(NamedTuple):
    """A call of the CUDA API; times in seconds."""

    start: float
    end: float
    correlation: int  #: Id that the activities launched by this call have as well.
    process: Hashable = 0
    thread: Hashable = 0
    name: str = ""


class Range(NamedTuple):
    """A named part of a program's run; times in seconds."""

    name: str
    start: float
    end: float  #: Infinite if the program ended inside the range.
    process: Hashable = 0
    thread: Hashable = None
    """Thread of a nested (push/pop) range; None for one that a process starts and ends anywhere."""


@dataclass(frozen=True, slots=True)
class RangeTime:
    """The GPU work of all ranges of one name, such as "forward"."""

    name: str  #: Name of the ranges; "" for the work that was launched outside of all ranges.
    depth: int = 0  #: Number of ranges around it.
    count: int = 0  #: How often the range was entered.
    seconds: float = 0.0  #: Time of the ranges on the host, added up.
    busy: float = 0.0  #: Seconds in which at least one kernel, copy or memset of the range ran.
    gaps: float = 0.0
    """Seconds between the first start and the last end of a range's GPU work in which none ran; 0
    for the work outside of all ranges."""
    kernels: int = 0
    launches: int = 0  #: API calls that put work on the GPU; a CUDA graph is one launch.
    copies: int = 0
    copied_bytes: float = 0.0


def enclosing(
    calls: Sequence[ApiCall], ranges: Sequence[Range], main: Mapping[Hashable, Hashable]
) -> list[list[int]]:
    """Return for each call the indices of the ranges in which it was made.

    These are the open ranges of its own thread and those that belong to no thread. A call on
    another thread than the one that opened a range, as autograd makes in the backward pass, counts
    to that range as well, if it is clear which thread waits for it: the only other one with an open
    range, or else the main thread. ``main`` maps each process to its main thread.
    """
    moments = sorted(
        [
            *((each.start, 0, index) for index, each in enumerate(ranges)),
            *((each.start, 1, index) for index, each in enumerate(calls)),
            *((each.end, 2, index) for index, each in enumerate(ranges)),
        ]
    )
    threads: defaultdict[Hashable, defaultdict[Hashable, dict[int, None]]]
    threads = defaultdict(lambda: defaultdict(dict))  # open ranges by process and thread
    found: list[list[int]] = [[] for _ in calls]
    for _, kind, index in moments:
        if kind == 1:
            call = calls[index]
            opened = threads[call.process]
            others = [t for t, each in opened.items() if each and t not in (None, call.thread)]
            other = main.get(call.process)
            if len(others) == 1:
                other = others[0]
            around = (None, other, call.thread) if other in others else (None, call.thread)
            found[index] = [each for thread in around for each in opened.get(thread, ())]
            continue
        opened = threads[ranges[index].process]
        if kind == 0:
            opened[ranges[index].thread][index] = None
        else:
            opened[ranges[index].thread].pop(index, None)
    return found


def times(
    activities: Sequence[Activity],
    calls: Sequence[ApiCall],
    ranges: Sequence[Range],
    main: Mapping[Hashable, Hashable],
) -> tuple[RangeTime, ...]:
    """Add up the GPU work per name of a range, in the order in which the names first appear.

    Work counts to the ranges in which the host launched it, not to those during which it ran. A
    range inside one of the same name is a part of that one. The last row, with the name "", is the
    work that was launched outside of all ranges; it is left out if there is none.
    """
    if not ranges:
        return ()
    names = _names(ranges)
    last = max([*(each.end for each in activities), *(each.end for each in calls)], default=0.0)
    around = {
        call.correlation: indices
        for call, indices in zip(calls, enclosing(calls, ranges, main), strict=True)
    }
    depths, outer = _nesting(ranges, names)
    work: defaultdict[int, list[Activity]] = defaultdict(list)  # by index of an outermost range
    outside = []
    for activity in activities:
        indices = around.get(activity.correlation, ())
        for index in {outer[index] for index in indices}:
            work[index].append(activity)
        if not indices:
            outside.append(activity)
    rows: dict[str, list[int]] = {}
    for index in sorted(set(outer), key=lambda index: ranges[index].start):
        rows.setdefault(names[index], []).append(index)
    table = []
    for name, indices in rows.items():
        spans = ((ranges[index].start, ranges[index].end) for index in indices)
        seconds = math.fsum((end if end < math.inf else last) - start for start, end in spans)
        depth = min(depths[index] for index in indices)
        parts = [work[index] for index in indices if index in work]
        table.append(_row(parts, name, depth, len(indices), seconds))
    if outside:  # its launches are spread over the whole run, so gaps between them mean nothing
        table.append(replace(_row([outside]), gaps=0.0))
    return tuple(table)


def sentence(row: RangeTime) -> str:
    """Describe the GPU work of a range in one line."""
    name = f"range {row.name}: {row.count} x" if row.name else "outside of all ranges:"
    gaps = f" {si(row.gaps, 's')} gaps," if row.gaps else ""
    copies = f", {row.copies} copies ({si(row.copied_bytes, 'B')})" if row.copies else ""
    return (
        f"{name}{',' if row.name else ''} {si(row.busy, 's')} on the GPU,{gaps} "
        f"{row.kernels} kernels{copies}"
    )


def _row(
    parts: Sequence[Sequence[Activity]],
    name: str = "",
    depth: int = 0,
    count: int = 1,
    seconds: float = 0.0,
) -> RangeTime:
    """Add up the GPU work of a name's ranges; ``parts`` has that of each range."""
    spans = [trace.busy_and_span(part) for part in parts]
    everything = [activity for part in parts for activity in part]
    copies = [activity for activity in everything if activity.is_copy]
    return RangeTime(
        name,
        depth,
        count,
        seconds,
        busy=math.fsum(busy for busy, _ in spans),
        gaps=math.fsum(span - busy for busy, span in spans),
        kernels=sum(activity.kind == "kernel" for activity in everything),
        launches=trace.launches(everything),
        copies=len(copies),
        copied_bytes=float(sum(activity.bytes for activity in copies)),
    )


def _names(ranges: Iterable[Range]) -> list[str]:
    """Return each range's name; in that of one of very many numbered ranges, "*" for numbers."""
    names = [each.name or "(no name)" for each in ranges]
    numbered: defaultdict[str, set[str]] = defaultdict(set)
    patterns = {name: re.sub(r"\d+", "*", name) for name in set(names)}
    for name, pattern in patterns.items():
        numbered[pattern].add(name)
    return [
        patterns[name] if len(numbered[patterns[name]]) > MAX_NUMBERED else name for name in names
    ]


def _nesting(ranges: Sequence[Range], names: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the depth of each range, and the index of the outermost one around it of its name."""
    depths, outer = [0] * len(ranges), list(range(len(ranges)))
    stacks: defaultdict[tuple[Hashable, Hashable], list[int]] = defaultdict(list)
    order = sorted(range(len(ranges)), key=lambda index: (ranges[index].start, -ranges[index].end))
    for index in order:
        each = ranges[index]
        if each.thread is None:
            continue
        stack = stacks[each.process, each.thread]
        while stack and ranges[stack[-1]].end <= each.start:
            stack.pop()
        depths[index] = len(stack)
        outer[index] = next((i for i in stack if names[i] == names[index]), index)
        stack.append(index)
    return depths, outer
