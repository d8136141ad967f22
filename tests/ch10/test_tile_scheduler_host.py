"""Stream-K and split-K finish a GEMM whose last wave is not full sooner than whole tiles do.

With one tile more than there are SMs, a grid of whole tiles takes twice as long: its second wave is
almost empty (wave quantization). Split-K halves the tiles and thus the length of the last wave, but
every tile then needs a reduction. Stream-K lines up the k slices of all tiles and cuts the line
into equal shares, one per worker: only the tiles that are cut need a reduction.

This is a simulation on a virtual clock, so the scores are exact: a slice takes 1, sending or adding
a partial sum takes 1. A test beside the claim compares them with each worker's share of the slices.
Both arms also compute the product, which a slice that is left out or used twice would change. The
limit is the number of waves over the tiles per worker: 2 / (133 / 132) for stream-K with 133 tiles,
2 / 1.5 with 198, and 2 / 1.5 for split-K; the partial sums cost a little of each. At 264 tiles the
waves are full: split-K only pays for its partial sums, and stream-K cuts no tile.
"""

import numpy as np
import pytest

from kernels.ch10 import tile_scheduler
from pytest_aiperf import Bench, Compare

WORKERS, SLICES = 132, 128
CASES = [(tile_scheduler.split_k, 133), (tile_scheduler.stream_k, 133),
         (tile_scheduler.stream_k, 198)]  # fmt: skip


@pytest.mark.parametrize("tiles", [1, 131, 132, 133, 198, 264])
def test_makespans_are_those_of_the_shares(tiles: int) -> None:
    """No worker takes longer than its share, plus sending and adding a few partial sums."""
    a, b = np.ones((tiles, SLICES, 1, 1), np.int64), np.ones((tiles, SLICES, 1, 1), np.int64)

    def makespan(schedule):
        return tile_scheduler.run(schedule, a, b, WORKERS)[-1].value

    half_waves = -(-2 * tiles // WORKERS)
    share = -(-tiles * SLICES // WORKERS)
    assert makespan(tile_scheduler.data_parallel) == -(-tiles // WORKERS) * SLICES
    assert 0 <= makespan(tile_scheduler.split_k) - half_waves * SLICES / 2 <= half_waves + 1
    assert 0 <= makespan(tile_scheduler.stream_k) - share <= (2 if tiles > 1 else WORKERS)


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
        reference=lambda a, b: (a @ b).sum(1),
        metric="score",
    )
