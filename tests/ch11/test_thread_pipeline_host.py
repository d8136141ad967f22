"""Two stages in two threads run at the same time where both let go of Python's lock.

Only one thread runs Python at a time, but zlib and NumPy work on large buffers outside of the lock.
So while one thread unpacks recording i + 1, another can take the spectrum of recording i: two
cores, one pipeline. A queue of two recordings joins the stages: without a bound a fast first stage
would fill the memory, and with it the slower stage sets the pace.

The limit is sum over maximum of the stages' times, 2x where they take equally long, as about here.
It takes two free cores, and stages that are one at a time: NumPy's BLAS functions start threads of
their own, and with those the serial arm would use all cores already. Stages in Python itself gain
nothing (they hold the lock), nor do items of microseconds, which a queue costs as well.
"""

import threading
import zlib
from functools import lru_cache
from queue import Queue

import numpy as np
import pytest
import scipy.fft

from pytest_aiperf import Bench, Compare

RECORDINGS, CHANNELS = 6, 16


@lru_cache(maxsize=4)  # packing takes longer than both arms, and bytes cannot be changed
def packed_walks(seed: int, samples: int) -> tuple[bytes, ...]:
    steps = np.random.default_rng(seed).integers(-2, 3, (RECORDINGS, CHANNELS, samples))
    return tuple(zlib.compress(walk.cumsum(1).astype(np.int16), 1) for walk in steps)


def recordings(bench: Bench) -> tuple[bytes, ...]:
    return packed_walks(bench.seed, bench.size(1 << 14, check=128))


def unpack(packed):
    return np.frombuffer(zlib.decompress(packed), np.int16).reshape(CHANNELS, -1)


def spectrum(recording):
    return np.abs(np.fft.rfft(recording)).mean(0)


def in_turn(*packed):
    return np.stack([spectrum(unpack(each)) for each in packed])


def pipelined(*packed):
    queue = Queue(maxsize=2)

    def first_stage():
        for each in packed:
            queue.put(unpack(each))

    thread = threading.Thread(target=first_stage)
    thread.start()
    spectra = [spectrum(queue.get()) for _ in packed]
    thread.join()
    return np.stack(spectra)


def all_at_once(*packed):
    waves = np.stack([unpack(each) for each in packed]).astype(float)
    return np.abs(scipy.fft.fft(waves)).mean(1)[:, : waves.shape[-1] // 2 + 1]


@pytest.mark.host
def test_thread_pipeline_host(compare: Compare) -> None:
    compare(
        baseline=in_turn,
        optimized=pipelined,
        inputs=recordings,
        reference=all_at_once,
        metric="wall",
        cache="warm",
    )
