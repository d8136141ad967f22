"""Three GEMM tile schedules and a simulation of their makespan.

A GEMM of ``tiles`` output tiles with ``slices`` k slices each is split into segments (tile, first
slice, one past the last slice), which are assigned to ``workers``. The worker that has a tile's
first slice owns the tile and adds the partial sums of the other workers when they arrive.

data_parallel  Whole tiles: the last wave may be nearly empty and still takes as long as a tile.
split_k        2 segments per tile: a wave takes half as long, but every tile needs a reduction.
stream_k       The slices of all tiles in one sequence, cut into equal shares: no waves, and a
               reduction only for the tiles that are cut.
"""

from __future__ import annotations

import numpy as np

from pytest_aiperf import Score

Segment = tuple[int, int, int]


def data_parallel(tiles: int, slices: int, workers: int) -> list[list[Segment]]:
    return [[(tile, 0, slices) for tile in range(w, tiles, workers)] for w in range(workers)]


def split_k(tiles: int, slices: int, workers: int, parts: int = 2) -> list[list[Segment]]:
    cuts = [slices * part // parts for part in range(parts + 1)]
    # the last parts of all tiles come first, so that the owner of a tile does not wait for them
    segments = [(t, cuts[p], cuts[p + 1]) for p in reversed(range(parts)) for t in range(tiles)]
    return [segments[w::workers] for w in range(workers)]


def stream_k(tiles: int, slices: int, workers: int) -> list[list[Segment]]:
    schedule = []
    for worker in range(workers):
        position, end = (tiles * slices * w // workers for w in (worker, worker + 1))
        segments = []
        while position < end:
            tile, first = divmod(position, slices)
            last = min(slices, first + end - position)
            segments.append((tile, first, last))
            position += last - first
        # a segment that ends another worker's tile comes first, because that worker waits for it
        schedule.append(segments)
    return schedule


def run(schedule, a, b, workers):
    """Execute a schedule; return the product and the makespan.

    ``a`` is tiles x slices x rows x depth, ``b`` tiles x slices x depth x columns: the operands of
    each slice of each tile. On the virtual clock, a slice takes 1 unit of time, and so does sending
    or adding one partial sum.
    """
    tiles, slices = a.shape[:2]
    out = np.zeros((tiles, a.shape[2], b.shape[3]), a.dtype)
    partial_sums, owners = {}, {}
    clock = np.zeros(workers, np.int64)
    for worker, segments in enumerate(schedule(tiles, slices, workers)):
        for tile, first, last in segments:
            # sum over the segment's slices
            part = np.einsum("srd,sdc->rc", a[tile, first:last], b[tile, first:last])
            clock[worker] += last - first
            if first:
                clock[worker] += 1
                partial_sums.setdefault(tile, []).append((clock[worker], part))
            else:
                out[tile] += part
                owners[tile] = worker
    # the owners have finished their slices; partial sums are added in the order of arrival
    for tile, parts in sorted(partial_sums.items()):
        for arrival, part in sorted(parts, key=lambda p: p[0]):
            clock[owners[tile]] = max(clock[owners[tile]], arrival) + 1
            out[tile] += part
    return out, Score(float(clock.max()), "slice times", "lower")
