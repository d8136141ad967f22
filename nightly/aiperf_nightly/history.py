"""Judgement of a nightly run by the nights before it."""

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
from pytest_aiperf.records.results import dumps, loads, sync, writing
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.verdict import SESSIONS_APART
from pytest_aiperf.schema import from_json, to_json

MAX_NIGHTS: Final = 30
"""Number of latest valid nights in a band: a month."""

MIN_NIGHTS: Final = 8
"""Fewer nights give a provisional band, in which nothing fails: their spread is too uncertain."""

SIGMAS: Final = 4.0
"""Standard deviations below the median at which a claim is flagged; SESSIONS_APART at least."""

MAX_SENTINEL_CHANGE: Final = 0.10
"""Change of a sentinel that voids a night if it also leaves the sentinel's band."""

SHIFT_MIN_FLAGS: Final = 5
"""Fewest flags that count as one shift of the whole machine."""

SHIFT_MIN_SHARE: Final = 0.2
"""Smallest share of flagged claims that counts as one shift of the whole machine."""

MIN_STEP: Final = 0.01
"""Smallest lasting change of a log speedup that `drift` lists; 0.01 is about 1 %."""

MAD_TO_SIGMA: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True, slots=True)
class Night:
    """A nightly run on one kind of GPU: one line of the history."""

    started: str
    """Start of its first result, as an ISO 8601 time."""
    run: str
    """Id of the run."""
    key: str
    """Kind of GPU, such as h200 or 2xh200."""
    epoch: str
    """GPU and software; only nights of the same epoch are compared."""
    claims: Mapping[str, float]
    """Speedup by claim."""
    sentinels: Mapping[str, float] = field(default_factory=dict)
    """Seconds per call by sentinel claim."""
    void: str = ""
    """Why the night does not count, "" if it does."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A claim whose speedup fell below its band."""

    claim: str
    median: float
    """Of the past nights."""
    least: float
    """Lower end of the band."""
    value: float

    def __str__(self) -> str:
        drop = 1 - self.value / self.median
        return f"{self.claim}: {self.value:.3f}x, {drop:.1%} below its median {self.median:.3f}x"


@dataclass(frozen=True, slots=True)
class Gate:
    """The comparison of a night with its history."""

    void: str = ""
    """Why the night does not count."""
    shift: str = ""
    """Description of a change of many claims at once."""
    flags: tuple[Flag, ...] = ()
    provisional: tuple[str, ...] = ()
    """Claims with too few nights for a band."""


def night_of(results: Sequence[Result], sentinels: Collection[str] = ()) -> Night:
    """Summarize the results of a run on one kind of GPU.

    ``sentinels`` are claims whose time per call shows whether the machine is healthy.
    """
    keys = {r.key for r in results if not r.host}
    if len(keys) != 1:
        raise UsageError(
            f"a night is of one kind of GPU, not of {', '.join(sorted(keys)) or 'none'}"
        )
    valid = [r for r in results if r.speedup is not None and _is_valid(r) and not r.host]
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


def _is_valid(result: Result) -> bool:
    return result.outcome in (Outcome.PASSED, Outcome.FAILED) and not result.profiles


def band(past: Sequence[float]) -> tuple[float, float]:
    """Return the median of past speedups, and the lower end of their band.

    The spread is the median absolute deviation, which one outlier does not move.
    """
    logs = [math.log(value) for value in past]
    median = statistics.median(logs)
    sigma = MAD_TO_SIGMA * statistics.median(abs(v - median) for v in logs)
    drop = max(SIGMAS * sigma, -math.log1p(-SESSIONS_APART))
    return math.exp(median), math.exp(median - drop)


def judge(history: Sequence[Night], tonight: Night) -> Gate:
    """Compare a night with the valid nights of its epoch."""
    past = [n for n in history if n.epoch == tonight.epoch and not n.void][-MAX_NIGHTS:]
    if void := tonight.void or _sentinel_problem(past, tonight):
        return Gate(void=void)
    flags, provisional = [], []
    for claim, value in tonight.claims.items():
        speedups = [n.claims[claim] for n in past if claim in n.claims]
        if len(speedups) < MIN_NIGHTS:
            provisional.append(claim)
            continue
        median, least = band(speedups)
        if value < least:
            flags.append(Flag(claim, median, least, value))
    count = len(tonight.claims) - len(provisional)
    shift = ""
    if len(flags) >= max(SHIFT_MIN_FLAGS, SHIFT_MIN_SHARE * count):
        drop = 1 - statistics.median(f.value / f.median for f in flags)
        shift = f"{len(flags)} of {count} claims lie below their bands, by {drop:.1%} in the median"
    return Gate(shift=shift, flags=tuple(flags), provisional=tuple(provisional))


def _sentinel_problem(past: Sequence[Night], tonight: Night) -> str:
    """Describe a sentinel that is missing or out of its band, "" if all are fine."""
    for claim in {claim for night in past for claim in night.sentinels}:
        seconds = [n.sentinels[claim] for n in past if claim in n.sentinels]
        if len(seconds) < MIN_NIGHTS:
            continue
        if claim not in tonight.sentinels:
            return f"the sentinel {claim} has no valid figure"
        median, least = band(seconds)
        ratio = tonight.sentinels[claim] / median
        if abs(math.log(ratio)) > max(math.log(median / least), math.log1p(MAX_SENTINEL_CHANGE)):
            return f"the sentinel {claim} takes {ratio:.2f} times its usual {median:.3g} s"
    return ""


def confirmed(flags: Iterable[Flag], again: Sequence[Sequence[Result]]) -> list[Flag]:
    """Return the flags that every further run shows too; a claim must be in all of them."""
    runs = [{r.claim: r.speedup.value for r in run if r.speedup and _is_valid(r)} for run in again]
    return [f for f in flags if runs and all(r.get(f.claim, math.inf) < f.least for r in runs)]


def change_points(history: Sequence[Night]) -> list[tuple[str, str, float]]:
    """Find lasting steps in the last epoch, as (claim, start of the first night after it, ratio).

    The library ruptures applies PELT (Killick, Fearnhead and Eckley 2012) to the log speedups of a
    claim. The penalty per step is 3 variances times log n.
    """
    # both load slowly, and `python -m pytest_aiperf` imports this module for every command
    import numpy as np
    import ruptures

    valid = [n for n in history if not n.void and n.epoch == history[-1].epoch]
    steps = []
    for claim in sorted({claim for night in valid for claim in night.claims}):
        nights = [n for n in valid if claim in n.claims]
        if len(nights) < 2 * MIN_NIGHTS:
            continue
        logs = [math.log(n.claims[claim]) for n in nights]
        # the noise of differences: a step does not increase the noise that it is compared with
        differences = [abs(b - a) for a, b in itertools.pairwise(logs)]
        sigma = max(MAD_TO_SIGMA * statistics.median(differences) / math.sqrt(2), 1e-4)
        search = ruptures.Pelt(model="l2", min_size=3, jump=1)
        search.fit(np.array([[v / sigma] for v in logs]))
        ends = [0, *search.predict(pen=3 * math.log(len(logs)))]
        means = [statistics.fmean(logs[a:b]) for a, b in itertools.pairwise(ends)]
        for first, before, after in zip(ends[1:], means, means[1:], strict=False):
            if abs(after - before) > MIN_STEP:
                steps.append((claim, nights[first].started, math.exp(after - before)))
    return steps


def read_history(path: Path) -> list[Night]:
    """Read the nights of a history file; a last line that a crash left incomplete is skipped."""
    if not path.exists():
        return []
    nights = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            nights.append(from_json(Night, loads(line, f"{path.name}:{number}")))
        except (json.JSONDecodeError, RecursionError):
            if number < len(lines):
                raise UsageError(f"{path}:{number} is torn; remove that line") from None
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
    return nights


def append(path: Path, night: Night) -> None:
    """Append a night; it is on disk when this returns."""
    line = dumps(to_json(night), path.name) + "\n"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # removes an incomplete last line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)
