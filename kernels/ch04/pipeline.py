"""Pipeline schedules on a virtual clock: each stage's order of work, run as dependencies allow.

A schedule gives every rank its list of steps (kind, chunk, micro-batch). `run` executes them in
order, rank by rank, as early as each rank is free and the step's inputs are there. A forward takes
1 unit per chunk of a rank, a backward 2; sending takes no time. Chunk c lies on rank c % ranks, so
that with two chunks a rank every micro-batch passes over all ranks twice.

gpipe        all forwards, then all backwards: every micro-batch's activations live until the end.
one_f_one_b  as many forwards as ranks lie behind, then one backward for each forward: the same
             bubble, but no more micro-batches alive than there are ranks behind.
interleaved  one_f_one_b over two chunks a rank, in groups of as many micro-batches as ranks: a
             rank fills and drains in half the time, for twice the messages and more activations.
"""

import numpy as np


def gpipe(ranks, micro):
    return [[(kind, r, m) for kind in "FB" for m in range(micro)] for r in range(ranks)]


def one_f_one_b(ranks, micro):
    orders = []
    for rank in range(ranks):
        ahead = min(micro, ranks - rank)
        order = [("F", rank, m) for m in range(ahead)]
        for m in range(micro):
            order.append(("B", rank, m))
            if m + ahead < micro:
                order.append(("F", rank, m + ahead))
        orders.append(order)
    return orders


def interleaved(ranks, micro, chunks=2):
    def passes(kind):  # micro-batches in groups of `ranks`, each group through every chunk
        order = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
        return [
            (kind, chunk, m)
            for first in range(0, micro, ranks)
            for chunk in order
            for m in range(first, min(first + ranks, micro))
        ]

    orders = []
    for rank in range(ranks):
        forwards = [(k, c * ranks + rank, m) for k, c, m in passes("F")]
        backwards = [(k, c * ranks + rank, m) for k, c, m in passes("B")]
        ahead = min(len(forwards), 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1)
        order = forwards[:ahead]
        for i, step in enumerate(backwards):
            order.append(step)
            order += forwards[ahead + i : ahead + i + 1]
        orders.append(order)
    return orders


def run(orders, weights, batches):
    """Execute a schedule; return each layer's gradient, the makespan, the most activations alive.

    ``weights`` (layers, width, width) are split evenly over the chunks, ``batches`` (micro, rows,
    width) is the input. The network is y = x W for each layer and the loss the sum of the last y.
    The makespan is in forward passes through all of a rank's layers, and what is alive is counted
    on the fullest rank, in micro-batches through all of its layers.
    """
    ranks, chunks = len(orders), 1 + max(step[1] for order in orders for step in order)
    layers = weights.reshape(chunks, -1, *weights.shape[1:])
    gradients = np.zeros_like(layers)
    values = {("F", -1, m): x for m, x in enumerate(batches)}
    values |= {("B", chunks, m): np.ones_like(x) for m, x in enumerate(batches)}
    ends = dict.fromkeys(values, 0.0)
    clock, alive, most = [0.0] * ranks, [0] * ranks, 0
    kept = {}
    waiting = [list(reversed(order)) for order in orders]
    while any(waiting):
        before = sum(map(len, waiting))
        for rank, order in enumerate(waiting):
            while order:
                kind, chunk, m = step = order[-1]
                needed = (kind, chunk - 1 if kind == "F" else chunk + 1, m)
                forward = ("F", chunk, m) if kind == "B" else needed
                if needed not in ends or forward not in ends:
                    break
                order.pop()
                start = max(clock[rank], ends[needed], ends[forward])
                clock[rank] = ends[step] = start + (1 if kind == "F" else 2) * ranks / chunks
                x = values.pop(needed)
                if kind == "F":
                    kept[chunk, m] = list(through(x, layers[chunk]))
                    values[step] = kept[chunk, m].pop()
                    alive[rank] += 1
                    most = max(most, *alive)
                else:
                    for layer in range(layers.shape[1] - 1, -1, -1):
                        gradients[chunk, layer] += kept[chunk, m][layer].T @ x
                        x = x @ layers[chunk, layer].T
                    del kept[chunk, m]
                    values[step] = x
                    alive[rank] -= 1
        if sum(map(len, waiting)) == before:
            raise RuntimeError(f"the schedule waits for itself at {[o[-1] for o in waiting if o]}")
    return gradients.reshape(weights.shape), max(clock), most * ranks / chunks


def through(x, layers):
    """Give the input of each layer, and what comes out of the last."""
    yield x
    for layer in layers:
        x = x @ layer
        yield x
