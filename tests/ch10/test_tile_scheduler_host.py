"""Stream-K spreads 133 tiles over 132 workers in one wave; whole tiles need two.

One tile more than there are multiprocessors, and a grid of whole tiles takes twice as long, its
second wave almost empty. Split-K halves the tiles, and so the length of a last wave, but every tile
must then be summed up. Stream-K lays all slices along k in one row and cuts it into equal shares: a
worker begins and ends in the middle of tiles, and partial sums pass between neighbours only.

This is a simulation on a virtual clock (a slice takes 1, handing over or adding a partial sum takes
1), so its figures are exact; both arms also multiply, and every slice must be multiplied once. The
gain is the wave count over the tiles per worker: 2 / (133 / 132) and 2 / 1.5 for 198 tiles; split-K
gains 2 / 1.5 for both. At 264 tiles the waves are full, and the partial sums are only a cost.
"""

import numpy as np
import pytest

from kernels.ch10 import tile_scheduler
from pytest_aiperf import Bench, Compare

WORKERS, SLICES = 132, 128
CASES = [(tile_scheduler.split_k, 133), (tile_scheduler.stream_k, 133),
         (tile_scheduler.stream_k, 198)]  # fmt: skip


@pytest.mark.host
@pytest.mark.parametrize(("schedule", "tiles"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_tile_scheduler_host(compare: Compare, schedule, tiles: int) -> None:
    def operands(bench: Bench) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(bench.seed)
        a = rng.integers(-9, 10, (tiles, SLICES, 4, 2))
        return a, rng.integers(-9, 10, (tiles, SLICES, 2, 4))

    compare(
        baseline=lambda a, b: tile_scheduler.run(tile_scheduler.data_parallel, a, b, WORKERS),
        optimized=lambda a, b: tile_scheduler.run(schedule, a, b, WORKERS),
        inputs=operands,
        reference=lambda a, b: ((a @ b).sum(1), np.ones((tiles, SLICES), np.int64)),
        metric="score",
    )
