"""One test in the process that runs it: its GPUs, device, lock, kernels and record."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType

import pytest

from pytest_aiperf.build.nvcc import Nvcc
from pytest_aiperf.device.device import Device
from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import requirements
from pytest_aiperf.machine.distributed import TorchRankGroup
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.machine.requirements import REQUIREMENTS, run_id
from pytest_aiperf.model import Result
from pytest_aiperf.profilers import capture, target, tools
from pytest_aiperf.schema import to_json
from pytest_aiperf.sources import source_hash

from .config import Role
from .session import Session, on_cuda


class ItemContext:
    """The state that the fixtures of one test share; each part is created on first use."""

    def __init__(self, item: pytest.Item, session: Session) -> None:
        self.item = item
        self.session = session
        self.settings = session.settings
        self.requirements = item.stash[REQUIREMENTS]
        self.gpus = session.gpus_for(item)
        self._send = session.send
        if (job := self.settings.capture_job) is not None and session.role is Role.TARGET:
            self._send = target.sender(job)  # pauses the deadline of the process that profiles
        self.built_only = False  #: Whether the check built the kernels without running the arms.
        self.claimed: bool | None = None
        """Whether the test has called compare(); None if it does not request this fixture."""
        self.error: Exception | None = None  #: The exception that compare() raised.
        self.replaced: Callable[[], list[str]] = list
        """Returns the names of values that the arms refer to and that changed after compare()."""

    def claim_once(self) -> None:
        """Note that the test has called compare(); raise UsageError if it had before."""
        if self.claimed:
            raise UsageError("a test is one claim: call compare() once")
        self.claimed = True

    @property
    def device(self) -> Device:
        """The device that the tests of this process time on; CUDA is initialized here."""
        if self.session.opened is None:
            self.session.opened = self._open_device()
        return self.session.opened

    def _open_device(self) -> Device:
        ranks, index = None, 0
        if self.session.role is Role.RANK:
            ranks = TorchRankGroup("cuda" if on_cuda(self.gpus) else "cpu")
            index = int(os.environ["LOCAL_RANK"])
        gpu = self.gpus[index] if self.gpus else None
        with self.lock.shared():  # opening a device runs kernels, which disturb exclusive timings
            device = self.session.machine.open_device(gpu, ranks)
        self.lock.is_idle = device.is_idle
        return device

    @property
    def lock(self) -> GpuLock:
        """The lock of the tests' GPUs; waiting for it does not count towards the deadline."""
        if self.session.lock is None:
            self.session.lock = self._new_lock()
        return self.session.lock

    def _new_lock(self) -> GpuLock:
        folder = None
        if (job := self.settings.rank_job) is not None:
            # A rank locks files of its own: the process that started it holds the real locks.
            folder = Path(job.scratch, f"locks-{os.environ['RANK']}")
        return GpuLock(
            [gpu.uuid for gpu in self.gpus],
            folder,
            on_wait=self.wait_for,
            on_acquired=lambda: self.progress(self.session.phase),
            on_alone=self._note_alone,
            threads=self.settings.threads,
            # a claim that runs in pytest's own process, or as a rank, does not lead a session; and
            # ncu takes a profiled process that continues for one that has ended
            pausable=self.session.role is Role.CLAIM
            and os.getsid(0) == os.getpid()
            and self.settings.profile is None,
        )

    @cached_property
    def nvcc(self) -> Nvcc:
        """Builds the test's kernels, and loads them only if the test runs on a GPU."""
        session, item = self.session, self.item
        return Nvcc(session.roots(item), session.archs(item), session.include(), bool(self.gpus))

    def files(self) -> list[Path]:
        """List the claim's source files: test, kernels with headers, imported project modules.

        Modules that define the test's fixtures, such as a conftest.py, count as imported. A
        conftest.py without any fixture of the test is left out: it does not change the arms.
        """
        item, root = self.item, self.item.config.rootpath
        modules = dict.fromkeys([getattr(item, "module", None), *_fixture_modules(item)])
        imported = [path for module in modules for path in source_hash.files(module, root)]
        return [item.path, *self.nvcc.sources, *imported]

    def new_result(self) -> Result:
        return self.session.new_result(self.item)

    def progress(self, phase: str, **figures: object) -> None:
        """Report a phase for the progress line; the deadline keeps running."""
        self.session.phase = phase
        self._send("working", phase=phase, alone=self.session.alone, **figures)

    def _note_alone(self, what: str) -> None:
        self.session.alone = what
        self.progress(self.session.phase)

    def step(self) -> None:
        """Start the deadline anew."""
        self._send("step")

    def wait_for(self, phase: str) -> None:
        """Report a wait, which stops the deadline until the next :meth:`progress`."""
        self._send("waiting", phase=phase)

    def send_result(self, result: Result) -> None:
        self._send("result", result=to_json(result))

    def arguments(self, items: Sequence[pytest.Item]) -> list[str]:
        """Return pytest arguments that run only these tests, with the settings of this session."""
        item, settings, option = self.item, self.settings, self.item.config.option
        words = [f"{each.path}::{each.nodeid.partition('::')[2]}" for each in items]
        words += [f"--rootdir={settings.root}", "--capture=no"]
        words += [f"--aiperf-{kind}" for kind in sorted(settings.measure)]
        words += ["-c", str(item.config.inipath)] if item.config.inipath else []
        words += [word for name in option.plugins for word in ("-p", name)]
        words += [word for name in option.override_ini or () for word in ("-o", name)]
        words += ["-n0"] if item.config.pluginmanager.hasplugin("xdist") else []
        words += ["--aiperf-reproducible"] if "reproducible" in settings.conditions else []
        words += ["--aiperf-quick"] if settings.quick else []
        words += [f"--aiperf-ranks={self.requirements.count}"] if settings.ranks else []
        return words

    def capture_request(self, spec: str, calls: int, seed: int) -> capture.CaptureRequest:
        """Return the request to run this test under the profiler in ``spec`` (TOOL:PRESET)."""
        tool, preset = tools.parse(spec)
        settings = self.settings
        name = capture.folder_name(run_id(self.item.nodeid))
        folder = capture.run_folder(settings.artifacts, settings.run_id) / name
        command = (sys.executable, "-m", "pytest", *self.arguments([self.item]))
        return capture.CaptureRequest(
            tool, preset, folder, command, settings.deadline_s, calls, seed
        )


def _fixture_modules(item: pytest.Item) -> list[ModuleType]:
    """Return the modules that define the fixtures of a test."""
    functions = [definition.func for _, definition in requirements.fixture_definitions(item)]
    namespaces = {id(getattr(inspect.unwrap(f), "__globals__", None)) for f in functions}
    # several modules may be called "conftest": sys.modules has only one of them
    loaded = [*item.config.pluginmanager.get_plugins(), *sys.modules.values()]
    modules = {id(m): m for m in loaded if isinstance(m, ModuleType)}
    return [m for m in modules.values() if id(vars(m)) in namespaces]
