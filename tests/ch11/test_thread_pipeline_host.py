"""A pipeline of two threads beats a serial loop where both stages release the GIL.

Only one thread executes Python code at a time, but zlib and NumPy release the global interpreter
lock (GIL) while they process large buffers. So one thread can decompress recording i + 1 while
another computes the spectrum of recording i, on a second core. A bounded queue of two recordings
connects the stages: the slower stage sets the pace, and a fast first stage cannot fill the memory.
Only the first of 24 recordings must be decompressed while the other stage waits.

The limit is the sum over the maximum of the stage times, 2x where they are equal. On a host with 32
CPUs the gain is 1.8x (1.5 to 2.2), with 1.7 times as many cores busy. The stages were not timed
alone; a gain of 1.8x is possible where their times differ by a quarter at most. It also needs two
free cores and single-threaded stages: with NumPy's multi-threaded BLAS functions the serial arm
would already use all cores. Stages in pure Python gain nothing, because they hold the GIL; nor do
items of a few microseconds, which is what a queue operation costs.

These recordings do not depend on each other, so a pool of threads that each do both stages could
use more than two cores. A pipeline is for stages that cannot run twice at once, because they keep a
state or own a device. No arm measures the pool.
"""

import threading
import zlib
from functools import lru_cache
from queue import Queue

import numpy as np
import pytest
import scipy.fft

from pytest_aiperf import Bench, Compare, evidence

RECORDINGS, CHANNELS = 24, 16


# compression takes longer than both arms; the result can be shared, because bytes are immutable
@lru_cache(maxsize=4)
def compressed_walks(seed: int, samples: int) -> tuple[bytes, ...]:
    steps = np.random.default_rng(seed).integers(-2, 3, (RECORDINGS, CHANNELS, samples))
    return tuple(zlib.compress(walk.cumsum(1).astype(np.int16), 1) for walk in steps)


def recordings(bench: Bench) -> tuple[bytes, ...]:
    return compressed_walks(bench.seed, bench.size(1 << 14, check=128))


def decompress(compressed):
    return np.frombuffer(zlib.decompress(compressed), np.int16).reshape(CHANNELS, -1)


def spectrum(recording):
    # one channel at a time: temporaries of the whole recording would be fresh pages in some calls
    # and reused ones in others, and page faults take longer than the transform
    total = np.zeros(recording.shape[1] // 2 + 1)
    for channel in recording:
        total += np.abs(np.fft.rfft(channel))
    return total / CHANNELS


def serial(*compressed):
    return np.stack([spectrum(decompress(recording)) for recording in compressed])


def pipelined(*compressed):
    queue = Queue(maxsize=2)

    def first_stage():
        for recording in compressed:
            queue.put(decompress(recording))

    thread = threading.Thread(target=first_stage)
    thread.start()
    spectra = [spectrum(queue.get()) for _ in compressed]
    thread.join()
    return np.stack(spectra)


def by_scipy(*compressed):
    waves = np.stack([decompress(recording) for recording in compressed]).astype(float)
    return np.abs(scipy.fft.fft(waves)).mean(1)[:, : waves.shape[-1] // 2 + 1]


@pytest.mark.host
def test_thread_pipeline_host(compare: Compare) -> None:
    compare(
        baseline=serial,
        optimized=pipelined,
        inputs=recordings,
        reference=by_scipy,
        metric="wall",
        cache="warm",
        # the same CPU time on two cores
        evidence=[evidence.busy_cores(min=1.2, per="baseline")],
    )
