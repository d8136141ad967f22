"""What a test gets: compare, clock, nvcc and gpu, in the process where the test runs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from . import compare as claims
from .build import Nvcc
from .clock import Clock, calls_per_block, choose_mode
from .errors import Misuse
from .lease import Lease
from .model import Interval, Metric, Result, to_json
from .needs import NEEDS
from .replicate import PLAN, QUICK
from .session import Session
from .trial import Arm, Claim

CLOCK = pytest.StashKey[Clock]()
LEASE = pytest.StashKey[Lease]()
NVCC = pytest.StashKey[Nvcc]()


def clock_of(item: pytest.Item, session: Session) -> Clock:
    """Return the item's clock; CUDA is initialised here, in the claim's process."""
    if CLOCK not in item.stash:
        gpus = session.mine(item)
        with lease_of(item, session).prepare():  # a new clock spins, which others would measure
            item.stash[CLOCK] = session.machine.clock(gpus[0] if gpus else None)
    return item.stash[CLOCK]


def lease_of(item: pytest.Item, session: Session) -> Lease:
    """Return the item's lease; what it waits for others does not count against its deadline."""
    if LEASE not in item.stash:
        item.stash[LEASE] = Lease(
            [g.uuid for g in session.mine(item)],
            on_wait=lambda why: session.tell("waiting", phase=why),
            on_turn=lambda: session.tell("working", phase="its turn"),
        )
    return item.stash[LEASE]


def nvcc_of(item: pytest.Item, session: Session) -> Nvcc:
    """Return what builds the item's kernels, and loads them where there is a GPU."""
    item.stash[NVCC] = found = Nvcc(
        roots=session.roots(item),
        archs=session.archs(item),
        include=session.include(),
        load=bool(session.mine(item)),
    )
    return found


class Stopwatch:
    """Time one callable: the ``clock`` fixture."""

    def __init__(self, clock: Clock, lease: Lease) -> None:
        self.clock = clock
        self.lease = lease

    def __call__(self, call: Callable[..., object], *args: object) -> Interval:
        """Return the seconds of one call: median and the extremes of ten blocks."""
        with self.lease.time_host() if self.clock.gpu is None else self.lease.time_device():
            return self._time(call, *args)

    def _time(self, call: Callable[..., object], *args: object) -> Interval:
        once = self.clock.once(lambda: call(*args))
        mode = choose_mode(Metric.WALL if self.clock.gpu is None else Metric.DEVICE, once, once)
        calls = calls_per_block(mode, once, once)
        block = self.clock.block([lambda: call(*args)] * calls, mode)
        block.run()
        seconds = sorted(block.run() / calls for _ in range(10))
        return Interval(seconds[0], (seconds[4] + seconds[5]) / 2, seconds[-1])


class Compare:
    """The claim: the ``compare`` fixture."""

    def __init__(self, item: pytest.Item, session: Session) -> None:
        self._item = item
        self._session = session
        self.called = False
        self.built_only = False

    def __call__(
        self,
        *,
        baseline: Arm,
        optimized: Arm,
        inputs: Callable[..., object],
        reference: Callable[..., object],
        work: Callable[..., Any] | None = None,
        library: Arm | None = None,
        metric: str | Sequence[str] = "device",
        against: str = "idiomatic",
        cache: str = "cold",
        precision: str | None = None,
    ) -> Result | None:
        """Hold that ``optimized`` beats ``baseline`` on the same work.

        Arms, ``reference`` and ``work`` are called with what ``inputs(bench)`` returns. A call's
        result is what it returns followed by the arguments that it changed; ``reference`` gives
        the same in fp64 or exactly. ``metric`` is what is judged (of several, the first);
        ``against`` says what the baseline is; ``cache="warm"`` declares that the working set may
        stay in the L2; ``precision`` declares arithmetic of fewer bits in the optimized arm.
        Returns the record when measuring, None when only checking. Raises Misuse, Disagreement,
        InvalidMeasurement or Unproven, each with one sentence.
        """
        if self.called:
            raise Misuse("a test is one claim: call compare() once")
        self.called = True
        claim = claims.claim_of(
            baseline=baseline,
            optimized=optimized,
            inputs=inputs,
            reference=reference,
            work=work,
            library=library,
            metric=metric,
            against=against,
            cache=cache,
            precision=precision,
        )
        if self._session.settings.measure is not None:
            return self._measure(claim)
        self._check(claim)
        return None

    def _check(self, claim: Claim) -> None:
        item = self._item
        arms = claim.arms.values()
        if not (item.stash[NEEDS].gpu or any(getattr(arm, "needs_gpu", False) for arm in arms)):
            clock = clock_of(item, self._session)
            claims.check(claim, clock, seed=1, say=lambda *_a, **_k: None)
        elif NVCC in item.stash and item.stash[NVCC].used:
            self.built_only = True
        else:
            raise pytest.skip.Exception(
                "its agreement needs a GPU, and there is nothing to build: run with --gpu",
                _use_item_location=True,
            )

    def _measure(self, claim: Claim) -> Result:
        item, session = self._item, self._session
        blank = session.blank(item)
        plan = QUICK if session.settings.quick else PLAN
        used = item.stash[NVCC].used if NVCC in item.stash else ()

        def say(phase: str, **figures: object) -> None:
            session.tell("working", phase=phase, **figures)

        case = claims.Case(
            blank=blank,
            clock=clock_of(item, session),
            lease=lease_of(item, session),
            plan=plan,
            say=say,
            floor=lambda clock: session.floor(
                item, lambda: claims.noise_floor(clock, blank.seed, plan, say)
            ),
            expected=lambda code: session.expected(item, code),
            code=lambda: _code_hash(_files(item)),
            kernels=lambda: tuple(k for b in used for k in b.kernels),
        )
        with _deterministic(on=session.settings.reproducible):
            result, problem = claims.run(claim, case)
        session.tell("result", result=to_json(result))
        if problem is not None:
            raise problem
        return result


def _files(item: pytest.Item) -> list[Path]:
    """Name the files that a claim is made of: its test, its kernels, their headers."""
    files = [item.path]
    if NVCC in item.stash:
        files += item.stash[NVCC].sources
    root = item.config.rootpath
    ours = __package__ or ""
    for value in vars(getattr(item, "module", None) or ModuleType("none")).values():
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        file = getattr(sys.modules.get(name or ""), "__file__", None)
        if (name or "").partition(".")[0] == ours or "site-packages" in (file or ""):
            continue  # the plugin's own changes do not change the claim
        if file and Path(file).is_relative_to(root):
            files.append(Path(file))
    return files


def _code_hash(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@contextmanager
def _deterministic(*, on: bool) -> Iterator[None]:
    """Ask torch for deterministic algorithms while a claim runs."""
    torch = sys.modules.get("torch")
    if not on or torch is None:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
