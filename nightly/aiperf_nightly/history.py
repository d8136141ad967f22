"""The history of nightly runs: bands of speedups, flagged claims, lasting changes.

A band is the range in which a claim's speedup is expected, from the median and the spread of past
nights. A sentinel is a claim whose time shows whether the machine is healthy.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Outcome, Result
from pytest_aiperf.records.expectations import HOST
from pytest_aiperf.records.results import dumps, loads, sync, writing
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.verdict import SESSIONS_APART
from pytest_aiperf.schema import from_json, to_json

MAX_NIGHTS: Final = 30
"""Maximum number of nights from which a band is computed: about the latest month."""

MIN_NIGHTS: Final = 8
"""Minimum number of nights for a band: with fewer, the spread is too uncertain."""

SIGMAS: Final = 4.0
"""Standard deviations from the median to a band's end, if that is more than SESSIONS_APART."""

MAX_SENTINEL_CHANGE: Final = 0.10
"""Largest relative distance of a sentinel's time from its past median.

A night is void if the time lies farther away and outside the sentinel's band.
"""

SHIFT_MIN_FLAGS: Final = 5
"""Minimum number of flagged claims for a shift of the whole machine."""

SHIFT_MIN_SHARE: Final = 0.2
"""For a shift, at least this fraction of the claims with a band must be flagged, too."""

MIN_STEP: Final = 0.01
"""`drift` lists a lasting change of a log speedup if it exceeds this, about 1 %."""

FAILURES: Final = (Outcome.FAILED, Outcome.INVALID, Outcome.ERROR)
"""Outcomes of claims that ran and did not pass."""

NOT_PASSED: Final = (*FAILURES, Outcome.SKIPPED)
"""Outcomes that `gate` flags: a skipped claim that passed before may now lack a library or GPU."""

MAD_TO_SIGMA: Final = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""


@dataclass(frozen=True, slots=True)
class Night:
    """A nightly run on one kind of GPU; stored as one line of the history file."""

    started: str
    """Time at which the first claim started, in ISO 8601."""
    run: str
    """Run id."""
    key: str
    """Kind of GPU, such as h200 or 2xh200."""
    epoch: str
    """GPU model and software versions; only nights of the same epoch are compared."""
    claims: Mapping[str, float]
    """Each claim's id and speedup."""
    sentinels: Mapping[str, float] = field(default_factory=dict)
    """Each sentinel claim's id and seconds per call."""
    void: str = ""
    """Why the night is void; empty if it is valid."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Outcome of each claim that did not pass or was skipped, unless a further run passed."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A claim whose speedup fell below its band."""

    claim: str
    median: float
    """Median of the claim's speedups in past nights."""
    least: float
    """Lower end of the band."""
    value: float
    """The claim's speedup this night."""

    def __str__(self) -> str:
        drop = 1 - self.value / self.median
        return f"{self.claim}: {self.value:.3f}x, {drop:.1%} below its median {self.median:.3f}x"

    def is_cleared_by(self, result: Result) -> bool:
        """Whether a further run shows a valid speedup that is not below the band."""
        speedup = result.speedup if _is_valid(result) else None
        return speedup is not None and speedup.value >= self.least


@dataclass(frozen=True, slots=True)
class Failure:
    """A claim that did not pass, and passed in the last valid night that measured it."""

    claim: str
    outcome: str
    """How the claim ended."""
    passed: str
    """Start of the night in which it passed."""

    def __str__(self) -> str:
        return f"{self.claim}: {self.outcome}, and it passed in the night of {self.passed[:10]}"

    def is_cleared_by(self, result: Result) -> bool:
        """Whether a further run passed."""
        return result.outcome is Outcome.PASSED


AnyFlag = Flag | Failure


@dataclass(frozen=True, slots=True)
class Band:
    """The range in which a figure is expected."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Point:
    """A claim's speedup, or a sentinel's seconds per call, in one night."""

    night: Night
    value: float
    band: Band | None
    """The band of the nights before; None after fewer than MIN_NIGHTS of them."""
    is_outside: bool
    """Whether a speedup lies below its band; whether a sentinel lies on either side of its band.

    False in a void night."""


@dataclass(frozen=True, slots=True)
class Step:
    """A lasting change of a claim's speedup."""

    claim: str
    night: Night
    """First night with the change."""
    ratio: float
    """Mean speedup after the change divided by the mean before it."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The outcome of comparing a night with its history."""

    void: str = ""
    """Why the night is void; empty if it is valid."""
    shift: str = ""
    """Description of a drop of many claims at once; empty if there is no such drop."""
    flags: tuple[Flag, ...] = ()
    """Claims that fell below their bands."""
    failures: tuple[Failure, ...] = ()
    """Claims that passed before and did not pass this night."""
    provisional: tuple[str, ...] = ()
    """Claims measured in too few past nights to have a band, so that no drop can be flagged."""

    @property
    def all_flags(self) -> tuple[AnyFlag, ...]:
        return (*self.flags, *self.failures)


def nights_of(results: Sequence[Result], sentinels: Collection[str] = ()) -> list[Night]:
    """Summarize the results of a run, one night per kind of GPU on which claims ran.

    The nights are void if one of the ``sentinels`` has no valid figure on any of them.
    """
    ran = [r for r in results if r.speedup or r.outcome in FAILURES]
    keys = sorted({r.key for r in ran if not r.host} - {"", HOST})
    nights = [night_of([r for r in results if r.key == key], sentinels) for key in keys]
    missing = sorted({*sentinels} - {claim for night in nights for claim in night.sentinels})
    void = f"the sentinel {missing[0]} has no valid figure" if missing else ""
    return [replace(night, void=void) for night in nights]


def night_of(results: Sequence[Result], sentinels: Collection[str] = ()) -> Night:
    """Summarize the results of a run on one kind of GPU.

    ``sentinels`` are claims whose time per call shows whether the machine is healthy.
    """
    keys = {r.key for r in results if not r.host}
    if len(keys) != 1:
        raise UsageError(
            f"a night needs results of one kind of GPU, not of {', '.join(sorted(keys)) or 'none'}"
        )
    valid = [r for r in results if r.speedup is not None and _is_valid(r) and not r.host]
    on_gpu = [r for r in results if not r.host]
    # a claim that crashed early may not have recorded its GPU
    first = min([r for r in on_gpu if r.gpu] or on_gpu, key=lambda r: r.started)
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
            r.claim: stats.mean_call_s(r.timing.replicates, "optimized")
            for r in valid
            if r.claim in sentinels and r.timing
        },
        failed={r.claim: r.outcome.value for r in on_gpu if r.outcome in NOT_PASSED},
    )


def _is_valid(result: Result) -> bool:
    return result.outcome in (Outcome.PASSED, Outcome.FAILED) and not result.profiles


def band(past: Sequence[float], min_half_width: float = -math.log1p(-SESSIONS_APART)) -> Band:
    """Return the band of past figures; ``min_half_width`` is the logarithm of a ratio.

    The standard deviation is estimated from the median absolute deviation, which one outlier hardly
    changes.
    """
    logs = [math.log(value) for value in past]
    median = statistics.median(logs)
    sigma = MAD_TO_SIGMA * statistics.median(abs(v - median) for v in logs)
    half = max(SIGMAS * sigma, min_half_width)
    return Band(*(math.exp(v) for v in (median - half, median, median + half)))


def _sentinel_band(past: Sequence[float]) -> Band:
    return band(past, math.log1p(MAX_SENTINEL_CHANGE))


def judge(history: Sequence[Night], tonight: Night) -> Gate:
    """Compare tonight's run with the latest valid nights of the same epoch.

    The first valid night of an epoch is compared with the epoch before, or a drop that comes with a
    new driver would become the median unseen. Sentinels are not: a new driver may change their
    times for good, and all later nights would be void.
    """
    past = _comparable(history, tonight)
    if void := tonight.void or _sentinel_problem(past, tonight):
        return Gate(void=void)
    if not past and (valid := [n for n in history if not n.void]):
        past = _comparable(history, valid[-1])
    flags, provisional = [], []
    for claim, value in tonight.claims.items():
        speedups = [n.claims[claim] for n in past if claim in n.claims]
        if len(speedups) < MIN_NIGHTS:
            provisional.append(claim)
            continue
        expected = band(speedups)
        if value < expected.low:
            flags.append(Flag(claim, expected.median, expected.low, value))
    count = len(tonight.claims) - len(provisional)
    shift = ""
    if len(flags) >= max(SHIFT_MIN_FLAGS, SHIFT_MIN_SHARE * count):
        drop = 1 - statistics.median(f.value / f.median for f in flags)
        shift = f"{len(flags)} of {count} claims lie below their bands, by {drop:.1%} in the median"
    return Gate("", shift, tuple(flags), _failures(history, tonight), tuple(provisional))


def _failures(history: Sequence[Night], tonight: Night) -> tuple[Failure, ...]:
    """Return the claims that did not pass, and passed when a valid night last measured them."""
    last: dict[str, Night] = {}
    for night in history:
        if not night.void:
            last |= dict.fromkeys((*night.claims, *night.failed), night)
    return tuple(
        Failure(claim, outcome, last[claim].started)
        for claim, outcome in tonight.failed.items()
        if claim in last and claim not in last[claim].failed
    )


def _comparable(history: Sequence[Night], night: Night) -> list[Night]:
    """Return the latest valid nights of the same epoch."""
    return [n for n in history if n.epoch == night.epoch and not n.void][-MAX_NIGHTS:]


def courses(nights: Sequence[Night], *, sentinels: bool = False) -> dict[str, list[Point]]:
    """Return each claim's speedup, or each sentinel's seconds, in every night, with its band."""
    points: dict[str, list[Point]] = {}
    for index, night in enumerate(nights):
        past = _comparable(nights[:index], night)
        for claim, value in (night.sentinels if sentinels else night.claims).items():
            before = [n.sentinels if sentinels else n.claims for n in past]
            figures = [each[claim] for each in before if claim in each]
            expected, is_outside = None, False
            if len(figures) >= MIN_NIGHTS:
                expected = _sentinel_band(figures) if sentinels else band(figures)
                above = sentinels and value > expected.high
                is_outside = not night.void and (value < expected.low or above)
            points.setdefault(claim, []).append(Point(night, value, expected, is_outside))
    return points


def _sentinel_problem(past: Sequence[Night], tonight: Night) -> str:
    """Describe a sentinel of tonight that is outside its band; "" if all are within theirs."""
    for claim, value in tonight.sentinels.items():
        seconds = [n.sentinels[claim] for n in past if claim in n.sentinels]
        if len(seconds) < MIN_NIGHTS:
            continue
        expected = _sentinel_band(seconds)
        if not expected.low <= value <= expected.high:
            ratio = value / expected.median
            return f"the sentinel {claim} takes {ratio:.2f} times its usual {expected.median:.3g} s"
    return ""


def confirmed(
    flags: Iterable[AnyFlag], again: Sequence[Sequence[Result]], key: str
) -> list[AnyFlag]:
    """Return the flags that no further run on this kind of GPU clears.

    A run in which the claim crashed, was wrong or was not measured clears nothing.
    """
    runs = [{r.claim: r for r in run if r.key == key} for run in again]
    return [
        f
        for f in flags
        if runs and not any(f.claim in run and f.is_cleared_by(run[f.claim]) for run in runs)
    ]


def change_points(history: Sequence[Night]) -> list[Step]:
    """Find lasting changes in the latest epoch.

    The library ruptures applies PELT (Killick, Fearnhead and Eckley 2012) to the log speedups of a
    claim. The penalty per change is 3 times the variance times log n for n nights.
    """
    # imported here, because both modules load slowly and `gate` does not need them
    import numpy as np
    import ruptures

    valid = [n for n in history if not n.void and n.epoch == history[-1].epoch]
    steps: list[Step] = []
    for claim in sorted({claim for night in valid for claim in night.claims}):
        nights = [n for n in valid if claim in n.claims]
        if len(nights) < 2 * MIN_NIGHTS:
            continue
        logs = [math.log(n.claims[claim]) for n in nights]
        # from differences between successive nights: a lasting change affects only one of them
        differences = [abs(b - a) for a, b in itertools.pairwise(logs)]
        sigma = max(MAD_TO_SIGMA * statistics.median(differences) / math.sqrt(2), 1e-4)
        search = ruptures.Pelt(model="l2", min_size=3, jump=1)
        search.fit(np.array([[v / sigma] for v in logs]))
        ends = [0, *search.predict(pen=3 * math.log(len(logs)))]
        means = [statistics.fmean(logs[a:b]) for a, b in itertools.pairwise(ends)]
        for first, before, after in zip(ends[1:], means, means[1:], strict=False):
            if abs(after - before) > MIN_STEP:
                steps.append(Step(claim, nights[first], math.exp(after - before)))
    return steps


def read_history(path: Path) -> list[Night]:
    """Read the nights of a history file; skip an incomplete last line, which a crash may leave."""
    if not path.exists():
        return []
    nights = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {path}: {reason}; name a .jsonl file of `gate`") from error
    for number, line in enumerate(lines, 1):
        try:
            nights.append(from_json(Night, loads(line, f"{path.name}:{number}")))
        except (json.JSONDecodeError, RecursionError):
            if number < len(lines):
                raise UsageError(
                    f"{path}:{number} is not a line of a history: name a .jsonl file of `gate`, or "
                    "remove the line"
                ) from None
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
    return nights


def append(path: Path, night: Night) -> None:
    """Append a night to the file, and wait until it is on disk."""
    line = dumps(to_json(night), path.name) + "\n"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            text = file.read()
            last = text[text.rfind(b"\n") + 1 :]
            try:
                loads(last.decode(), path.name)
            except (ValueError, RecursionError):
                file.truncate(len(text) - len(last))  # removes an incomplete last line
            else:
                file.write(b"\n")  # only its end is missing, as some editors leave it
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)
