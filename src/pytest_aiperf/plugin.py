"""Hooks, options, markers, fixtures: adapts pytest to the rooms below."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import pytest

from . import child, expectations, journal, needs, report
from . import compare as claims
from . import gpu as gpus
from .build import Nvcc
from .clock import Clock, CudaMachine, Machine, calls_per_block, choose_mode
from .errors import AiperfError, BuildError, Misuse
from .model import Gpu, Interval, Metric, Result, to_json
from .session import (
    CHECKED,
    FIXTURES,
    NEEDS,
    PLACE,
    TITLE,
    Live,
    Place,
    Session,
    Settings,
    code_hash,
    lease_for,
    reproducible,
)
from .trial import PLAN, QUICK, Arm, Claim

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

SESSION = pytest.StashKey[Session]()
CLOCK = pytest.StashKey[Clock]()
NVCC = pytest.StashKey[Nvcc]()

# options


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aiperf", "GPU optimizations as benchmark tests")
    group.addoption("--gpu", action="store_true", help="measure the selected claims on the GPU")
    group.addoption("--cpu", action="store_true", help="measure the host claims on this machine")
    group.addoption(
        "--quick", action="store_true", help="wider interval, fewer replicates, no confirmation"
    )
    group.addoption(
        "--update-expectations",
        action="store_true",
        help="measure, and accept what was measured into expectations.yaml and results/",
    )
    group.addoption(
        "--budget",
        type=_seconds,
        metavar="TIME",
        help="stop starting claims after this long (90, 90s, 20m, 2h); the rest is listed",
    )
    group.addoption(
        "--reproducible",
        action="store_true",
        help="fixed seeds and deterministic algorithms: the same inputs in every run",
    )
    parser.addini("aiperf_expectations", "the expectations file", default="expectations.yaml")
    parser.addini("aiperf_results", "the folder of accepted results", default="results")
    parser.addini("aiperf_kernels", "folders where nvcc() looks", type="args", default=["kernels"])
    parser.addini("aiperf_deadline", "seconds that one claim may work", default="300")


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number = text[:-1] if text[-1:] in units else text
    seconds = float(number) * units.get(text[-1:], 1.0)
    if not seconds > 0:
        raise ValueError(text)
    return seconds


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(_Hooks)


class _Hooks:
    @pytest.hookspec(firstresult=True)
    def pytest_aiperf_machine(self, config: pytest.Config) -> Machine | None:
        """Return the machine to measure on; the default is this one, through CUDA and NVML."""


@pytest.hookimpl(trylast=True)
def pytest_aiperf_machine() -> Machine:
    return CudaMachine()


def _measure(config: pytest.Config, machine: Machine) -> Literal["gpu", "cpu"] | None:
    if config.option.gpu and config.option.cpu:
        raise pytest.UsageError("--gpu measures host claims too: drop --cpu")
    if config.option.gpu:
        return "gpu"
    if config.option.cpu:
        return "cpu"
    if config.option.update_expectations:
        return "gpu" if machine.gpus() else "cpu"
    for name in ("quick", "budget"):
        if getattr(config.option, name):
            raise pytest.UsageError(f"--{name} is about measuring: add --gpu or --cpu")
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # Before any conftest can import torch or triton. torch.cuda.is_available() in a test module
    # would otherwise initialise CUDA here, and every claim's fork would fail.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    known = early_config.known_args_namespace
    if not (known.gpu or known.cpu or known.update_expectations):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if known.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_configure(config: pytest.Config) -> None:
    for n in range(1, 21):
        config.addinivalue_line("markers", f"ch{n:02d}: claims of chapter {n} (from the folder)")
    for arch in needs.ARCH_MARKS:
        config.addinivalue_line("markers", f"{arch}: runs only on {arch} (several: any of them)")
    config.addinivalue_line(
        "markers",
        "gpu(count=1, min_sm=None, memory=None): needs GPUs, of at least this compute capability "
        "(90 for sm90) and memory in bytes",
    )
    config.addinivalue_line("markers", "host: a claim of the host; measured by --cpu and --gpu")
    try:
        config.stash[SESSION] = _session(config)
    except AiperfError as why:
        raise pytest.UsageError(str(why)) from None


def _session(config: pytest.Config) -> Session:
    machine = config.hook.pytest_aiperf_machine(config=config)
    measure = _measure(config, machine)
    given = getattr(config, "workerinput", {}).get("aiperf", {})
    root = config.rootpath
    started = given.get("started", time.time())
    settings = Settings(
        measure=measure,
        quick=config.option.quick,
        update=config.option.update_expectations,
        reproducible=config.option.reproducible,
        debug=config.option.usepdb,
        seed=given.get("seed", 0 if config.option.reproducible else secrets.randbelow(2**31)),
        started=started,
        run_id=given.get("run_id")
        or journal.new_run_id(datetime.fromtimestamp(started, UTC), os.getpid()),
        worker=os.environ.get("PYTEST_XDIST_WORKER", "main") if given else "main",
        budget=config.option.budget,
        deadline=float(config.getini("aiperf_deadline")),
        root=root,
        expectations=root / str(config.getini("aiperf_expectations")),
        results=root / str(config.getini("aiperf_results")),
        kernels=tuple(root / k for k in config.getini("aiperf_kernels")),
    )
    found = tuple(machine.gpus()) if measure == "gpu" else ()
    if measure == "gpu" and not found:
        raise pytest.UsageError(
            f"--gpu needs an NVIDIA GPU: {gpus.absence()}; `pytest` checks without one, "
            "`pytest --cpu` measures the host claims"
        )
    session = Session(config, settings, machine, found)
    if measure is None:
        return session
    if config.getoption("dist", "no") not in ("no", "load", "worksteal"):
        raise pytest.UsageError(
            f"--dist {config.option.dist} loses or hangs tests when a worker dies: "
            "use --dist load or worksteal to measure"
        )
    expectations.load(settings.expectations)  # a bad file is told now, not after an hour
    runs = root / ".aiperf"
    if settings.is_worker:
        session.run = journal.Run(runs / settings.run_id)
    else:
        session.run = journal.open_run(runs, settings.run_id)
    session.live = Live(config, session.run.path / "live", worker=settings.is_worker)
    if settings.is_worker:
        child.arm_parent_death(signal.SIGTERM)
    elif config.getoption("numprocesses", None):
        session.live.listen()
    signal.signal(signal.SIGTERM, _terminated)
    return session


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    pytest.exit("SIGTERM: finished results are kept", returncode=128 + signal.SIGTERM)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    settings = node.config.stash[SESSION].settings
    node.workerinput["aiperf"] = {
        "run_id": settings.run_id,
        "seed": settings.seed,
        "started": settings.started,
    }


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Give each GPU several workers, bounded by cores: they prepare in parallel and time alone."""
    if not config.option.gpu:
        return None
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, 8 * max(1, len(gpus.visible()))))


def pytest_report_header(config: pytest.Config) -> list[str]:
    session = config.stash[SESSION]
    settings = session.settings
    if settings.measure is None:
        return ["aiperf: checking (--gpu measures on the GPU, --cpu measures the host claims)"]
    on = ", ".join(f"{g.name} ({g.key}, driver {g.driver})" for g in session.gpus) or "this host"
    return [f"aiperf: measuring on {on}; seed {settings.seed}; run {settings.run_id}"]


# collection


def pytest_itemcollected(item: pytest.Item) -> None:
    chapter = needs.chapter(item.nodeid)
    if chapter:
        item.add_marker(chapter)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = config.stash[SESSION]
    settings = ours.settings
    kept, dropped = [], []
    for item in items:
        try:
            item.stash[NEEDS] = wanted = needs.needs_of(item.iter_markers())
        except Misuse as why:
            raise pytest.UsageError(f"{item.nodeid}: {why}") from None
        used = FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if settings.measure and (not used or (settings.measure == "cpu" and not wanted.host)):
            dropped.append(item)
            continue
        kept.append(item)
        item.stash[TITLE] = _title(getattr(item, "module", None))
        why_not = wanted.missing(ours.gpus) if settings.measure == "gpu" else None
        if why_not:
            item.add_marker(pytest.mark.skip(reason=why_not))
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    mine = [(needs.claim_id(i.nodeid), i.nodeid) for i in items if _is_claim(i)]
    for claim, first, second in needs.twins(mine):
        raise pytest.UsageError(f"two claims are called {claim}: {first} and {second}; rename one")
    if ours.run is not None and not config.option.collectonly:
        with suppress(FileExistsError):  # under xdist the first worker writes what all collected
            ours.run.manifest(mine)


def _title(module: ModuleType | None) -> str:
    return ((module and module.__doc__) or "").strip().partition("\n")[0]


def _is_claim(item: pytest.Item) -> bool:
    return "compare" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    ours = session.config.stash[SESSION]
    if session.config.option.collectonly or session.testsfailed:
        return
    with suppress(BuildError):  # no nvcc: each claim that needs it says so
        ours.build_all(session.items)


# running


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    ours = item.config.stash[SESSION]
    if ours.settings.measure is None or ours.settings.debug:
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    spent = ours.spent()
    if spent:
        item.add_marker(pytest.mark.skip(reason=spent))
    skip = next(item.iter_markers("skip"), None)
    reports = ours.skipped(item, nextitem) if skip else ours.supervised(item)
    for done in reports:
        hook.pytest_runtest_logreport(report=done)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    done = yield
    if call.when == "call" and CHECKED in item.stash:
        done.aiperf_checked = item.stash[CHECKED]  # type: ignore[attr-defined]  # reports take more
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if report.when != "call" or not report.passed:
        return None
    if getattr(report, "aiperf_checked", None) == "built":
        return "built", "b", "BUILT"
    data = getattr(report, "aiperf", None)
    if data and data["verdict"] and data["speedup"]:
        return "passed", ".", f"{data['verdict']} {data['speedup']['value']:.3g}x"
    return None


# the end


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    ours = session.config.stash.get(SESSION, None)
    if ours is not None and ours.run is not None and not ours.settings.is_worker:
        _finish(session, ours, exitstatus)
    return (yield)  # pytest-benchmark's own finish comes after: its files hold our claims


def _finish(session: pytest.Session, ours: Session, exitstatus: int) -> None:
    assert ours.run is not None
    if session.config.option.collectonly or not ours.run.collected:
        return
    try:
        ours.finish(
            interrupted=exitstatus == pytest.ExitCode.INTERRUPTED or bool(session.shouldstop)
        )
    except (AiperfError, OSError, ValueError) as why:
        ours.closing.append(f"ERROR: {why}")
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        return
    report.benchmark_session_add(
        session.config.pluginmanager.get_plugin("pytest-benchmark"), list(ours.results.values())
    )
    unexplained = [r for r in ours.lost if not r.message.startswith("not run")]
    if session.exitstatus == pytest.ExitCode.OK and unexplained:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    machine_info["gpus"] = journal.machine_info(config.stash[SESSION].gpus)["gpus"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    ours = config.stash[SESSION]
    if ours.results:
        terminalreporter.section("claims")
        for line in report.table(
            list(ours.results.values()), shutil.get_terminal_size((140, 24)).columns
        ):
            terminalreporter.write_line(line)
    if ours.closing:
        terminalreporter.section("records")
        for line in ours.closing:
            terminalreporter.write_line(line)


# fixtures


def _place(item: pytest.Item) -> Place:
    ours = item.config.stash[SESSION]
    return item.stash.get(PLACE, None) or Place(None, 1, ours.mine(item.stash[NEEDS]))


def _clock(item: pytest.Item) -> Clock:
    """Return the claim's clock; CUDA is initialised here, in the claim's process."""
    if CLOCK not in item.stash:
        ours = item.config.stash[SESSION]
        place = _place(item)
        item.stash[CLOCK] = ours.machine.clock(place.gpus[0] if place.gpus else None)
    return item.stash[CLOCK]


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """What this GPU is: name, arch, SMs, L2 and memory in bytes."""
    found = _clock(request.node).gpu if _place(request.node).gpus else None
    if found is None:
        pytest.skip("needs a GPU: run with --gpu")
    return found


@pytest.fixture
def nvcc(request: pytest.FixtureRequest) -> Nvcc:
    """Build a ``.cu`` file: ``nvcc("ch07/copy.cu")["vector"]`` is a launcher."""
    item = request.node
    ours = item.config.stash[SESSION]
    item.stash[NVCC] = found = Nvcc(
        roots=ours.roots(item),
        archs=ours.archs(item),
        include=ours.include(),
        load=bool(_place(item).gpus),
    )
    return found


class Stopwatch:
    """Time one callable: the ``clock`` fixture."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, call: Callable[..., object], *args: object) -> Interval:
        """Return the seconds of one call: median and the extremes of ten blocks."""
        once = self.clock.once(lambda: call(*args))
        mode = choose_mode(Metric.WALL if self.clock.gpu is None else Metric.DEVICE, once, once)
        calls = calls_per_block(mode, once, once)
        block = self.clock.block([lambda: call(*args)] * calls, mode)
        block.run()
        seconds = sorted(block.run() / calls for _ in range(10))
        return Interval(seconds[0], (seconds[4] + seconds[5]) / 2, seconds[-1])


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> Stopwatch:
    """Time one callable with CUDA events or, without a GPU, with the host clock."""
    return Stopwatch(_clock(request.node))


class Compare:
    """The claim: the ``compare`` fixture."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._called = False

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
        Returns the record when measuring, None when only checking. Raises Misuse,
        Disagreement, InvalidMeasurement or Unproven, each with one sentence.
        """
        __tracebackhide__ = True
        if self._called:
            pytest.fail("a test is one claim: call compare() once", pytrace=False)
        self._called = True
        try:
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
            if self._item.config.stash[SESSION].settings.measure is None:
                self._check(claim)
                return None
            return self._measure(claim)
        except AiperfError as why:
            pytest.fail(str(why), pytrace=False)

    def _check(self, claim: Claim) -> None:
        item = self._item
        on_gpu = item.stash[NEEDS].gpu or any(
            getattr(arm, "needs_gpu", False) for arm in claim.arms.values()
        )
        if not on_gpu:
            claims.check(claim, _clock(item), seed=1, say=lambda *_a, **_k: None)
            item.stash[CHECKED] = "agreed"
        elif NVCC in item.stash and item.stash[NVCC].used:
            item.stash[CHECKED] = "built"
        else:
            raise pytest.skip.Exception(
                "its agreement needs a GPU, and there is nothing to build: run with --gpu",
                _use_item_location=True,
            )

    def _measure(self, claim: Claim) -> Result:
        item = self._item
        ours = item.config.stash[SESSION]
        place = _place(item)
        blank = ours.blank(item, place.attempt)

        def say(phase: str, **figures: object) -> None:
            if place.channel is not None:
                place.channel.send("working", phase=phase, **figures)

        plan = QUICK if ours.settings.quick else PLAN
        case = claims.Case(
            blank=blank,
            clock=_clock(item),
            lease=lease_for(place),
            plan=plan,
            say=say,
            floor=lambda clock: ours.floor(
                place, lambda: claims.noise_floor(clock, blank.seed, plan, say)
            ),
            expected=ours.expected(blank),
            code=lambda: code_hash(_files(item)),
            kernels=lambda: tuple(
                k for b in (item.stash[NVCC].used if NVCC in item.stash else ()) for k in b.kernels
            ),
        )
        with reproducible(ours.settings.reproducible):
            result, problem = claims.run(claim, case)
        if place.channel is not None:
            place.channel.send("result", result=to_json(result))
        if problem is not None:
            raise problem
        return result


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Compare:
    """State a claim: optimized beats baseline, on the same work."""
    return Compare(request.node)


def _files(item: pytest.Item) -> list[Path]:
    """Name the files that a claim is made of: its test, its kernels, their headers."""
    files = [item.path]
    if NVCC in item.stash:
        files += item.stash[NVCC].sources
    root = item.config.rootpath
    for value in vars(getattr(item, "module", None) or ModuleType("none")).values():
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        file = getattr(sys.modules.get(name or ""), "__file__", None)
        if file and Path(file).is_relative_to(root) and "site-packages" not in file:
            files.append(Path(file))
    return files
