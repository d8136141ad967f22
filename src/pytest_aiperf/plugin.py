"""Hooks, options, markers, fixtures: what every pytest run loads, so it imports little."""

from __future__ import annotations

import copy
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from . import options
from .errors import AiperfError, BuildError, UsageError
from .machine import distributed, requirements

# Rooms are imported where they are needed: a pytest run without claims must not pay for them.
if TYPE_CHECKING:
    from .build.nvcc import Nvcc
    from .device.device import Machine
    from .model import Gpu
    from .session.fixtures import Capture, Compare, Stopwatch
    from .session.session import Session

FIXTURES = frozenset({"gpu", "nvcc", "clock", "capture", "compare"})
SESSION = pytest.StashKey["Session"]()
COMPARE = pytest.StashKey["Compare"]()

# options


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    options.add(parser, pluginmanager)


class _Hooks:
    @pytest.hookspec(firstresult=True)
    def pytest_aiperf_machine(self, config: pytest.Config) -> Machine | None:
        """Return the machine to measure on; the default is this one, through CUDA and NVML."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(_Hooks)


@pytest.hookimpl(trylast=True)
def pytest_aiperf_machine() -> Machine:
    from .device.cuda import CudaMachine

    return CudaMachine()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> None:
    # Before any conftest can import torch or triton. torch.cuda.is_available() in a test module
    # would otherwise initialise CUDA here, and every claim's fork would fail.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    options.add_profile(parser, args)
    option = early_config.option
    known = parser.parse_known_args(args, namespace=copy.copy(option))
    if known.aiperf_profile and not (known.gpu or known.cpu):
        setattr(option, "cpu" if known.aiperf_profile.startswith("perf") else "gpu", True)
    checking = not (known.gpu or known.cpu or known.update_expectations or known.aiperf_profile)
    # where there is a GPU, a project's own tests may want to run their Triton kernels on it
    if checking and (
        early_config.getini("aiperf_interpret") or not Path("/dev/nvidiactl").exists()
    ):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if known.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_configure(config: pytest.Config) -> None:
    for n in range(1, 21):
        config.addinivalue_line("markers", f"ch{n:02d}: claims of chapter {n} (from the folder)")
    for arch in requirements.ARCH_MARKS:
        config.addinivalue_line("markers", f"{arch}: runs only on {arch} (several: any of them)")
    config.addinivalue_line(
        "markers",
        "gpu(count=1, min_sm=None, memory=None, cpu=True): needs GPUs, of at least this compute "
        "capability (90 for sm90) and memory in bytes; of several, each has a rank, and without "
        "--gpu they are checked as ranks on the CPU, unless cpu=False",
    )
    config.addinivalue_line("markers", "host: a claim of the host; measured by --cpu and --gpu")
    measure = _measure(config)
    if distributed.VARIABLE in os.environ:
        from .machine import torchrun

        told = torchrun.rank_job(os.environ)
        assert told is not None
        config.pluginmanager.register(torchrun.Rank(told), "aiperf-rank")
    if measure is not None:
        from .session.runner import Measuring

        if "TORCH_TRACE" not in os.environ and hasattr(config.option, "logger_disable"):
            # hundreds of lines of what torch compiles, which pytest would show with a failure
            config.option.logger_disable = [*config.option.logger_disable, "torch.__trace"]

        try:
            session = _session(config, measure)
            if getattr(config.option, "maxschedchunk", 1) is None:
                config.option.maxschedchunk = 1  # xdist deals chunks, as if tests were short
            if rank := config.pluginmanager.get_plugin("aiperf-rank"):
                session.send = rank.hear
            elif session.settings.job is None:
                config.pluginmanager.register(Measuring(session), "aiperf-measuring")
        except AiperfError as why:
            raise pytest.UsageError(str(why)) from None


def _measure(config: pytest.Config) -> Literal["gpu", "cpu"] | None:
    option = config.option
    if getattr(option, "aiperf_profile", None) and option.update_expectations:
        raise pytest.UsageError(
            "--profile times nothing that could be accepted: drop --update-expectations"
        )
    if option.gpu and option.cpu:
        raise pytest.UsageError("--gpu measures host claims too: drop --cpu")
    if option.gpu:
        return "gpu"
    if option.cpu:
        return "cpu"
    if option.update_expectations:
        return "gpu" if config.hook.pytest_aiperf_machine(config=config).gpus() else "cpu"
    for name in ("--quick", "--budget", "--shard", "--aiperf-report"):
        if getattr(option, name.lstrip("-").replace("-", "_")):
            raise pytest.UsageError(f"{name} is about measuring: add --gpu or --cpu")
    return None


def _session(config: pytest.Config, measure: Literal["gpu", "cpu"] | None = None) -> Session:
    """Return the session; one that only checks comes to be when the first claim asks for it."""
    if SESSION not in config.stash:
        from .session.session import open_session

        machine = config.hook.pytest_aiperf_machine(config=config)
        config.stash[SESSION] = open_session(config, machine, measure)
    return config.stash[SESSION]


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Give each GPU several workers, bounded by cores: they prepare in parallel and time alone."""
    if not (config.option.gpu or config.option.update_expectations):
        return None
    try:
        found = config.hook.pytest_aiperf_machine(config=config).gpus()
    except AiperfError as why:
        raise pytest.UsageError(str(why)) from None
    return max(1, min(len(os.sched_getaffinity(0)), 8 * len(found)))


# collection


def pytest_itemcollected(item: pytest.Item) -> None:
    chapter = requirements.chapter(item.nodeid)
    if chapter:
        item.add_marker(chapter)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = config.stash.get(SESSION, None)
    kept, dropped = [], []
    for item in items:
        uses = not FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        try:  # marks of items that use nothing of ours may be other people's marks
            wanted = (
                requirements.needs_of(item.iter_markers()) if uses else requirements.Requirements()
            )
        except UsageError as why:
            raise pytest.UsageError(f"{item.nodeid}: {why}") from None
        item.stash[requirements.REQUIREMENTS] = wanted
        if ours is not None and not (uses and (ours.settings.measure == "gpu" or wanted.host)):
            dropped.append(item)
            continue
        kept.append(item)
        why_not = ours.skip_reason(item) if ours is not None else None
        if why_not:
            item.add_marker(pytest.mark.skip(reason=why_not))
    if ours is not None and ours.settings.shard:
        try:
            kept, others = ours.split_by_shard(kept)
        except AiperfError as why:
            raise pytest.UsageError(str(why)) from None
        dropped += others
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    mine = [(requirements.claim_id(i.nodeid), i.nodeid) for i in items if requirements.is_claim(i)]
    for claim, first, second in requirements.duplicates(mine):
        raise pytest.UsageError(f"two claims are called {claim}: {first} and {second}; rename one")
    if ours is not None:
        ours.collected(mine)  # in their files' order, as they are shown
        items[:] = ours.in_order(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    building = [i for i in session.items if "nvcc" in getattr(i, "fixturenames", ())]
    if building and not session.config.option.collectonly and not session.testsfailed:
        try:
            _session(session.config).build_all(building)
        except BuildError:
            pass  # no nvcc: each claim that needs it says so
        except AiperfError as why:
            raise pytest.UsageError(str(why)) from None


# what a test gets


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """What this GPU is: name, arch, SMs, L2 and memory in bytes."""
    from .session.fixtures import device_of

    found = device_of(request.node, _session(request.config)).gpu
    if found is None:
        pytest.skip("needs a GPU: run with --gpu")
    return found


@pytest.fixture
def nvcc(request: pytest.FixtureRequest) -> Nvcc:
    """Build a ``.cu`` file: ``nvcc("ch07/copy.cu")["vector"]`` is a launcher."""
    from .session.fixtures import nvcc_of

    return nvcc_of(request.node, _session(request.config))


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> Stopwatch:
    """Time one callable with CUDA events or, without a GPU, with the host clock."""
    from .session.fixtures import Stopwatch, device_of, lock_of

    item, session = request.node, _session(request.config)
    return Stopwatch(device_of(item, session), lock_of(item, session))


@pytest.fixture
def capture(request: pytest.FixtureRequest) -> Capture:
    """Profile one callable: ``capture(call, *args, tool="ncu").figures["duration"]``."""
    from .session.fixtures import Capture

    return Capture(request.node, _session(request.config))


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Compare:
    """State a claim: optimized beats baseline, on the same work."""
    from .session.fixtures import Compare

    request.node.stash[COMPARE] = found = Compare(request.node, _session(request.config))
    return found


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    called = yield
    if COMPARE in pyfuncitem.stash and not pyfuncitem.stash[COMPARE].called:
        raise UsageError("the test takes compare and never calls it: it claims nothing")
    return called


# what is said


def pytest_report_header(config: pytest.Config) -> list[str]:
    ours = config.stash.get(SESSION, None)
    if ours is None:
        return ["aiperf: checking (--gpu measures on the GPU, --cpu measures the host claims)"]
    on = ", ".join(f"{g.name} ({g.key}, driver {g.driver})" for g in ours.gpus) or "this host"
    what = f"capturing with {ours.settings.profile}" if ours.settings.profile else "measuring"
    return [f"aiperf: {what} on {on}; seed {ours.settings.seed}; run {ours.settings.run_id}"]


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    raised = call.excinfo
    if raised is not None and isinstance(raised.value, AiperfError):
        # its sentence is the whole story: no traceback through this package
        sentence = pytest.fail.Exception(str(raised.value), pytrace=False)
        call.excinfo = pytest.ExceptionInfo.from_exc_info((type(sentence), sentence, raised.tb))
    done = yield
    call.excinfo = raised
    if call.when == "call" and COMPARE in item.stash and item.stash[COMPARE].built_only:
        done.aiperf_built = True  # type: ignore[attr-defined]  # reports take more
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if report.when == "call" and report.passed:
        if hasattr(report, "aiperf_built"):
            return "built", "b", "BUILT"
        data = getattr(report, "aiperf", None)
        if data and data["verdict"] and data["speedup"]:
            return "passed", ".", f"{data['verdict']} {data['speedup']['value']:.3g}x"
    return None
