"""Which worker multiplies which slices of which tile: three schedules, and a clock to judge them.

A product of ``tiles`` output tiles with ``slices`` steps along k is dealt out to ``workers`` as
segments (tile, first slice, one past the last). Whoever has a tile's first slice finishes it: it
adds the partial sums of the others, each when it has arrived.

data_parallel  a whole tile at a time: the last wave may be nearly empty, and lasts a tile.
split_k        each tile cut in 2 parts: a last wave lasts half as long, and every tile needs a sum.
stream_k       all slices in one row, cut into equal shares: no waves, and a sum only at the cuts.
"""

from __future__ import annotations

import numpy as np

from pytest_aiperf import Score

Segment = tuple[int, int, int]


def data_parallel(tiles: int, slices: int, workers: int) -> list[list[Segment]]:
    return [[(tile, 0, slices) for tile in range(w, tiles, workers)] for w in range(workers)]


def split_k(tiles: int, slices: int, workers: int, parts: int = 2) -> list[list[Segment]]:
    cuts = [slices * part // parts for part in range(parts + 1)]
    # the later parts first, so that whoever finishes a tile need not wait for them
    segments = [(t, cuts[p], cuts[p + 1]) for p in reversed(range(parts)) for t in range(tiles)]
    return [segments[w::workers] for w in range(workers)]


def stream_k(tiles: int, slices: int, workers: int) -> list[list[Segment]]:
    plan = []
    for worker in range(workers):
        at, end = (tiles * slices * w // workers for w in (worker, worker + 1))
        mine = []
        while at < end:
            tile, first = divmod(at, slices)
            last = min(slices, first + end - at)
            mine.append((tile, first, last))
            at += last - first
        plan.append(mine)  # the part of a tile that another worker began comes first: it is awaited
    return plan


def run(schedule, a, b, workers):
    """Carry out a schedule; return out, how often each slice was multiplied, and the makespan.

    ``a`` is tiles x slices x rows x depth, ``b`` tiles x slices x depth x columns: the operands of
    each slice of each tile. On the virtual clock a slice takes 1, and so does handing over, or
    adding, one partial sum.
    """
    tiles, slices = a.shape[:2]
    out = np.zeros((tiles, a.shape[2], b.shape[3]), a.dtype)
    covered = np.zeros((tiles, slices), np.int64)
    partial, owners = {}, {}
    clock = np.zeros(workers, np.int64)
    for worker, segments in enumerate(schedule(tiles, slices, workers)):
        for tile, first, last in segments:
            # of a tile's slices, side by side, the product is the sum over all of them
            part = np.einsum("srd,sdc->rc", a[tile, first:last], b[tile, first:last])
            covered[tile, first:last] += 1
            clock[worker] += last - first
            if first:
                clock[worker] += 1
                partial.setdefault(tile, []).append((clock[worker], part))
            else:
                out[tile] += part
                owners[tile] = worker
    # the finisher's slices are done by now; sums are added as they come in
    for tile, parts in sorted(partial.items()):
        for arrived, part in sorted(parts, key=lambda p: p[0]):
            clock[owners[tile]] = max(clock[owners[tile]], arrived) + 1
            out[tile] += part
    return out, covered, Score(float(clock.max()), "slice times", "lower")
