"""Three admission rules for a server with a queue and a promised response time.

admit_all       admits every request.
queue_cap       admits a request if fewer than CAP requests are queued or in service.
predicted_wait  admits a request if it will end in time: the work ahead of it is known, because the
                cost of each request follows from its length.

The server runs on a virtual clock: arrivals and service times are inputs, nothing is measured.
"""

from collections import deque

CAP = 16
"""Requests in the system at which ``queue_cap`` rejects; 20 mean service times are promised."""


def admit_all(*_):
    return True


def queue_cap(in_system, *_):
    return len(in_system) < CAP


def predicted_wait(_in_system, work_ahead, service, promised):
    return work_ahead + service <= promised


def serve(arrivals, services, promised, admit):
    """Serve admitted requests in order of arrival, and the rejected ones after all others.

    Return the end time of each request.
    """
    ends, rejected, in_system, free_at = {}, [], deque(), 0
    requests = list(zip(arrivals.tolist(), services.tolist(), strict=True))
    for request, (arrival, service) in enumerate(requests):
        while in_system and in_system[0] <= arrival:
            in_system.popleft()
        if admit(in_system, max(free_at - arrival, 0), service, promised):
            free_at = ends[request] = max(free_at, arrival) + service
            in_system.append(free_at)
        else:
            rejected.append(request)
    for request in rejected:
        arrival, service = requests[request]
        free_at = ends[request] = max(free_at, arrival) + service
    return [ends[request] for request in range(len(requests))]
