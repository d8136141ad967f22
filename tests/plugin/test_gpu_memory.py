"""Claims reserve GPU memory before they prepare, so that together they do not run out of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time

import pytest

from pytest_aiperf.machine import gpu_memory
from pytest_aiperf.machine.gpu_memory import CONTEXT_BYTES, footprint, reservation

A, B = "GPU-aaaa", "GPU-bbbb"
LIMIT = 100
FORK = multiprocessing.get_context("fork")
PATIENCE_S = 30


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr(gpu_memory, "POLL_S", 0.01)


class Claim:
    """Another process, which reserves memory and keeps it until released."""

    def __init__(self, folder, nbytes, gpu=A):
        self.waits, self.acquires, self.holds, self._release = (FORK.Event() for _ in range(4))
        self._process = FORK.Process(target=self._run, args=(folder, nbytes, gpu), daemon=True)
        self._process.start()

    def _run(self, folder, nbytes, gpu):
        told = {"on_wait": lambda _: self.waits.set(), "on_acquired": self.acquires.set}
        with reservation(gpu, nbytes, LIMIT, folder=folder, **told):
            self.holds.set()
            self._release.wait()

    def release(self):
        self._release.set()
        self._process.join(PATIENCE_S)

    def kill(self):
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(PATIENCE_S)


@pytest.fixture
def claim(tmp_path):
    """Return a function that starts a claim and waits until it holds its memory or waits for it."""
    claims = []

    def start(nbytes, gpu=A):
        claims.append(Claim(tmp_path / "locks", nbytes, gpu))
        deadline = time.monotonic() + PATIENCE_S
        while not (claims[-1].holds.is_set() or claims[-1].waits.is_set()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return claims[-1]

    yield start
    for each in claims:
        with contextlib.suppress(ProcessLookupError):
            each.kill()


def test_claims_that_fit_hold_memory_together(claim):
    for nbytes in (30, 30, 40):
        assert claim(nbytes).holds.is_set()
    assert claim(100, gpu=B).holds.is_set(), "each GPU has memory of its own"


def test_a_claim_that_does_not_fit_waits_and_says_so(claim):
    first, second = claim(60), claim(50)
    assert not second.holds.is_set()
    assert second.waits.is_set()
    first.release()
    assert second.holds.wait(PATIENCE_S)
    assert second.acquires.is_set()


def test_a_claim_without_a_wait_reports_none(claim):
    only = claim(60)
    assert only.holds.is_set()
    assert not only.waits.is_set()
    assert not only.acquires.is_set()


def test_more_than_there_is_is_reserved_alone(claim):
    first, large = claim(1), claim(LIMIT + 1)
    assert not large.holds.is_set()
    first.release()
    assert large.holds.wait(PATIENCE_S)
    assert not claim(1).holds.is_set(), "the large claim needs the GPU alone"


def test_a_killed_process_frees_its_reservation(claim, tmp_path):
    first, second = claim(60), claim(50)
    first.kill()
    assert second.holds.wait(PATIENCE_S)
    assert len(list(tmp_path.glob("locks/memory-*-*-*"))) == 1, "the dead claim's entry is deleted"


def test_a_killed_process_that_waits_blocks_nobody(claim):
    claim(60)
    claim(50).kill()
    assert claim(40).holds.is_set()


def test_a_large_claim_lets_small_ones_pass_for_a_while(claim):
    first, large = claim(60), claim(90)
    small = claim(20)
    assert small.holds.is_set(), "it fits beside the first one"
    first.release()
    assert not large.holds.is_set()
    small.release()
    assert large.holds.wait(PATIENCE_S)


def test_a_large_claim_is_not_overtaken_by_small_ones_forever(claim, monkeypatch):
    monkeypatch.setattr(gpu_memory, "PATIENCE_S", 0.0)
    first, large = claim(60), claim(90)
    time.sleep(0.1)  # its patience is over, and it has seen that it does not fit
    small = claim(20)
    assert not small.holds.is_set()
    first.release()
    assert large.holds.wait(PATIENCE_S)
    assert not small.holds.is_set()
    large.release()
    assert small.holds.wait(PATIENCE_S)


def test_a_claim_that_needs_less_has_its_turn_sooner(claim, monkeypatch):
    monkeypatch.setattr(gpu_memory, "PATIENCE_S", 1.0)
    first, everything, half = claim(60), claim(100), claim(50)
    time.sleep(1.5)  # the patience of both is over
    first.release()
    assert half.holds.wait(PATIENCE_S)
    assert not everything.holds.is_set()
    half.release()
    assert everything.holds.wait(PATIENCE_S)


def test_claims_that_delay_nobody_pass_while_a_large_one_has_its_turn(claim, monkeypatch):
    monkeypatch.setattr(gpu_memory, "PATIENCE_S", 0.0)
    first, large = claim(60), claim(80)
    time.sleep(0.1)
    small = [claim(10), claim(10), claim(10)]
    assert [each.holds.is_set() for each in small] == [True, True, False]
    first.release()
    assert large.holds.wait(PATIENCE_S), "beside the two that have passed"
    assert not small[2].holds.is_set()


def test_nobody_takes_the_place_of_a_claim_whose_turn_it_is(claim, monkeypatch):
    monkeypatch.setattr(gpu_memory, "PATIENCE_S", 0.0)
    monkeypatch.setattr(gpu_memory, "POLL_S", 0.2)
    first, large = claim(1), claim(100)
    time.sleep(0.5)
    first.release()  # nothing is reserved until the large claim looks again
    assert not claim(1).holds.is_set()
    assert large.holds.wait(PATIENCE_S)


def test_a_killed_process_leaves_its_turn_to_another(claim, monkeypatch):
    monkeypatch.setattr(gpu_memory, "PATIENCE_S", 0.0)
    first, large = claim(60), claim(90)
    time.sleep(0.1)
    large.kill()
    assert claim(40).holds.is_set()
    assert first.holds.is_set()


def test_the_wait_is_measured(claim, tmp_path):
    first = claim(60)
    waits = []
    asked = time.monotonic()

    def on_wait(sentence):
        waits.append(sentence)
        first.release()

    folder = tmp_path / "locks"
    with reservation(A, 50 << 30, LIMIT, folder=folder, on_wait=on_wait) as waited_s:
        assert 0 < waited_s <= time.monotonic() - asked
    assert waits == [f"waiting for 50.0 GiB of GPU {A}, which other claims use"]
    with reservation(A, 50, LIMIT, folder=folder) as waited_s:
        assert waited_s == 0
    assert not list(folder.glob("memory-*-*-*")), "no entry is left"


def test_a_claim_waits_while_another_has_more_memory_than_it_reserved(claim, tmp_path):
    first, free = claim(30), 40

    def on_wait(_):
        nonlocal free
        free = 70

    told = {"free": lambda: free, "on_wait": on_wait, "folder": tmp_path / "locks"}
    with reservation(A, 40, LIMIT, **told) as waited_s:
        assert waited_s == 0
    with reservation(A, 50, LIMIT, **told) as waited_s:
        assert waited_s > 0
    first.release()
    with reservation(A, 90, LIMIT, **told) as waited_s:
        assert waited_s == 0, "nobody else's memory could become free"


def _reserve_often(folder, held, peak, seed):
    rng = random.Random(seed)
    for _ in range(10):
        nbytes = rng.choice([10, 30, 60, 90])
        with reservation(A, nbytes, LIMIT, folder=folder):
            with held.get_lock():
                held.value += nbytes
                peak.value = max(peak.value, held.value)
            time.sleep(rng.random() * 0.005)
            with held.get_lock():
                held.value -= nbytes


def test_many_processes_never_exceed_the_limit(tmp_path):
    held, peak = FORK.Value("i", 0), FORK.Value("i", 0)
    args = tmp_path / "locks", held, peak
    processes = [FORK.Process(target=_reserve_often, args=(*args, i)) for i in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(4 * PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * 8
    assert held.value == 0
    assert 60 < peak.value <= LIMIT, "they did hold memory side by side"


def test_the_footprint_covers_the_check_and_the_timing():
    gib = 1 << 30
    # one set, four for the reference, and the results of two arms with a copy of each
    assert footprint(gib, 2, 1) == CONTEXT_BYTES + 9 * gib
    # nine sets, two to check outputs, and results of two calls
    assert footprint(gib, 3, 3) == CONTEXT_BYTES + 17 * gib
    # two copies of results at a time
    assert footprint(gib, 3, 3, kept_bytes=2 * gib) == CONTEXT_BYTES + 13 * gib
