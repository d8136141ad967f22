"""The nightly gate: a claim's band from its own past nights, and what fell out of it."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Outcome, Result
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.verdict import SESSIONS_APART
from pytest_aiperf.schema import from_json, to_json

from .results import dumps, loads, sync, writing

NIGHTS: Final = 30
"""A band is made of so many valid nights at most,"""
LEAST_NIGHTS: Final = 8
"""and is provisional, which fails nothing, with fewer than these."""
SIGMAS: Final = 4.0
"""A claim is flagged below its median by so many standard deviations, and by SESSIONS_APART."""
SICK: Final = 0.10
"""A sentinel that is off by more than this, and out of its band, voids the night."""
FLEET: Final = (5, 0.2)
"""So many flags, and so large a share of the claims, are one shift of the whole machine."""


@dataclass(frozen=True, slots=True)
class Night:
    """One nightly run on one kind of GPU: a line of the history.

    ``claims`` are speedups, ``sentinels`` seconds of a call; ``void`` says why it counts for
    nothing. Nights of different ``epoch`` are not compared.
    """

    started: str
    run: str
    key: str
    epoch: str
    claims: Mapping[str, float]
    sentinels: Mapping[str, float] = field(default_factory=dict)
    void: str = ""


@dataclass(frozen=True, slots=True)
class Flag:
    """A claim below its band: the median of its past, what it may fall to, and what it is."""

    claim: str
    median: float
    least: float
    value: float

    def __str__(self) -> str:
        drop = 1 - self.value / self.median
        return f"{self.claim}: {self.value:.3f}x, {drop:.1%} below its median {self.median:.3f}x"


@dataclass(frozen=True, slots=True)
class Gate:
    """What a night is to be told: why it is void, what is flagged, what has too short a past."""

    void: str = ""
    shift: str = ""
    flags: tuple[Flag, ...] = ()
    provisional: tuple[str, ...] = ()


def night_of(results: Sequence[Result], sentinels: Collection[str] = ()) -> Night:
    """Make a history line of one run's results on one kind of GPU.

    ``sentinels`` are ids of claims whose optimized arm shows whether the machine is well.
    """
    keys = {r.key for r in results if not r.host}
    if len(keys) != 1:
        raise UsageError(
            f"a night is of one kind of GPU, not of {', '.join(sorted(keys)) or 'none'}"
        )
    valid = [r for r in results if r.speedup is not None and _valid(r) and not r.host]
    first = min((r for r in results if not r.host), key=lambda r: r.started)
    parts = [first.gpu.name if first.gpu else first.key]
    parts += [f"{name} {first.stack[name]}" for name in ("driver", "cuda", "torch", "triton")
              if name in first.stack]  # fmt: skip
    return Night(
        started=first.started,
        run=first.run,
        key=keys.pop(),
        epoch=", ".join(parts),
        claims={r.claim: r.speedup.value for r in valid if r.speedup},
        sentinels={
            r.claim: stats.typical(r.timing.replicates, "optimized")
            for r in valid
            if r.claim in sentinels and r.timing
        },
    )


def _valid(result: Result) -> bool:
    return result.outcome in (Outcome.PASSED, Outcome.FAILED) and not result.profiles


def band(past: Sequence[float]) -> tuple[float, float]:
    """Median of a claim's past speedups, and the least that is still in its band.

    The spread is the median absolute deviation, scaled to a standard deviation: neither moves
    with one odd night.
    """
    logs = [math.log(value) for value in past]
    middle = statistics.median(logs)
    sigma = 1.4826 * statistics.median(abs(v - middle) for v in logs)
    drop = max(SIGMAS * sigma, -math.log1p(-SESSIONS_APART))
    return math.exp(middle), math.exp(middle - drop)


def judge(history: Sequence[Night], tonight: Night) -> Gate:
    """Hold a night against the valid nights of its epoch."""
    past = [n for n in history if n.epoch == tonight.epoch and not n.void][-NIGHTS:]
    if sick := _sick(past, tonight):
        return Gate(void=sick)
    flags, provisional = [], []
    for claim, value in tonight.claims.items():
        own = [n.claims[claim] for n in past if claim in n.claims]
        if len(own) < LEAST_NIGHTS:
            provisional.append(claim)
            continue
        median, least = band(own)
        if value < least:
            flags.append(Flag(claim, median, least, value))
    held = len(tonight.claims) - len(provisional)
    count, share = FLEET
    if len(flags) >= max(count, share * held):
        drop = 1 - statistics.median(f.value / f.median for f in flags)
        shift = f"{len(flags)} of {held} claims lie below their bands, by {drop:.1%} in the median"
        return Gate(shift=shift, flags=tuple(flags), provisional=tuple(provisional))
    return Gate(flags=tuple(flags), provisional=tuple(provisional))


def _sick(past: Sequence[Night], tonight: Night) -> str:
    if tonight.void:
        return tonight.void
    for claim in {claim for night in past for claim in night.sentinels}:
        own = [n.sentinels[claim] for n in past if claim in n.sentinels]
        if len(own) < LEAST_NIGHTS:
            continue
        if claim not in tonight.sentinels:
            return f"the sentinel {claim} has no valid figure"
        median, least = band(own)
        off = tonight.sentinels[claim] / median
        if abs(math.log(off)) > max(math.log(median / least), math.log1p(SICK)):
            return f"the sentinel {claim} takes {off:.2f} times its usual {median:.3g} s"
    return ""


def confirmed(flags: Iterable[Flag], again: Sequence[Sequence[Result]]) -> list[Flag]:
    """Keep the flags that every fresh run shows as well; not measured again is not confirmed."""
    runs = [{r.claim: r.speedup.value for r in run if r.speedup and _valid(r)} for run in again]
    return [f for f in flags if runs and all(r.get(f.claim, math.inf) < f.least for r in runs)]


def change_points(history: Sequence[Night]) -> list[tuple[str, str, float]]:
    """Find lasting steps that single nights hide: (claim, first night after it, ratio).

    PELT on log speedups of the last epoch, with a penalty of 3 variances times log n: Killick,
    Fearnhead and Eckley 2012, as the library ruptures has it. Steps below 1 % are left out.
    """
    try:
        import ruptures
    except ImportError:
        raise UsageError(
            "change points need ruptures: pip install 'pytest-aiperf[history]'"
        ) from None
    valid = [n for n in history if not n.void and n.epoch == history[-1].epoch]
    found = []
    for claim in sorted({claim for night in valid for claim in night.claims}):
        nights = [n for n in valid if claim in n.claims]
        if len(nights) < 2 * LEAST_NIGHTS:
            continue
        logs = [math.log(n.claims[claim]) for n in nights]
        # of differences: a step must not widen the noise that it is held against
        steps = [abs(b - a) for a, b in itertools.pairwise(logs)]
        sigma = max(1.4826 * statistics.median(steps) / math.sqrt(2), 1e-4)
        scaled = [[v / sigma] for v in logs]
        import numpy as np

        search = ruptures.Pelt(model="l2", min_size=3, jump=1).fit(np.array(scaled))
        ends = [0, *search.predict(pen=3 * math.log(len(logs)))]
        parts = [statistics.fmean(logs[a:b]) for a, b in itertools.pairwise(ends)]
        for at, before, after in zip(ends[1:], parts, parts[1:], strict=False):
            if abs(after - before) > 0.01:
                found.append((claim, nights[at].started, math.exp(after - before)))
    return found


def read_history(path: Path) -> list[Night]:
    """Read the nights of a history file, oldest first; a line torn by a crash is passed over."""
    if not path.exists():
        return []
    nights = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            nights.append(from_json(Night, loads(line, f"{path.name}:{number}")))
        except (json.JSONDecodeError, RecursionError):
            if number < len(lines):
                raise UsageError(f"{path}:{number} is torn; take that line out") from None
        except ValueError as why:
            raise UsageError(f"{path}: {why}") from why
    return nights


def append(path: Path, night: Night) -> None:
    """Add a night at the end; it is on disk when this returns."""
    line = dumps(to_json(night), path.name) + "\n"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # what a crash left of a line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)
