"""Turning away what would be late anyway lets a loaded server keep its promise to the rest.

At 1.3 times the load it can bear, a server that admits everybody falls behind by 0.3 seconds a
second. Soon each request waits longer than anyone is willing to, the server is busy with answers
that come too late, and goes on so long after the rush. A cap on the queue bounds the wait in
requests ("queue_cap"), a prediction of the wait bounds it in seconds ("predicted_wait"): whoever is
admitted is served in time, and the server's whole capacity is useful.

The score is the requests that end within the promised time, a second, over a quiet phase, a rush
and a quiet phase. Those turned away are served when all else is done, so that both arms do the same
work; and in the first quiet phase, at 0.7 of the capacity, nobody may be turned away. Both are
checked exactly. The gain grows with the length of the rush. Without overload there is none, and
where service times cannot be foretold, the cap is what remains.
"""

import numpy as np
import pytest

from kernels.ch17 import admission
from pytest_aiperf import Bench, Compare, Score

RUNGS = {"queue_cap": admission.queue_cap, "predicted_wait": admission.predicted_wait}
LOADS = 0.7, 1.3, 0.7


def rush(bench: Bench) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw arrivals and service times in microseconds, 50 ms each on average; 1 s is promised."""
    rng, count = np.random.default_rng(bench.seed), bench.size(4000, check=300)
    mean, spread = 50_000, 0.5
    gaps = np.concatenate([rng.gamma(4, mean / load / 4, count) for load in LOADS])
    services = rng.lognormal(np.log(mean) - spread**2 / 2, spread, len(gaps))
    return gaps.cumsum().astype(int), services.astype(int), 20 * mean


def served(admit):
    def arm(arrivals, services, promised):
        ends, away, worked = admission.serve(arrivals, services, promised, admit)
        quiet = sum(request < len(arrivals) // len(LOADS) for request in away)
        in_time = int((ends - arrivals <= promised).sum())
        return worked, quiet, Score(in_time / (arrivals[-1] * 1e-6), "requests/s in time")

    return arm


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_admission_control_host(compare: Compare, rung: str) -> None:
    compare(
        baseline=served(admission.admit_all),
        optimized=served(RUNGS[rung]),
        inputs=rush,
        reference=lambda arrivals, services, promised: (int(services.sum()), 0),
        metric="score",
    )
