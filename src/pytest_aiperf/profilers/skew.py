"""Skew of ranks: which rank the others wait for at collectives, from the traces of all ranks."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pytest_aiperf.text import percent, si

from .timeline import load_json


class _Arrival(NamedTuple):
    """The start of a collective on one rank, in seconds; ``number`` is None in older traces."""

    start: float
    number: int | None
    name: str


@dataclass(frozen=True, slots=True)
class Skew:
    """The times between the first and the last rank's arrival at the collectives of a trace."""

    collectives: int
    mean: float  #: Seconds per collective.
    largest: float  #: Seconds at the collective with the largest skew.
    name: str  #: Name of that collective.
    waits: Mapping[str, float]  #: Seconds that each rank waited for the last one, added up.
    last: str  #: The rank that was most often the last one.
    share: float  #: Share of the collectives at which it was the last one.

    def __str__(self) -> str:
        return (
            f"ranks arrive {si(self.mean, 's')} apart on average, at most "
            f"{si(self.largest, 's')} at {self.name} (collectives: {self.collectives}); "
            f"{self.last} is the last one at {percent(self.share)} of them"
        )


def of(traces: Mapping[str, Path]) -> Skew | None:
    """Compare the traces of the ranks of one host; None if they have no collective in common.

    A rank arrives when NCCL's kernel starts on its GPU, where it waits for the other ranks.
    """
    groups: defaultdict[str, dict[str, list[_Arrival]]] = defaultdict(dict)
    for rank, file in traces.items():
        for group, arrival in _arrivals(file):
            groups[group].setdefault(rank, []).append(arrival)
    collectives = [one for by_rank in groups.values() for one in _matched(by_rank)]
    if not collectives:
        return None
    waits: defaultdict[str, float] = defaultdict(float)
    last: Counter[str] = Counter()
    skews = []
    for starts in collectives:
        latest = max(starts, key=lambda rank: starts[rank].start)
        last[latest] += 1
        for rank, arrival in starts.items():
            waits[rank] += starts[latest].start - arrival.start
        first = min(arrival.start for arrival in starts.values())
        skews.append((starts[latest].start - first, starts[latest].name))
    largest, name = max(skews)
    [(rank, count)] = last.most_common(1)
    mean = fmean(seconds for seconds, _ in skews)
    return Skew(len(skews), mean, largest, name, dict(waits), rank, count / len(skews))


def _matched(by_rank: Mapping[str, list[_Arrival]]) -> Iterator[dict[str, _Arrival]]:
    """Yield each collective of a process group with the arrivals of its ranks.

    Older versions of PyTorch do not number collectives: they are then matched by their order, if
    all ranks recorded equally many.
    """
    is_numbered = all(each.number is not None for found in by_rank.values() for each in found)
    if not is_numbered and len({len(found) for found in by_rank.values()}) > 1:
        return
    matched: defaultdict[int | None, dict[str, _Arrival]] = defaultdict(dict)
    for rank, found in by_rank.items():
        for index, arrival in enumerate(sorted(found)):
            matched[arrival.number if is_numbered else index].setdefault(rank, arrival)
    yield from (starts for starts in matched.values() if len(starts) > 1)


def _arrivals(file: Path) -> Iterator[tuple[str, _Arrival]]:
    """Yield the collectives of a rank, each with its process group."""
    content = load_json(file, "torch.profiler trace")
    base = float(content.get("baseTimeNanoseconds", 0)) / 1e9
    for event in content.get("traceEvents", ()):
        name = str(event.get("name", "")).partition("(")[0]
        # a kernel that sends or receives waits for single ranks only
        if event.get("cat") != "kernel" or not name.startswith("nccl") or "SendRecv" in name:
            continue
        args = event.get("args", {})
        group = f"{args.get('Process Group Name')} {args.get('Process Group Ranks')}"
        yield group, _Arrival(base + float(event["ts"]) / 1e6, args.get("Seq"), name)
