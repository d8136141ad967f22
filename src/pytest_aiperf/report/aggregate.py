"""Counts, means and ladders of many results."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_aiperf.model import Against, Outcome, Result, Verdict
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.verdict import UNDECIDED

JUDGED: Final = (Outcome.PASSED, Outcome.FAILED)
"""Outcomes of claims that were measured and judged."""
UNTRIED: Final = (Outcome.SKIPPED, Outcome.NOT_RUN)  #: Outcomes of claims that did not run.


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts and means of a list of results."""

    claims: int  #: Number of claims that ran.
    by_verdict: Mapping[str, int]
    """Number of claims that ran, by what :func:`verdict` returns."""
    failed: int  #: Number of claims that ran and did not pass.
    skipped: Mapping[str, int]  #: Number of skipped claims by reason.
    not_run: int  #: Number of claims that the session did not reach.
    mean: float | None
    """Geometric mean of the conclusive speedups over non-naive baselines; None without any."""
    averaged: int  #: Number of speedups in the mean.
    share: float | None
    """Median fraction of its limit that an optimized arm reaches; None if no limit is known."""
    shares: int  #: Number of shares in the median.


def summarize(results: Sequence[Result]) -> Summary:
    """Count and average results; claims that did not run are counted but not averaged.

    Each rung of a ladder counts as one claim, with the speedup over the arm that it is judged
    against, unless that is a naive baseline or the verdict is INCONCLUSIVE.
    """
    ended = [r for r in results if r.outcome not in UNTRIED]
    judged = [r for r in ended if r.outcome in JUDGED]  # the figures of the others are not valid
    speedups = [  # slowdowns too, but no ratios of bytes or scores
        r.speedup.value
        for r in judged
        if r.against is not Against.NAIVE and r.speedup
        if r.verdict is not Verdict.INCONCLUSIVE
        if r.timing and r.timing.metric.is_time
    ]
    shares = [r.limits["optimized"].share for r in judged if "optimized" in r.limits]
    skips = [r.message for r in results if r.outcome is Outcome.SKIPPED]
    return Summary(
        claims=len(ended),
        by_verdict=dict(Counter(map(verdict, ended)).most_common()),
        failed=sum(r.outcome is not Outcome.PASSED for r in ended),
        skipped=dict(Counter(skips).most_common()),
        not_run=sum(r.outcome is Outcome.NOT_RUN for r in results),
        mean=statistics.geometric_mean(speedups) if speedups else None,
        averaged=len(speedups),
        share=statistics.median(shares) if shares else None,
        shares=len(shares),
    )


def verdict_or_outcome(result: Result) -> str:
    """Return a claim's verdict, or its outcome if it has no verdict."""
    if result.outcome in JUDGED and result.verdict is not None:
        return result.verdict.value
    return result.outcome.value


def verdict(result: Result) -> str:
    """Return a claim's verdict or outcome, and whether a claim with a good verdict is not met.

    It is "undecided" if only noise keeps the claim from being met, otherwise "lost".
    """
    text = verdict_or_outcome(result)
    if result.outcome is not Outcome.FAILED or result.verdict not in (Verdict.FASTER, Verdict.SAME):
        return text
    return f"{text}, {'undecided' if is_undecided(result) else 'lost'}"


def is_undecided(result: Result) -> bool:
    """Whether only noise keeps a claim from being met."""
    return result.outcome is Outcome.FAILED and result.message.startswith(UNDECIDED)


def folder(result: Result) -> str:
    """Return the folder of a claim's test; reports show one chapter per folder."""
    return result.claim.partition("[")[0].rpartition("/")[0] or "."


def short_name(name: str) -> str:
    """Return the id of a claim or of a ladder without its folder; a parameter may contain "/"."""
    test, bracket, parameter = name.partition("[")
    return test.rpartition("/")[2] + bracket + parameter


def ladders(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """Group the rungs of each ladder by GPU and ladder, in the order of the test's parameters.

    The claims of a test without rungs form a group, too.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        name = result.ladder or result.claim.partition("[")[0]
        groups.setdefault((result.key, name), []).append(result)
    return {name: sorted(rungs, key=lambda r: r.rung_index) for name, rungs in groups.items()}


def rung_name(result: Result) -> str:
    return result.claim.partition("[")[2].removesuffix("]")


def own_first_arm_s(result: Result) -> float | None:
    """Return the figure of the ladder's first arm in a rung's own samples; None without samples."""
    timing = result.timing
    arms = [b.seconds for r in timing.replicates for b in r.rounds] if timing else []
    if timing is None or not arms:
        return None
    return stats.mean_call_s(timing.replicates, "first" if "first" in arms[0] else "baseline")


def first_arm_s(rungs: Sequence[Result]) -> float | None:
    """Return the figure of a ladder's first arm; None if no two rungs were measured together.

    Rungs that were measured together have the same samples of this arm, and so the same mean.
    """
    figures = Counter(figure for rung in rungs if (figure := own_first_arm_s(rung)))
    figure, count = next(iter(figures.most_common(1)), (0.0, 0))
    return figure if count > 1 else None


def by_ranks(results: Sequence[Result]) -> list[dict[int, Result]]:
    """Group the timed results of each multi-GPU claim on each kind of GPU by number of ranks.

    Only claims with at least two numbers are listed, the numbers in ascending order.
    """
    groups: dict[tuple[str, str], dict[int, Result]] = {}
    for result in results:
        # 8xh200 are eight ranks; across nodes, 2x8xh200 are two nodes of eight
        counts, gpu = re.findall(r"(\d+)x", result.key), re.sub(r"^(\d+x)+", "", result.key)
        if counts and result.speedup and result.timing and result.timing.unit == "s":
            ranks = groups.setdefault((result.claim, gpu), {})
            ranks.setdefault(math.prod(map(int, counts)), result)
    return [dict(sorted(ranks.items())) for ranks in groups.values() if len(ranks) > 1]
