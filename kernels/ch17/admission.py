"""One server, a queue and a promised time: three rules for which requests are let in.

admit_all       everybody, to wait their turn.
queue_cap       who finds fewer than CAP requests in the server and before it.
predicted_wait  who will be served in time: the work that lies before a request is known, since the
                cost of each follows from its length.

They run on a virtual clock: arrivals and service times are given, and nothing is measured.
"""

from collections import deque

CAP = 16


def admit_all(*_):
    return True


def queue_cap(waiting, *_):
    return len(waiting) < CAP


def predicted_wait(_waiting, work, service, promised):
    return work + service <= promised


def serve(arrivals, services, promised, admit):
    """Serve in order of arrival, and whom the rule turned away when all others are done.

    Return when each request ends, the indices of those turned away, and the work done in all.
    """
    ends, away, waiting, free, worked = {}, [], deque(), 0, 0
    requests = list(zip(arrivals.tolist(), services.tolist(), strict=True))
    for request, (arrival, service) in enumerate(requests):
        while waiting and waiting[0] <= arrival:
            waiting.popleft()
        if admit(waiting, max(free - arrival, 0), service, promised):
            free = ends[request] = max(free, arrival) + service
            worked += service
            waiting.append(free)
        else:
            away.append(request)
    for request in away:
        arrival, service = requests[request]
        free = ends[request] = max(free, arrival) + service
        worked += service
    return [ends[request] for request in range(len(requests))], away, worked
