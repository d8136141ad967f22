"""Gaps of the GPU: before which work it waits, and what the host does meanwhile."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Final

from pytest_aiperf.device.trace import Activity
from pytest_aiperf.text import shorten, si

from .ranges import ApiCall, Range, enclosing

MIN_SHARE: Final = 0.1
"""Gaps are described only if all of them take more than this share of the span: less costs little.
"""
LONG_S: Final = 0.01
"""A gap of at least this length is long. A launch takes microseconds, so the host does something
else in a long gap, such as starting up, compiling or loading data: a CUDA graph does not close it.
"""
_LISTED: Final = 3  #: Most places where the GPU waits that are described.
_ADDRESS: Final = re.compile(r" (object )?at 0x[0-9a-f]+")
"""Part of a built-in function's name that differs from call to call."""
_INTERNAL: Final = re.compile(r"<|torch/|.*/torch/")
"""Beginning of the names of frames that are not the user's: built-in functions and PyTorch."""
LAUNCHED: Final = "its launch came in time"
"""Text for gaps that the host does not cause: a launch takes time on the GPU as well, and streams
wait for events."""
LATE: Final = "its launch came late; ranges, or torch:deep_dive, show what the host did"
OUTSIDE: Final = "the host was outside of all ranges"
UNKNOWN: Final = "its launch was not recorded"


def describe(
    activities: Sequence[Activity],
    calls: Sequence[ApiCall],
    frames: Sequence[Range],
    main: Mapping[Hashable, Hashable],
) -> list[str]:
    """Describe the largest gaps, added up by the work that ends them and by what the host did.

    ``frames`` are functions of Python or ranges of the program, with their threads. The host's
    frame is the one in the middle of the time from the start of the gap to the launch that ends it.
    """
    if not activities:
        return []
    by_correlation = {call.correlation: call for call in calls}
    places: list[tuple[float, Activity, ApiCall | str]] = []  # what the host did, or when it did it
    for begin, activity in _gaps(activities):
        call = by_correlation.get(activity.correlation)
        host: ApiCall | str = UNKNOWN if call is None else LAUNCHED
        if call is not None and call.start > begin:
            middle = (begin + min(call.start, activity.start)) / 2
            host = call._replace(start=middle, end=middle)
        places.append((activity.start - begin, activity, host))
    total = sum(gap for gap, _, _ in places)
    span = max(each.end for each in activities) - min(each.start for each in activities)
    if total <= MIN_SHARE * span:
        return []
    moments = [host for _, _, host in places if not isinstance(host, str)]
    around = iter(enclosing(moments, frames, main))
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    counts: Counter[tuple[str, str]] = Counter()
    for gap, activity, host in places:
        if not isinstance(host, str):
            names = [frames[index].name for index in next(around)]
            host = _place(names) if frames else LATE  # noqa: PLW2901
        key = activity.name or activity.kind, host
        seconds[key] += gap
        counts[key] += 1
    return [
        f"the GPU waits {si(seconds[key], 's')} before {shorten(key[0])} ({counts[key]} x): "
        f"{key[1]}"
        for key in sorted(seconds, key=lambda key: -seconds[key])[:_LISTED]
    ]


def long_seconds(activities: Collection[Activity]) -> float:
    """Return the time in gaps that are too long to be those between launches."""
    gaps = (activity.start - begin for begin, activity in _gaps(activities))
    return sum(gap for gap in gaps if gap >= LONG_S)


def _gaps(activities: Collection[Activity]) -> Iterator[tuple[float, Activity]]:
    """Yield the begin of each gap, and the activity that ends it."""
    busy_until = min((each.start for each in activities), default=0.0)
    for activity in sorted(activities, key=lambda activity: activity.start):
        if activity.start > busy_until:
            yield busy_until, activity
        busy_until = max(busy_until, activity.end)


def _place(names: Sequence[str]) -> str:
    """Describe where the host was: the innermost frame, and the innermost one of the user's."""
    if not names:
        return OUTSIDE
    names = [_ADDRESS.sub("", name) for name in names]
    own = next((name for name in reversed(names) if not _INTERNAL.match(name)), names[-1])
    return f"the host was in {names[-1]}" + (f", called in {own}" if own != names[-1] else "")
