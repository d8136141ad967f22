"""What many results say together: how they ended, their means, their ladders."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_aiperf.model import Against, Metric, Outcome, Result

JUDGED: Final = (Outcome.PASSED, Outcome.FAILED)
UNTRIED: Final = (Outcome.SKIPPED, Outcome.NOT_RUN)


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts and means; a mean of nothing is None, and says of how many claims it is."""

    claims: int
    ends: Mapping[str, int]
    failed: int
    skipped: Mapping[str, int]
    not_run: int
    mean: float | None
    averaged: int
    share: float | None
    shares: int


def summarise(results: Sequence[Result]) -> Summary:
    """Count and average; what did not run is counted, never averaged."""
    ended = [r for r in results if r.outcome not in UNTRIED]
    speedups = [  # losers too, or the mean would flatter; bytes and scores are no speedups
        r.speedup.value
        for r in ended
        if r.outcome in JUDGED and r.against is not Against.NAIVE and r.speedup
        if r.timing and r.timing.metric in (Metric.DEVICE, Metric.WALL)
    ]
    shares = [r.limits["optimized"].share for r in ended if "optimized" in r.limits]
    return Summary(
        claims=len(ended),
        ends=dict(Counter(map(end, ended)).most_common()),
        failed=sum(r.outcome is not Outcome.PASSED for r in ended),
        skipped=dict(
            Counter(r.message for r in results if r.outcome is Outcome.SKIPPED).most_common()
        ),
        not_run=sum(r.outcome is Outcome.NOT_RUN for r in results),
        mean=statistics.geometric_mean(speedups) if speedups else None,
        averaged=len(speedups),
        share=statistics.median(shares) if shares else None,
        shares=len(shares),
    )


def end(result: Result) -> str:
    """Name a claim's verdict, or its outcome where there is none."""
    if result.outcome in JUDGED and result.verdict is not None:
        return result.verdict.value
    return result.outcome.value


def folder(result: Result) -> str:
    """Name the folder that a claim lies in."""
    return result.claim.rpartition("/")[0] or "."


def ladders(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """Put the rungs of each ladder together, in their order, by GPU and name of the test.

    A claim without rungs is a ladder of one.
    """
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        found.setdefault((result.key, result.claim.partition("[")[0]), []).append(result)
    return found


def rung(result: Result) -> str:
    """Name a claim's rung; empty where it has none."""
    return result.claim.partition("[")[2].removesuffix("]")


def heights(rungs: Sequence[Result]) -> list[float]:
    """Work out how many times faster than the ladder's bottom each measured rung is.

    A rung that is measured against the one before stands on it.
    """
    found: list[float] = []
    for result in rungs:
        assert result.speedup is not None
        ground = found[-1] if found and result.against is Against.PREVIOUS_RUNG else 1.0
        found.append(ground * result.speedup.value)
    return found
