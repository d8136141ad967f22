"""An acceptable result, of which a test replaces only the fields that matter to it."""

from __future__ import annotations

import contextlib
import dataclasses
import resource

from pytest_aiperf.model import (
    Against,
    Error,
    Gpu,
    Interval,
    Metric,
    Mode,
    Outcome,
    Replicate,
    Result,
    Round,
    Timing,
    Verdict,
    Work,
)
from pytest_aiperf.rules import stats

H200 = Gpu("NVIDIA H200", "h200", "GPU-1", "sm90", 132, 60 << 20, 150 << 30, "580.159")
STACK = {"torch": "2.11.0", "cuda": "13.0", "driver": "580.159", "python": "3.12"}


def timing(baseline=2e-3, optimized=1e-3, **changes):
    block = Round("ABBA", {"baseline": (baseline,) * 2, "optimized": (optimized,) * 2}, 1980, 0)
    replicates = tuple(Replicate(seed, (block,)) for seed in (1, 2))
    record = Timing(
        Metric.DEVICE,
        Mode.GRAPH,
        dict.fromkeys(("baseline", "optimized"), 20),
        "cold",
        3,
        replicates,
    )
    return dataclasses.replace(record, **changes)


def result(claim="ch07/copy[vector]", **changes):
    folder, _, name = claim.rpartition("/")
    record = Result(
        claim=claim,
        nodeid=f"tests/{folder}/test_x.py::test_{name}",
        title="é::\n",  # must not break a report into wrong lines
        outcome=Outcome.PASSED,
        key="h200",
        run="run",
        started="2025-03-04T05:06:07+00:00",
        seed=7,
        verdict=Verdict.FASTER,
        speedup=Interval(2.00012, 2.01049, 2.0222),  # many digits, to show rounding
        library=Interval(1.0, 1.01, 1.02),
        floor=0.004,
        timing=timing(),
        work=Work(read=2.1e09, written=2.1e09, dtype="fp32"),
        agreement=(Error("optimized", "0", (0,), 1.0, 1.0, 0.0, 1e-6),),
        code="1a2b3c4d5e6f",
        gpu=H200,
        stack=STACK,
    )
    return dataclasses.replace(record, **changes)


def ladder(name="ch07/sum", first=8e-3, library=None, **rungs):
    """The records of rungs that were measured together, each compared with the rung before."""
    results, below = [], first
    for index, (rung, optimized) in enumerate(rungs.items()):
        arms = {"baseline": below, "optimized": optimized}
        arms |= {"library": library} if library else {}
        arms |= {"first": first} if index else {}
        reps = tuple(
            Replicate(seed, (Round("", {a: (s * noise,) * 2 for a, s in arms.items()}),))
            for seed, noise in ((1, 1.0), (2, 1.1))
        )
        speedup, over_library, over_first = (
            stats.comparison(reps, arm, "optimized") if arm in arms else None
            for arm in ("baseline", "library", "first")
        )
        results.append(
            result(
                f"{name}[{rung}]",
                ladder=name,
                rung_index=index,
                against=Against.PREVIOUS_RUNG if index else Against.IDIOMATIC,
                timing=timing(replicates=reps),
                speedup=speedup,
                library=over_library,
                first=over_first,
            )
        )
        below = optimized
    return results


@contextlib.contextmanager
def files_up_to(size):
    """Limit the size of every file, which fails writes as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
