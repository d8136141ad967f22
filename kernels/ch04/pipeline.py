"""Pipeline schedules, and a simulation that executes them on a virtual clock.

A schedule is a list of steps (kind, chunk, micro-batch) for every rank. `run` executes each rank's
steps in order, each as soon as the rank is free and the step's inputs exist. A forward through all
chunks of a rank takes 1 unit, a backward 2; sending takes no time. Chunk c is placed on rank
c % ranks: with two chunks per rank, every micro-batch passes over all ranks twice.

gpipe        All forwards, then all backwards: the activations of all micro-batches are live at
             once.
one_f_one_b  Rank r runs ranks - r forwards, then alternates one backward with one forward (1F1B).
             The bubble is as long as gpipe's, but rank r never holds more than ranks - r
             micro-batches.
interleaved  one_f_one_b over two chunks per rank, with micro-batches in groups of `ranks`. The
             pipeline fills and drains in half the time, but needs twice the messages and keeps
             more activations live.
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


def run(schedule, weights, batches):
    """Execute a schedule; return the gradients, the makespan and the peak of live micro-batches.

    ``weights`` (layers, width, width) are split evenly over the chunks, ``batches`` (micro-batches,
    rows, width) are the inputs. The network is y = x W per layer, the loss the sum of the last y.
    The unit of the makespan is one forward through all layers of a rank. The peak is the largest of
    all ranks; a micro-batch that is live in one of a rank's two chunks counts one half.
    """
    ranks, chunks = len(schedule), 1 + max(step[1] for steps in schedule for step in steps)
    layers = weights.reshape(chunks, -1, *weights.shape[1:])
    gradients = np.zeros_like(layers)
    values = {("F", -1, m): x for m, x in enumerate(batches)}
    values |= {("B", chunks, m): np.ones_like(x) for m, x in enumerate(batches)}
    end_times = dict.fromkeys(values, 0.0)
    clock, live, peak = [0.0] * ranks, [0] * ranks, 0
    activations = {}
    pending = [list(reversed(steps)) for steps in schedule]
    while any(pending):
        count = sum(map(len, pending))
        for rank, steps in enumerate(pending):
            while steps:
                kind, chunk, m = step = steps[-1]
                source = (kind, chunk - 1 if kind == "F" else chunk + 1, m)
                forward = ("F", chunk, m) if kind == "B" else source
                if source not in end_times or forward not in end_times:
                    break
                steps.pop()
                start = max(clock[rank], end_times[source], end_times[forward])
                clock[rank] = end_times[step] = start + (1 if kind == "F" else 2) * ranks / chunks
                x = values.pop(source)
                if kind == "F":
                    activations[chunk, m] = list(forward_chunk(x, layers[chunk]))
                    values[step] = activations[chunk, m].pop()
                    live[rank] += 1
                    peak = max(peak, *live)
                else:
                    for layer in range(layers.shape[1] - 1, -1, -1):
                        gradients[chunk, layer] += activations[chunk, m][layer].T @ x
                        x = x @ layers[chunk, layer].T
                    del activations[chunk, m]
                    values[step] = x
                    live[rank] -= 1
        if sum(map(len, pending)) == count:
            raise RuntimeError(f"deadlock: no rank can run {[s[-1] for s in pending if s]}")
    return gradients.reshape(weights.shape), max(clock), peak * ranks / chunks


def forward_chunk(x, layers):
    """Yield the input of each layer, then the output of the last."""
    yield x
    for layer in layers:
        x = x @ layer
        yield x
