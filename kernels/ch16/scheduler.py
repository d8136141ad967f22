"""Three orders in which a server with a few slots starts requests, as one rule with a limit.

first come, first served (FCFS)  limit 0: the oldest request is next.
shortest job first (SJF)         no limit: the request with the shortest predicted service is next.
aging                            the oldest request is next if it has waited for the limit, and
                                 otherwise the one with the shortest predicted service.

A request keeps its slot from its prefill to its last token, and no request is preempted. The clock
is virtual: arrivals, service times and predictions are inputs, in microseconds. The rule sees the
predictions only; a service time is found out when the request ends.
"""

import heapq
import math

SLOTS = 8
"""Requests that are served at once: a server whose memory holds the KV cache of eight."""

FCFS, SJF, AGING = 0, math.inf, 60_000_000
"""Limits in microseconds; AGING's, a minute, is some eleven mean service times."""

PREFILL_US = 100
"""Microseconds of prefill per token of the prompt: 10,000 tokens/s."""

STEP_US = 25_000
"""Microseconds of a decoding step. They hardly depend on how many slots are busy, because a step
reads all weights for any number of them.
"""


def serve(arrivals, services, predictions, limit, slots=SLOTS):
    """Start the next request whenever a slot is free; return the starts and ends of all."""
    starts, ends = [None] * len(arrivals), [None] * len(arrivals)
    free_at = [0] * slots
    by_prediction = []  # a heap; it still holds requests that were started as the oldest one
    arrived = oldest = 0
    for _ in arrivals:
        now = heapq.heappop(free_at)
        while oldest < arrived and starts[oldest] is not None:
            oldest += 1
        if oldest == arrived:  # no request waits
            now = max(now, arrivals[arrived])
        while arrived < len(arrivals) and arrivals[arrived] <= now:
            heapq.heappush(by_prediction, (predictions[arrived], arrived))
            arrived += 1
        request = oldest
        if now - arrivals[oldest] < limit:
            _, request = heapq.heappop(by_prediction)
            while starts[request] is not None:
                _, request = heapq.heappop(by_prediction)
        starts[request], ends[request] = now, now + services[request]
        heapq.heappush(free_at, ends[request])
    return starts, ends
