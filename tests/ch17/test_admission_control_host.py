"""In a simulation, rejecting late requests lets an overloaded server serve more in time.

At 1.3 times its capacity, a server that admits all requests falls behind by 0.3 seconds per second.
Soon every answer comes too late, and the backlog outlives the rush. A cap on the queue bounds the
wait in requests ("queue_cap"); a prediction of the wait bounds it in seconds ("predicted_wait").
Most admitted requests are then served in time, and the capacity is used.

The score is goodput: requests per second that end within the promised time, over a quiet phase, a
rush and a quiet phase. Rejected requests are served after all others, so that both arms do the same
work: the time between two ends must be exactly one service time, unless the server was idle. In the
first quiet phase, at 0.7 of the capacity, no request may be rejected, so the ends are those of a
plain queue (Lindley's recursion). Both are checked exactly. The gain grows with the length of the
rush; without overload there is none. "queue_cap" is judged against admitting all, and
"predicted_wait" against the cap: with the prediction, 4 % more requests end in time. The prediction
assumes that service times are known; where they are not, the cap remains. A timeout is not an arm
here: it drops a request that has waited too long when its turn comes. It needs neither prediction
nor cap, but the client learns of the rejection only after the wait. The gain includes the recovery:
without rejection the backlog of the rush makes about half of the last phase late, too. Arrivals are
more regular than a Poisson process: the intervals between them have a gamma distribution of shape
4. Service times are lognormal.
"""

import numpy as np
import pytest

from kernels.ch17 import admission
from pytest_aiperf import Bench, Compare, scores

LOADS = 0.7, 1.3, 0.7


def rush(bench: Bench) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw arrivals and service times (mean 50 ms) and promise 1 s, all in microseconds."""
    rng, count = np.random.default_rng(bench.seed), bench.size(4000, check=300)
    mean, spread = 50_000, 0.5
    intervals = np.concatenate([rng.gamma(4, mean / load / 4, count) for load in LOADS])
    services = rng.lognormal(np.log(mean) - spread**2 / 2, spread, len(intervals))
    return intervals.cumsum().astype(int), services.astype(int), 20 * mean


def simulate(admit):
    def arm(arrivals, services, promised):
        ends = np.array(admission.serve(arrivals, services, promised, admit))
        goodput = scores.goodput(arrivals[-1] * 1e-6, (ends - arrivals, promised))
        return ends[: len(ends) // len(LOADS)], busy_times(arrivals, ends), goodput

    return arm


def busy_times(arrivals, ends):
    """Return each request's end minus its start: its arrival or the end before it, if later."""
    order = np.argsort(ends)
    starts = np.maximum(arrivals[order], np.append(0, ends[order][:-1]))
    return (ends[order] - starts)[np.argsort(order)]


def ends_of_a_queue(arrivals, services, promised):
    quiet = len(services) // len(LOADS)
    work = services.cumsum()
    ends = work + np.maximum.accumulate(arrivals - (work - services))
    return ends[:quiet], services


ADMIT_ALL, QUEUE_CAP = simulate(admission.admit_all), simulate(admission.queue_cap)
RUNGS = {
    "queue_cap": (ADMIT_ALL, QUEUE_CAP, "idiomatic"),
    "predicted_wait": (QUEUE_CAP, simulate(admission.predicted_wait), "previous rung"),
}


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_admission_control_host(compare: Compare, rung: str) -> None:
    baseline, optimized, against = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        against=against,
        inputs=rush,
        reference=ends_of_a_queue,
        metric="score",
    )
