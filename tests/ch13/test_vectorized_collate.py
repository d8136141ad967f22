"""One indexing call for a batch beats stacking its samples.

A data set that is an array in memory is usually served sample by sample: 4096 calls that each make
a view of a row, and a collate function that stacks the 4096 views. Python and NumPy spend about a
microsecond on each of them, several times what copying 256 bytes takes. Indexing with the list of
all samples enters NumPy once, and a compiled loop copies the rows.

A PyTorch `DataLoader` does so where the data set has `__getitems__`, or where a batch sampler
serves as its sampler and batch_size is None. The ratio is that of calls while rows are short; from
some 10 kB a row the copy is what takes time. Samples that need work of their own (decoding,
augmentation) gain only if that work can be done for a batch as well.
"""

import numpy as np
import pytest

from pytest_aiperf import Bench, Compare


def samples(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(bench.seed)
    count, batch = bench.size(8192, check=200), bench.size(4096, check=50)
    rows = rng.random((count, 64), np.float32)
    return rows, rng.integers(0, 10, count), rng.permutation(count)[:batch]


def stacked(rows, labels, wanted):
    drawn = [(rows[i], labels[i]) for i in wanted.tolist()]
    return [np.stack(part) for part in zip(*drawn, strict=True)]


def gathered(rows, labels, wanted):
    return rows[wanted], labels[wanted]


def copied(rows, labels, wanted):
    batch = np.zeros((len(wanted), rows.shape[1]), np.float32), np.zeros(len(wanted), int)
    for place, i in enumerate(wanted):
        batch[0][place], batch[1][place] = rows[i], labels[i]
    return batch


@pytest.mark.host
def test_vectorized_collate(compare: Compare) -> None:
    compare(
        baseline=stacked,
        optimized=gathered,
        inputs=samples,
        reference=copied,
        metric="wall",
        cache="warm",
    )
