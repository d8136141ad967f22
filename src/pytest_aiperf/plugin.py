"""The pytest plugin: hooks, markers and fixtures. It imports little: all pytest runs load it."""

from __future__ import annotations

import copy
import os
import re
import shlex
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import pytest

from . import options
from .errors import AiperfError, BuildError, UsageError
from .machine import distributed, requirements
from .machine.requirements import KINDS, Kind
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
COLLECTED = pytest.StashKey[set[str]]()  #: Ids of all collected claims, selected or not.
SHORT_NAMES = pytest.StashKey[set[str]]()  #: Options that have a name without the prefix aiperf-.
LEFT_OUT = pytest.StashKey[int]()  #: Number of claims that this run's --gpu or --cpu leaves out.
PARTIAL = pytest.StashKey[set[str]]()  #: Folders, as in ids, that were not wholly collected.
ROOT: Final = Path(__file__).parent
NVIDIA_DEVICE: Final = Path("/dev/nvidiactl")  #: Exists on machines with NVIDIA's driver.
WORKERS_PER_GPU: Final = 8
"""Most xdist workers per GPU with ``-n auto``: one measures times while the others build and check.
"""


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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None]:
    option = early_config.option
    given = {word.partition("=")[0].replace("--aiperf-", "--") for word in args}
    # An xdist worker gets the options of the ini file from the controller, and not as arguments.
    given |= {f"--{name}" for name in options.MEASURING if _value(option, name)}
    # Must be set before a conftest imports torch: otherwise torch.cuda.is_available() in a test
    # module would initialize CUDA in this process, and the claims, its forks, could not use CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # A check calls arms on tensors of the CPU, also on a machine with a GPU, and Triton reads this
    # when it is imported. If tests that are not claims need Triton on the GPU, the ini file can
    # switch it off.
    if given.isdisjoint(f"--{name}" for name in options.MEASURING) and (
        early_config.getini("aiperf_interpret") or not NVIDIA_DEVICE.exists()
    ):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if "--reproducible" in given or option.aiperf_reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    early_config.stash[SHORT_NAMES] = options.add_short_names(parser, args)
    if "--profile" in given:
        final = parser.parse_known_args(args, namespace=copy.copy(option))
        if final.aiperf_profile and not (final.aiperf_gpu or final.aiperf_cpu):
            option.aiperf_gpu = not final.aiperf_profile.startswith("perf")
            option.aiperf_cpu = True  # a tool for the GPU skips host claims, and says which to try


def pytest_configure(config: pytest.Config) -> None:
    _add_markers(config)
    measure = _measure(config)
    if config.option.aiperf_cold_start and not hasattr(config, "workerinput"):
        from .machine.cache_folder import empty_build_caches

        scope = ExitStack()
        scope.enter_context(empty_build_caches())
        config.add_cleanup(scope.close)
    if not measure and distributed.VARIABLE not in os.environ:
        return  # a session that only checks is opened by its first claim
    try:
        if (folder := config.option.aiperf_report) and not hasattr(config, "workerinput"):
            from .records.results import writing

            with writing(Path(folder)):  # an error before measuring, not after it
                Path(folder).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        session = _session(config, measure)
        if measure:
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
        "gpu(count=1, min_sm=None, memory=None, shared_memory=0, cpu=None, features=()): needs "
        "`count` GPUs with at least this compute capability (90 for sm90), bytes of memory, bytes "
        "of shared memory per thread block, and hardware features, such as "
        'features=("tma", "fp8"). A multi-GPU claim runs in one process per GPU. Without --gpu, '
        "claims for several GPUs are checked on the CPU unless cpu=False, and claims for one GPU "
        "only if cpu=True",
    )
    config.addinivalue_line("markers", "host: a host claim, measured by --cpu")


def _measure(config: pytest.Config) -> frozenset[Kind]:
    """Return which claims are measured; none in a session that only checks."""
    option = config.option
    if option.aiperf_profile and option.aiperf_update_expectations:
        raise pytest.UsageError(
            "--profile measures no times that could be accepted: drop --update-expectations"
        )
    if kinds := frozenset(kind for kind in KINDS if _value(option, kind)):
        return kinds
    if option.aiperf_update_expectations:
        gpus = config.hook.pytest_aiperf_machine(config=config).gpus()
        return frozenset(KINDS if gpus else ("cpu",))
    for name in ("quick", "budget", "shard", "report", "telemetry"):
        if _value(option, name):
            word = "--aiperf-report" if name == "report" else f"--{name}"
            raise pytest.UsageError(f"{word} only affects measuring: add --gpu or --cpu")
    return frozenset()


def _value(option: Any, name: str) -> Any:
    return getattr(option, f"aiperf_{name}".replace("-", "_"))


def _session(config: pytest.Config, measure: frozenset[Kind] = frozenset()) -> Session:
    """Return the session of this process; open it if this is the first call."""
    if SESSION not in config.stash:
        from .session.session import open_session

        machine = config.hook.pytest_aiperf_machine(config=config)
        config.stash[SESSION] = open_session(config, machine, measure)
    return config.stash[SESSION]


def _measuring(config: pytest.Config) -> Session | None:
    """Return the session if it measures or profiles, None if it only checks."""
    session = config.stash.get(SESSION, None)
    return session if session is not None and session.settings.measure else None


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Use several workers per GPU, at most one per core: they build at the same time."""
    if not (config.option.aiperf_gpu or config.option.aiperf_update_expectations):
        return None
    try:
        gpus = config.hook.pytest_aiperf_machine(config=config).gpus()
    except AiperfError as error:
        raise pytest.UsageError(str(error)) from None
    return max(1, min(len(os.sched_getaffinity(0)), WORKERS_PER_GPU * len(gpus)))


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With --ranks, make one item of a multi-GPU claim for each number of ranks."""
    counts = metafunc.config.option.aiperf_ranks
    if counts and requirements.is_claim(metafunc.definition):
        try:
            usual = requirements.requirements_of(metafunc.definition.iter_markers())
        except UsageError:
            return  # raised again, with the nodeid, when all items are collected
        if usual.in_ranks:
            metafunc.fixturenames.append(requirements.RANKS)
            params = [requirements.ranks_param(count, usual.count) for count in counts]
            metafunc.parametrize(requirements.RANKS, params)


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
        folders = collector.config.stash.setdefault(PARTIAL, set())
        folders.add(requirements.claim_id(report.nodeid).partition("/")[0])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_ignore_collect(
    collection_path: Path, config: pytest.Config
) -> Generator[None, bool | None, bool | None]:
    is_ignored = yield
    if is_ignored:  # a conftest.py may leave out files whose packages are not installed
        folder = collection_path.name
        if collection_path.suffix == ".py":
            file = os.path.relpath(collection_path, config.rootpath)
            folder = requirements.claim_id(f"{file}::").partition("/")[0]
        config.stash.setdefault(PARTIAL, set()).add(folder)
    return is_ignored


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        _prepare(config, items)
    except (AiperfError, pytest.PytestWarning) as error:  # a warning is raised with -W error
        if not hasattr(config, "workerinput"):
            raise pytest.UsageError(str(error)) from None
        items.clear()  # xdist loses a worker's exception, but shows a failed collection
        report = pytest.CollectReport("pytest-aiperf", "failed", str(error), [])
        config.hook.pytest_collectreport(report=report)


def _prepare(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check the collected items, select those of this session and order them."""
    session = _measuring(config)
    for item in items:
        item.stash[requirements.REQUIREMENTS] = requirements.of_item(item)
    path = config.rootpath / str(config.getini("aiperf_expectations"))
    if path.exists():
        from .records import expectations

        known = config.stash.get(COLLECTED, set())
        expectations.check(path, known, partial(_is_complete, config))
    if session is not None:
        _select(session, config, items)
        if hasattr(config.hook, "pytest_timeout_set_timer"):
            # pytest-timeout would end the process that waits for a claim, and count its waiting
            for item in items:
                item.add_marker(pytest.mark.timeout(0), append=False)
    claims = requirements.claims_of(items)
    if shared := requirements.duplicates(claims):
        claim, first, second = shared[0]
        problem = f"two claims are called {claim}: {first} and {second}; rename one"
        if session is not None:  # records and expectations would not tell them apart
            raise UsageError(problem)
        item = next(item for item in items if item.nodeid == second)
        item.warn(pytest.PytestWarning(f"{problem} before you measure them"))
    if session is not None:
        # A run without claims leaves no results; but a shard does, because its results are merged.
        if session.run is not None and (claims or session.settings.shard):
            command = shlex.join(map(str, config.invocation_params.args))
            # in file order, like the results shown
            session.run.write_manifest(claims, command, options.settings(config))
        items[:] = session.in_order(items)


def _is_complete(config: pytest.Config, folder: str) -> bool:
    """Whether all claims with this folder in their ids were collected; -k and -m select later."""
    option = config.option
    if option.ignore or option.ignore_glob or folder in config.stash.get(PARTIAL, ()):
        return False
    if getattr(option, "lf", False):  # --last-failed leaves whole files out
        return False
    root, here = config.rootpath, config.invocation_params.dir
    tests = [p.resolve() for name in config.getini("testpaths") for p in root.glob(name)] or [root]
    named = [Path(here, argument).resolve() for argument in config.args]
    if all(any(path.is_relative_to(top) for top in named) for path in tests):
        return True
    skipped = config.getini("norecursedirs")
    collected = _folders(named, folder, skipped)
    # two folders may have the same name, and so the same part of an id
    return bool(collected) and _folders(tests, folder, skipped) <= collected


def _folders(tops: Iterable[Path], name: str, skipped: Sequence[str]) -> set[Path]:
    """Find the folders called ``name`` in ``tops``, without those that pytest does not enter."""
    found = set()
    for top in tops:
        for path, names, _ in os.walk(top):
            names[:] = [n for n in names if not any(fnmatch(n, pattern) for pattern in skipped)]
            if Path(path).name == name:
                found.add(Path(path))
    return found


def _select(session: Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that measure nothing or are in another shard; skip those that cannot run."""
    selected, deselected = [], []
    for item in items:
        required = item.stash[requirements.REQUIREMENTS]
        kind = "cpu" if required.host else "gpu"
        if not (kind in session.settings.measure and requirements.fixtures_of(item)):
            deselected.append(item)
            continue
        selected.append(item)
        if reason := session.skip_reason(item):
            item.add_marker(pytest.mark.skip(reason=reason))
    config.stash[LEFT_OUT] = sum(map(requirements.is_claim, deselected))
    if not selected and config.stash[LEFT_OUT]:
        is_host = "cpu" in session.settings.measure
        raise UsageError(
            "--cpu measures host claims, and no selected claim is marked @pytest.mark.host: mark "
            "those whose optimization runs on the host, or use --gpu"
            if is_host
            else "--gpu measures GPU claims, and all selected ones are host claims "
            "(@pytest.mark.host): use --cpu"
        )
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

    context = _context(request)
    context.claimed, context.error = False, None  # the tests of a ladder run twice
    return Compare(context)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    called: object = None
    error: BaseException | None = None
    try:
        called = yield
    except pytest.skip.Exception as skip:
        error = skip
    context = pyfuncitem.stash.get(CONTEXT, None)
    if context is not None:
        if context.claimed is False and error is None:
            path, line, _ = pyfuncitem.reportinfo()
            error = UsageError(
                "the test requests compare but never calls it: it claims nothing; call "
                "compare(...), or leave the fixture out of its parameters"
                f"\n{os.path.relpath(path)}:{(line or 0) + 1}"
            )
        error = context.error or error  # a test that catches it, or skips, fails nevertheless
    if error is not None:
        raise error
    return called


def _without_our_frames(raised: pytest.ExceptionInfo[Any]) -> pytest.ExceptionInfo[Any]:
    """Leave out this package's frames, which do not help a user; show its errors as a sentence."""
    frames = [raised.tb]
    while (inner := frames[-1].tb_next) is not None:
        frames.append(inner)
    files = [Path(frame.tb_frame.f_code.co_filename) for frame in frames]
    # the hooks in this file are outside the test, the rest of the package is called by it
    ours = [i for i, file in enumerate(files) if ROOT in file.parents and file != Path(__file__)]
    kept = frames if not ours else [*frames[: ours[0]], *frames[ours[-1] + 1 :]]
    value = raised.value
    wrong_call, striptext = _wrong_call(value) or _wrong_field(value), ""
    if isinstance(value, TypeError) and str(value).startswith("Bench.size() "):
        wrong_call = (
            "bench.size() takes the size to measure at and, by name, the size for checking results:"
            " bench.size(2**26, check=1000)"
        )
    if wrong_call or isinstance(value, AiperfError):
        # a wrong call fails where it is written, other errors below the user's call
        caller = frames[-1 if wrong_call or not ours else ours[0] - 1]
        called_by = str(caller.tb_frame.f_globals.get("__name__")).partition(".")[0]
        place = f"\n{os.path.relpath(files[frames.index(caller)])}:{caller.tb_lineno}"
        is_users = called_by not in ("_pytest", "pluggy", __name__.partition(".")[0])
        value = pytest.fail.Exception(
            f"{wrong_call or value}{place if is_users else ''}", pytrace=False
        )
        striptext = "Failed: "  # the name of that exception, which pytest shows before the message
    elif not ours:
        return raised
    chain: TracebackType | None = None
    for frame in reversed(kept):
        chain = TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    assert chain is not None
    # pytest has no public function that shows an exception without its name
    return pytest.ExceptionInfo((type(value), value, chain), striptext, _ispytest=True)


def _wrong_call(error: BaseException) -> str | None:
    """Return a message for arguments that compare() does not take; None for other errors."""
    if not isinstance(error, TypeError):
        return None
    _, is_compare, problem = str(error).partition("Compare.__call__() ")
    if not is_compare:
        return None
    if problem.startswith("missing"):
        from .claim.claim import MEANINGS

        missing = re.findall(r"'(\w+)'", problem)
        needs = " and ".join(f"{name}=, {MEANINGS[name]}" for name in missing)
        return f"compare() needs {needs}"
    if "positional" in problem:
        return "compare() takes its arguments by name: compare(baseline=..., optimized=..., ...)"
    wrong = re.match(r"got an unexpected keyword argument '(\w+)'", problem)
    if wrong is None:
        return None
    from .session.fixtures import Compare
    from .text import nearest

    near = nearest(wrong[1], Compare.__call__.__annotations__)
    return f"compare() has no keyword {wrong[1]!r}{near}"


def _wrong_field(error: BaseException) -> str | None:
    """Return a message for a field that Work() does not have; None for other errors."""
    wrong = re.match(r"Work\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if wrong is None or not isinstance(error, TypeError):
        return None
    from .model import Work
    from .text import nearest

    return f"Work() has no field {wrong[1]!r}{nearest(wrong[1], Work.__annotations__)}"


def pytest_report_header(config: pytest.Config) -> list[str]:
    session = _measuring(config)
    if session is None:
        short = config.stash.get(SHORT_NAMES, set())
        gpu, cpu = (n if n in short else f"--aiperf-{n[2:]}" for n in ("--gpu", "--cpu"))
        others = f"{gpu} measures on the GPU, {cpu} measures the host claims"
        lines = [f"aiperf: checking on the CPU ({others})"]
        if os.environ.get("TRITON_INTERPRET") == "1" and NVIDIA_DEVICE.exists():
            where = "in its interpreter (on the GPU with aiperf_interpret = false)"
            lines.append(f"aiperf: Triton runs {where}")
        return lines
    settings = session.settings
    where = ", ".join(f"{g.name} ({g.key}, driver {g.driver})" for g in session.gpus) or "this host"
    if settings.update and not session.gpus and not config.option.aiperf_cpu:
        where += " (no GPU: host claims only)"
    what = f"capturing with {settings.profile}" if settings.profile else "measuring"
    unchecked = "".join(f" (not checked: {part})" for part in session.unchecked)
    under = "".join(f", --{name}" for name in settings.conditions)
    seed = f"seed {settings.seed}; run {settings.run_id}"
    return [f"aiperf: {what} on {where}{under}{unchecked}; {seed}"]


def pytest_report_collectionfinish(config: pytest.Config) -> str | list[str]:
    session, count = _measuring(config), config.stash.get(LEFT_OUT, 0)
    if session is None or not count:
        return []
    claims, are = ("1 claim", "is") if count == 1 else (f"{count} claims", "are")
    marked, other = ("without", "--gpu") if "cpu" in session.settings.measure else ("with", "--cpu")
    return f"aiperf: {claims} {marked} @pytest.mark.host {are} left out: add {other}"


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    raised = call.excinfo
    if raised is not None and not item.config.option.fulltrace:
        call.excinfo = _without_our_frames(raised)
    report = yield
    call.excinfo = raised
    if call.when == "call" and CONTEXT in item.stash and item.stash[CONTEXT].built_only:
        report.aiperf_built = True  # type: ignore[attr-defined]  # xdist transfers attributes
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if built := len(terminalreporter.stats.get("built", ())):
        which = "1 claim" if built == 1 else f"{built} claims"
        gpu = "--gpu" if "--gpu" in config.stash.get(SHORT_NAMES, set()) else "--aiperf-gpu"
        terminalreporter.write_line(
            f"aiperf: the kernels of {which} were compiled, but not run: `pytest {gpu}` runs them "
            "and compares what they compute"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if report.when == "call" and report.passed:
        if hasattr(report, "aiperf_built"):
            return "built", "b", "BUILT"
        figures = getattr(report, "aiperf", None)
        if figures and figures["verdict"] and figures["speedup"]:
            return "passed", ".", f"{figures['verdict']} {figures['speedup']:.3g}x"
    return None
