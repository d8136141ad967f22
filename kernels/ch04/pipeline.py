"""Pipeline schedules, and a simulation that executes them on a virtual clock.

A schedule is a list of steps (kind, chunk, micro-batch) for every rank. `run` executes each rank's
steps in order, each as soon as the rank is free and the step's inputs exist. A forward ("F")
through all chunks of a rank takes 1 unit and a backward ("B") 2. A backward can be split in the
gradients of inputs ("I"), which the rank before waits for, and those of weights ("W"), 1 unit each.
A rank is busy for `message` units while it sends a result to another rank. Chunk c is placed on
rank c % ranks: with two chunks per rank, every micro-batch passes over all ranks twice.

gpipe        All forwards, then all backwards: the activations of all micro-batches are live at
             once.
one_f_one_b  Rank r runs ranks - r forwards, then alternates one backward with one forward (1F1B).
             The bubble is as long as gpipe's, but rank r never holds more than ranks - r
             micro-batches.
interleaved  one_f_one_b over two chunks per rank, with micro-batches in groups of `ranks`. The
             pipeline fills and drains in half the time, but needs twice the messages and keeps
             more activations live.
zero_bubble  one_f_one_b with split backwards (ZB-H1): rank r computes the gradients of weights r
             micro-batches later, so that those of inputs reach the ranks before it earlier, and
             the late steps fill the end. It keeps as many activations live as one_f_one_b, and
             some gradients beside them.
"""

import numpy as np


def gpipe(ranks, micro_batches):
    return [[(kind, r, m) for kind in "FB" for m in range(micro_batches)] for r in range(ranks)]


def one_f_one_b(ranks, micro_batches):
    schedule = []
    for rank in range(ranks):
        warmup = min(micro_batches, ranks - rank)
        steps = [("F", rank, m) for m in range(warmup)]
        for m in range(micro_batches):
            steps.append(("B", rank, m))
            if m + warmup < micro_batches:
                steps.append(("F", rank, m + warmup))
        schedule.append(steps)
    return schedule


def interleaved(ranks, micro_batches, chunks=2):
    def passes(kind):  # each group of `ranks` micro-batches passes through every chunk
        order = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
        return [
            (kind, chunk, m)
            for first in range(0, micro_batches, ranks)
            for chunk in order
            for m in range(first, min(first + ranks, micro_batches))
        ]

    schedule = []
    for rank in range(ranks):
        forwards = [(k, c * ranks + rank, m) for k, c, m in passes("F")]
        backwards = [(k, c * ranks + rank, m) for k, c, m in passes("B")]
        warmup = min(len(forwards), 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1)
        steps = forwards[:warmup]
        for i, step in enumerate(backwards):
            steps.append(step)
            steps += forwards[warmup + i : warmup + i + 1]
        schedule.append(steps)
    return schedule


def zero_bubble(ranks, micro_batches):
    schedule = []
    for rank in range(ranks):
        warmup = min(micro_batches, ranks - rank)
        steps = [("F", rank, m) for m in range(warmup)]
        for m in range(micro_batches):
            steps.append(("I", rank, m))
            if m >= rank:
                steps.append(("W", rank, m - rank))
            if m + warmup < micro_batches:
                steps.append(("F", rank, m + warmup))
        steps += [("W", rank, m) for m in range(max(micro_batches - rank, 0), micro_batches)]
        schedule.append(steps)
    return schedule


DURATIONS = {"F": 1, "B": 2, "I": 1, "W": 1}


def run(schedule, weights, batches, message=0.0):
    """Execute a schedule; return the gradients, the makespan and the peak of live micro-batches.

    ``weights`` (layers, width, width) are split evenly over the chunks, ``batches`` (micro-batches,
    rows, width) are the inputs. The network is y = x W per layer, the loss the sum of the last y.
    The unit of the makespan and of ``message`` is one forward through all layers of a rank. The
    peak is the largest of all ranks; a micro-batch that is live in one of a rank's two chunks
    counts one half.
    """
    chunks = 1 + max(step[1] for steps in schedule for step in steps)
    layers = weights.reshape(chunks, -1, *weights.shape[1:])
    order, makespan, peak = on_virtual_clock(schedule, chunks, message)
    return gradients_in(order, layers, batches).reshape(weights.shape), makespan, peak


def on_virtual_clock(schedule, chunks, message):
    """Return the steps in an order that respects dependencies, the makespan and the peak."""
    ranks, order, end_times = len(schedule), [], {}
    clock, live, peak = [0.0] * ranks, [0] * ranks, 0
    pending = [list(reversed(steps)) for steps in schedule]
    while any(pending):
        count = len(order)
        for rank, steps in enumerate(pending):
            while steps and (sources := sources_of(*steps[-1], chunks)) <= end_times.keys():
                kind, chunk, m = step = steps.pop()
                order.append(step)
                start = max([clock[rank], *(end_times[source] for source in sources)])
                clock[rank] = start + DURATIONS[kind] * ranks / chunks
                if kind != "W" and 0 <= (chunk + 1 if kind == "F" else chunk - 1) < chunks:
                    clock[rank] += message
                end_times["B" if kind == "I" else kind, chunk, m] = clock[rank]
                live[rank] += {"F": 1, "I": 0}.get(kind, -1)
                peak = max(peak, live[rank])
        if len(order) == count:
            raise RuntimeError(f"deadlock: no rank can run {[s[-1] for s in pending if s]}")
    return order, max(clock), peak * ranks / chunks


def sources_of(kind, chunk, m, chunks):
    """Return the steps whose results a step needs; an "I" gives the result of a "B"."""
    if kind == "F":
        return {("F", chunk - 1, m)} if chunk > 0 else set()
    if kind == "W":
        return {("B", chunk, m)}
    return {("F", chunk, m)} | ({("B", chunk + 1, m)} if chunk < chunks - 1 else set())


def gradients_in(order, layers, batches):
    """Run the steps in this order; every step must find its inputs."""
    gradients = np.zeros_like(layers)
    values = {("F", -1, m): x for m, x in enumerate(batches)}
    values |= {("B", len(layers), m): np.ones_like(x) for m, x in enumerate(batches)}
    activations, output_gradients = {}, {}
    for kind, chunk, m in order:
        if kind == "F":
            x = values.pop(("F", chunk - 1, m))
            *activations[chunk, m], values["F", chunk, m] = forward_chunk(x, layers[chunk])
        if kind in "BI":
            x = values.pop(("B", chunk + 1, m))
            *output_gradients[chunk, m], values["B", chunk, m] = backward_chunk(x, layers[chunk])
        if kind in "BW":
            inputs, outputs = activations.pop((chunk, m)), output_gradients.pop((chunk, m))
            for layer, (x, gradient) in enumerate(zip(inputs, outputs[::-1], strict=True)):
                gradients[chunk, layer] += x.T @ gradient
    return gradients


def forward_chunk(x, layers):
    """Yield the input of each layer, then the output of the last."""
    yield x
    for layer in layers:
        x = x @ layer
        yield x


def backward_chunk(gradient, layers):
    """Yield the gradient of the last layer's output and so on, then that of the first's input."""
    yield gradient
    for layer in layers[::-1]:
        gradient = gradient @ layer.T
        yield gradient
