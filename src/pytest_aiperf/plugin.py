"""The pytest plugin: hooks, markers and fixtures. It imports little: all pytest runs load it."""

from __future__ import annotations

import copy
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import pytest

from . import options
from .errors import AiperfError, BuildError, UsageError
from .machine import distributed, requirements
from .session import SESSION

# Functions import what they need, so that a pytest run without claims loads little.
if TYPE_CHECKING:
    from .build.nvcc import Nvcc
    from .model import Gpu
    from .session.context import ItemContext
    from .session.cuda_machine import Machine
    from .session.fixtures import Capture, Compare, Stopwatch
    from .session.session import Session

CONTEXT = pytest.StashKey["ItemContext"]()  #: The state that the fixtures of an item share.
COMPARE = pytest.StashKey["Compare"]()  #: The compare fixture of an item that has requested it.
COLLECTED = pytest.StashKey[set[str]]()  #: Ids of all collected claims, selected or not.
PARTIAL = pytest.StashKey[set[str]]()  #: Folders, as in ids, with a module that was not collected.
WORKERS_PER_GPU: Final = 8
"""Maximum xdist workers per GPU with ``-n auto``: one times while the others build and check."""


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
    from .session.cuda_machine import CudaMachine

    return CudaMachine()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> None:
    # Must be set before a conftest imports torch: otherwise torch.cuda.is_available() in a test
    # module would initialise CUDA in this process, and the claims, its forks, could not use CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    options.add_profile(parser, args)
    option = early_config.option
    given = parser.parse_known_args(args, namespace=copy.copy(option))
    if given.aiperf_profile and not (given.gpu or given.cpu):
        setattr(option, "cpu" if given.aiperf_profile.startswith("perf") else "gpu", True)
    checking = not (given.gpu or given.cpu or given.update_expectations or given.aiperf_profile)
    # On a machine with a GPU, the ini file must ask for Triton's interpreter: tests that are not
    # claims may need Triton on the GPU.
    if checking and (
        early_config.getini("aiperf_interpret") or not Path("/dev/nvidiactl").exists()
    ):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if given.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_configure(config: pytest.Config) -> None:
    _add_markers(config)
    measure = _measure(config)
    if measure is None and distributed.VARIABLE not in os.environ:
        return  # a session that only checks is opened by its first claim
    try:
        session = _session(config, measure)
        if measure is not None:
            from .session.runner import register

            register(config, session)
    except AiperfError as error:
        raise pytest.UsageError(str(error)) from None


def _add_markers(config: pytest.Config) -> None:
    for folder in config.getini("aiperf_folder_markers"):
        config.addinivalue_line("markers", f"{folder}: tests in a folder named {folder}")
    for arch in requirements.ARCH_MARKS:
        text = f"{arch}: runs only on {arch}; with several such markers, on any of them"
        config.addinivalue_line("markers", text)
    config.addinivalue_line(
        "markers",
        "gpu(count=1, min_sm=None, memory=None, cpu=True): needs `count` GPUs with at least this "
        "compute capability (90 for sm90) and memory in bytes. A multi-GPU claim runs in one "
        "process per GPU; without --gpu these processes check it on the CPU, unless cpu=False",
    )
    config.addinivalue_line("markers", "host: a host claim, measured by --cpu and --gpu")


def _measure(config: pytest.Config) -> Literal["gpu", "cpu"] | None:
    option = config.option
    if getattr(option, "aiperf_profile", None) and option.update_expectations:
        raise pytest.UsageError(
            "--profile measures no times that could be accepted: drop --update-expectations"
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
            raise pytest.UsageError(f"{name} only affects measuring: add --gpu or --cpu")
    return None


def _session(config: pytest.Config, measure: Literal["gpu", "cpu"] | None = None) -> Session:
    """Return the session of this process; open it if this is the first call."""
    if SESSION not in config.stash:
        from .session.session import open_session

        machine = config.hook.pytest_aiperf_machine(config=config)
        config.stash[SESSION] = open_session(config, machine, measure)
    return config.stash[SESSION]


def _measuring(config: pytest.Config) -> Session | None:
    """Return the session if it measures or profiles, None if it only checks."""
    session = config.stash.get(SESSION, None)
    return session if session is not None and session.settings.measure is not None else None


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Use several workers per GPU, at most one per core: they build at the same time."""
    if not (config.option.gpu or config.option.update_expectations):
        return None
    try:
        gpus = config.hook.pytest_aiperf_machine(config=config).gpus()
    except AiperfError as error:
        raise pytest.UsageError(str(error)) from None
    return max(1, min(len(os.sched_getaffinity(0)), WORKERS_PER_GPU * len(gpus)))


def pytest_itemcollected(item: pytest.Item) -> None:
    if requirements.is_claim(item):
        collected = item.config.stash.setdefault(COLLECTED, set())
        collected.add(requirements.claim_id(item.nodeid))
    folders = item.nodeid.partition("::")[0].split("/")[:-1]
    for name in item.config.getini("aiperf_folder_markers"):
        if name in folders:
            item.add_marker(name)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if not report.passed:  # a module skipped itself, or could not be imported
        partial = collector.config.stash.setdefault(PARTIAL, set())
        partial.add(requirements.claim_id(report.nodeid).partition("/")[0])
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        _prepare(config, items)
    except AiperfError as error:
        if not hasattr(config, "workerinput"):
            raise pytest.UsageError(str(error)) from None
        items.clear()  # xdist loses a worker's exception, but shows a failed collection
        report = pytest.CollectReport("pytest-aiperf", "failed", str(error), [])
        config.hook.pytest_collectreport(report=report)


def _prepare(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check the collected items, select those of this session and order them."""
    session = _measuring(config)
    for item in items:
        # Other tests' marks are ignored: their gpu or host may belong to another plugin.
        marks = item.iter_markers() if requirements.fixtures_of(item) else ()
        try:
            item.stash[requirements.REQUIREMENTS] = requirements.requirements_of(marks)
        except UsageError as error:
            raise UsageError(f"{item.nodeid}: {error}") from None
    path = config.rootpath / str(config.getini("aiperf_expectations"))
    if path.exists() and _collects_everything(config):
        from .records.expectations import refuse_unknown_claims

        known, partial = config.stash.get(COLLECTED, set()), config.stash.get(PARTIAL, set())
        refuse_unknown_claims(path, known, partial)
    if session is not None:
        _select(session, config, items)
        if hasattr(config.hook, "pytest_timeout_set_timer"):
            # pytest-timeout would end the process that waits for a claim, and count its waiting
            for item in items:
                item.add_marker(pytest.mark.timeout(0), append=False)
    claims = requirements.claims_of(items)
    for claim, first, second in requirements.duplicates(claims):
        raise UsageError(f"two claims are called {claim}: {first} and {second}; rename one")
    if session is not None:
        if session.run is not None:
            session.run.write_manifest(claims)  # in file order, like the results shown
        items[:] = session.in_order(items)


def _collects_everything(config: pytest.Config) -> bool:
    """Whether the arguments leave no test of the project uncollected; -k and -m select later."""
    if config.option.ignore or config.option.ignore_glob:
        return False
    root = config.rootpath
    paths = [found for path in config.getini("testpaths") for found in root.glob(path)] or [root]
    folders = [Path(config.invocation_params.dir, arg).resolve() for arg in config.args]
    return all(any(path.is_relative_to(f) for f in folders) for path in paths)


def _select(session: Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that measure nothing or are in another shard; skip those that cannot run."""
    selected, deselected = [], []
    for item in items:
        required = item.stash[requirements.REQUIREMENTS]
        measures = session.settings.measure == "gpu" or required.host
        if not (measures and requirements.fixtures_of(item)):
            deselected.append(item)
            continue
        selected.append(item)
        if reason := session.skip_reason(item):
            item.add_marker(pytest.mark.skip(reason=reason))
    if session.settings.shard:
        selected, others = session.split_by_shard(selected)
        deselected += others
    items[:] = selected
    if deselected:
        config.hook.pytest_deselected(items=deselected)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    items = [i for i in session.items if "nvcc" in requirements.fixtures_of(i)]
    if items and not session.config.option.collectonly and not session.testsfailed:
        try:
            _session(session.config).build_all(items)
        except BuildError:
            pass  # nvcc is missing: each claim that needs it fails with the reason
        except AiperfError as error:
            raise pytest.UsageError(str(error)) from None


def _context(request: pytest.FixtureRequest) -> ItemContext:
    from .session.context import ItemContext

    stash: pytest.Stash = request.node.stash
    if CONTEXT not in stash:
        stash[CONTEXT] = ItemContext(request.node, _session(request.config))
    return stash[CONTEXT]


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """Describe this GPU: name, architecture, number of SMs, sizes of L2 cache and memory."""
    description = _context(request).device.gpu
    if description is None:
        pytest.skip("needs a GPU: run with --gpu")
    return description


@pytest.fixture
def nvcc(request: pytest.FixtureRequest) -> Nvcc:
    """Build a ``.cu`` file: ``nvcc("ch07/copy.cu")["vector"]`` is a launcher."""
    return _context(request).nvcc


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> Stopwatch:
    """Time one callable with CUDA events or, without a GPU, with the host clock."""
    from .session.fixtures import Stopwatch

    return Stopwatch(_context(request))


@pytest.fixture
def capture(request: pytest.FixtureRequest) -> Capture:
    """Profile one callable: ``capture(call, *args, tool="ncu").figures["duration"]``."""
    from .session.fixtures import Capture

    return Capture(_context(request))


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Compare:
    """State a claim: an optimized arm beats a baseline on the same work."""
    from .session.fixtures import Compare

    request.node.stash[COMPARE] = compare = Compare(_context(request))
    return compare


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    called = yield
    if COMPARE in pyfuncitem.stash and not pyfuncitem.stash[COMPARE].called:
        raise UsageError("the test requests compare but never calls it: it claims nothing")
    return called


def pytest_report_header(config: pytest.Config) -> list[str]:
    session = _measuring(config)
    if session is None:
        return ["aiperf: checking (--gpu measures on the GPU, --cpu measures the host claims)"]
    settings = session.settings
    where = ", ".join(f"{g.name} ({g.key}, driver {g.driver})" for g in session.gpus) or "this host"
    what = f"capturing with {settings.profile}" if settings.profile else "measuring"
    return [f"aiperf: {what} on {where}; seed {settings.seed}; run {settings.run_id}"]


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    raised = call.excinfo
    if raised is not None and isinstance(raised.value, AiperfError):
        # show only the message: a traceback through this package would not help the user
        failure = pytest.fail.Exception(str(raised.value), pytrace=False)
        call.excinfo = pytest.ExceptionInfo.from_exc_info((type(failure), failure, raised.tb))
    report = yield
    call.excinfo = raised
    if call.when == "call" and COMPARE in item.stash and item.stash[COMPARE].built_only:
        report.aiperf_built = True  # type: ignore[attr-defined]  # xdist transfers attributes
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if report.when == "call" and report.passed:
        if hasattr(report, "aiperf_built"):
            return "built", "b", "BUILT"
        figures = getattr(report, "aiperf", None)
        if figures and figures["verdict"] and figures["speedup"]:
            return "passed", ".", f"{figures['verdict']} {figures['speedup']:.3g}x"
    return None
