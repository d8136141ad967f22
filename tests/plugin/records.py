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
    Work,
)
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.verdict import verdict

H200 = Gpu("NVIDIA H200", "h200", "GPU-1", "sm90", 132, 60 << 20, 150 << 30, "580.159")
STACK = {"torch": "2.11.0", "cuda": "13.0", "driver": "580.159", "python": "3.12"}
HOST = {
    "host": True,
    "key": "cpu",
    "gpu": None,
    "stack": {"python": "3.12", "torch": "2.11.0", "processor": "EPYC 9654, 16 logical CPUs"},
}
"""The fields in which the record of a host claim differs."""


def timing(baseline=2e-3, optimized=1e-3, **changes):
    block = Round("BOOB", {"baseline": (baseline,) * 2, "optimized": (optimized,) * 2}, 1980, 0)
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


def timing_of(**ratios):
    """A timing of two replicates in which the optimized arm has these ratios to the others."""
    t = stats.t_quantile(0.5 + stats.LEVEL / 2, 1)
    replicates = []
    for seed, sign in ((1, -1), (2, 1)):
        seconds = {
            arm: (1e-3 * over.value * (over.high / over.low) ** (sign / 2 / t),) * 2
            for arm, over in {"optimized": Interval(1, 1, 1), **ratios}.items()
        }
        order = "".join(arm[0].upper() for arm in seconds)
        replicates.append(Replicate(seed, (Round(order + order[::-1], seconds, 1980, 0),)))
    calls = dict.fromkeys(seconds, 20)
    return timing(replicates=tuple(replicates), calls=calls)


NEAR = {"baseline": Interval(2.00012, 2.0111, 2.02214), "library": Interval(1.0, 1.01, 1.0201)}
"""The usual ratios, in many digits, to show rounding."""


def result(claim="ch07/copy[vector]", **changes):
    """Return a record that agrees with itself, unless the changes contradict each other."""
    folder, _, name = claim.rpartition("/")
    measured = changes.get("speedup", True) is not None
    made = changes.get("timing", timing_of(**NEAR) if measured else None)
    ratios = {
        field: stats.speedup(made, arm) if made and arm in made.calls else None
        for field, arm in (("speedup", "baseline"), ("library", "library"), ("first", "first"))
    }
    fits = Error("optimized", "0", (0,), 1.0, 1.0, 0.0, 1e-6)
    record = Result(
        claim=claim,
        nodeid=f"tests/{folder}/test_x.py::test_{name}" if folder else "",
        title="é::\n",  # must not break a report into wrong lines
        outcome=Outcome.PASSED,
        key="h200",
        run="run",
        started="2025-03-04T05:06:07+00:00",
        seed=7,
        verdict=verdict(ratios["speedup"], 0.004) if made else None,
        floor=0.004,
        timing=made,
        work=Work(read=2.1e09, written=2.1e09, dtype="fp32"),
        agreement=tuple(dataclasses.replace(fits, arm=arm) for arm in made.calls) if made else (),
        code="1a2b3c4d5e6f",
        gpu=H200,
        stack=STACK,
        **ratios,
    )
    return dataclasses.replace(record, **changes)


def ladder(name="ch07/sum", first=8e-3, library=None, **rungs):
    """The records of rungs that were measured together, each compared with the rung before."""
    results, below = [], first
    for index, (rung, optimized) in enumerate(rungs.items()):
        arms = {"baseline": below, "optimized": optimized}
        arms |= {"library": library} if library else {}
        arms |= {"first": first} if index else {}
        order = "".join(2 * arm[0].upper() for arm in arms)
        reps = tuple(
            Replicate(seed, (Round(order, {a: (s * noise,) * 2 for a, s in arms.items()}),))
            for seed, noise in ((1, 1.0), (2, 1.1))
        )
        results.append(
            result(
                f"{name}[{rung}]",
                ladder=name,
                rung_index=index,
                against=Against.PREVIOUS_RUNG if index else Against.IDIOMATIC,
                timing=timing(replicates=reps, calls=dict.fromkeys(arms, 20)),
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
