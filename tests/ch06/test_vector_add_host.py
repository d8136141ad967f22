"""Adding into an array that is there already beats making a new one for each sum.

`rows + bias` of large arrays asks the operating system for fresh pages every time and gives them
back when the result is dropped. Fresh pages are not there yet: the first write to each one faults,
and the kernel clears it before the addition writes it: two writes to memory instead of one. With
`out=` the same pages are used again, no page faults, and only the addition is left.

The gain shrinks for arrays that the allocator keeps and hands out again (below its mmap threshold,
at most 32 MiB), or that stay in the caches, and a result that must be kept needs a new array
anyway. The limit: two passes over memory (a read and a write) instead of three.
"""

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare, Work, prepared


def vectors(bench: Bench) -> tuple[np.ndarray, np.ndarray]:
    """Make 32 MiB of rows, which repeat: drawing each number takes longer than adding them."""
    rng, width = np.random.default_rng(bench.seed), 1024
    drawn, bias = rng.random((64, width), np.float32), rng.random(width, np.float32)
    return np.tile(drawn, (bench.size(128, check=1), 1)), bias


def add(rows, bias):
    return rows + bias


def add_in_place_of_the_last(rows, bias):
    out = np.ones_like(rows)  # written once, so that its pages are there
    return lambda rows, bias: np.add(rows, bias, out=out)


@pytest.mark.host
def test_vector_add_host(compare: Compare) -> None:
    compare(
        baseline=add,
        optimized=prepared(add_in_place_of_the_last),
        inputs=vectors,
        work=lambda rows, bias: Work(bytes=2 * rows.nbytes),
        reference=lambda rows, bias: rows.astype(np.float64) + bias,
        metric="wall",
    )
