"""The hooks of a pytest run that measures: each item in a process of its own, and its record."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import pytest

# Public pytest has no way to run one item's three phases; xdist and rerunfailures use this one too.
from _pytest.runner import runtestprotocol

from pytest_aiperf.errors import AiperfError
from pytest_aiperf.machine import isolation, requirements
from pytest_aiperf.model import Outcome, Result
from pytest_aiperf.records import results
from pytest_aiperf.report import terminal
from pytest_aiperf.rules import stats
from pytest_aiperf.schema import from_json, to_json

from .session import LOST, NOT_RUN, Session, on_cuda

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

Reports = list[pytest.TestReport]

KEPT: Final = 100_000
"""Characters that are kept of all that a claim prints in a phase on one stream: the last ones."""


class Measuring:
    """A pytest plugin that is registered only where there is something to measure."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.settings = session.settings
        if self.settings.is_worker:
            # killed, not asked: an exception in the midst of xdist's locks would leave it waiting
            # for ever, and a claim's keeper sees to it that nothing of the claim is left
            isolation.arm_parent_death()
            session.register_worker(os.getpid())
            # each claim that compiles would start a pool of compilers, beside others' host timings
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        signal.signal(signal.SIGTERM, _terminated)

    # workers

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        settings = self.settings
        node.workerinput["aiperf"] = {
            "run_id": settings.run_id,
            "seed": settings.seed,
            "started": settings.started,
        }
        if self.session.live is not None:
            self.session.live.listen()

    # items

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        _warm_up(session.items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        spent = self.session.budget_exhausted()
        if spent:
            item.add_marker(pytest.mark.skip(reason=spent), append=False)
        reports, result = self._run(item, nextitem)
        if result is not None:
            # xdist carries the record to the controller on the report that says the outcome
            said = next((r for r in reports if r.when == "call"), reports[0])
            said.aiperf = to_json(result)  # type: ignore[attr-defined]  # reports take more
            try:
                self.session.record(result)
            except AiperfError as why:
                reports = [_failed(item, str(why))]
                item.session.shouldstop = str(why)  # what comes now would be lost as well
        for done in reports:
            hook.pytest_runtest_logreport(report=done)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> tuple[Reports, Result | None]:
        """Run one item; a verdict that does not hold its claim is confirmed in a fresh process."""
        once = self.settings.quick or self.settings.debug or any(item.iter_markers("skip"))
        for self.session.attempt in (1,) if once else (1, 2):
            if self.settings.debug or any(item.iter_markers("skip")):
                reports, said = self._run_here(item, nextitem)
            else:
                reports, said = self._run_apart(item)
            result = self._outcome(item, reports, said) if requirements.is_claim(item) else None
            if result is None or result.outcome is not Outcome.FAILED or result.verdict is None:
                break
        return reports, result

    def _run_here(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> tuple[Reports, Result | None]:
        """Run an item in this process: it is going to be skipped, or somebody debugs it."""
        said: list[Any] = []
        self.session.send = lambda kind, **payload: (
            said.append(payload["result"]) if kind == "result" else None
        )
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        return reports, from_json(Result, said[-1]) if said else None

    def _run_apart(self, item: pytest.Item) -> tuple[Reports, Result | None]:
        config, live = item.config, self.session.live
        claim = requirements.claim_id(item.nodeid)
        reports: Reports = []
        said: list[Result] = []

        def heard(message: isolation.Message) -> None:
            if message["kind"] == "report":
                data = message["data"]
                made = config.hook.pytest_report_from_serializable(config=config, data=data)
                if isinstance(made.longrepr, list):  # a skip's place and reason, as JSON has them
                    made.longrepr = tuple(made.longrepr)
                reports.append(made)
            elif message["kind"] == "result":
                said.append(from_json(Result, message["result"]))
            elif live is not None:
                live.show({**message, "claim": claim})

        ended = isolation.supervise(
            lambda channel: self._inside(item, channel),
            deadline=self.settings.deadline,
            on_message=heard,
        )
        if not reports or reports[-1].when != "teardown":
            crash = next((m["text"] for m in ended.messages if m["kind"] == "crash"), "")
            why = f"{isolation.describe(ended)}\n{crash}".strip()
            lost = _failed(item, why, ended.seconds, _output(config))
            reports = [r for r in reports if r.when == "setup"] + [lost]
        return reports, said[-1] if said else None

    def _inside(self, item: pytest.Item, channel: isolation.Channel) -> None:
        """Run the item's three phases; this is the claim's process."""
        gpus = self.session.gpus_for(item)
        if on_cuda(gpus):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(g.uuid for g in gpus)
        self.session.send = channel.send
        gc.freeze()  # what the pytest process has made is nothing that a claim could drop
        for done in runtestprotocol(item, log=False, nextitem=None):
            # a verdict is not lost because what was printed beside it is too long for the channel
            done.sections = [(name, _end(text)) for name, text in done.sections]
            hook = item.config.hook
            data = hook.pytest_report_to_serializable(config=item.config, report=done)
            channel.send("report", data=data)

    def _outcome(
        self, item: pytest.Item, reports: Sequence[pytest.TestReport], result: Result | None
    ) -> Result:
        """Let the record say what the reports say: a claim has exactly one outcome."""
        result = result or self.session.new_result(item)
        failed = next((r for r in reports if r.failed), None)
        # pytest reports an expected failure as skipped, too; its record stays what it is
        skipped = next((r for r in reports if r.skipped and not hasattr(r, "wasxfail")), None)
        if failed is not None and result.outcome in (Outcome.PASSED, Outcome.ERROR):
            crash = getattr(failed.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else failed.longreprtext
            why = result.message if result.outcome is Outcome.ERROR and result.message else said
            return replace(result, outcome=Outcome.ERROR, message=why.strip()[:2000])
        if skipped is not None:
            where = skipped.longrepr
            why = (where[2] if isinstance(where, tuple) else str(where)).removeprefix("Skipped: ")
            outcome = Outcome.NOT_RUN if why.startswith(NOT_RUN) else Outcome.SKIPPED
            return replace(result, outcome=outcome, message=why.removeprefix(NOT_RUN))
        return result

    # what is said

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self) -> None:
        if self.session.live is not None:
            self.session.live.clear()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Iterator[None]:
        run = self.session.run
        if self.settings.is_worker:
            self.session.register_worker(None)
        elif run is not None and run.collected:
            self._finish(session, exitstatus)
        return (yield)  # pytest-benchmark's own finish comes after: its files hold our claims

    def _finish(self, session: pytest.Session, exitstatus: int) -> None:
        ours = self.session
        code = pytest.ExitCode
        ended = (code.OK, code.TESTS_FAILED, code.NO_TESTS_COLLECTED)
        # a second Ctrl-C may come before pytest has made a status of the first: it is in flight
        in_flight = sys.exception() is not None
        interrupted = in_flight or exitstatus not in ended or bool(session.shouldstop)
        try:
            ours.finish(interrupted=interrupted, stopped=bool(session.shouldfail))
        except (AiperfError, OSError, ValueError) as why:
            ours.closing.append(f"ERROR: {why}")
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            return
        if folder := session.config.option.aiperf_report:
            from pytest_aiperf.report.page import write_report  # late: with Jinja2

            machine = results.machine_info(ours.gpus)
            written = write_report(list(ours.results.values()), machine, Path(folder))
            ours.closing.append(f"report: {written}")
        plugin = session.config.pluginmanager.get_plugin("pytest-benchmark")
        terminal.benchmark_session_add(plugin, list(ours.results.values()))
        lost = any(r.message == LOST for r in ours.results.values())
        if lost and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        machine_info["gpus"] = results.machine_info(self.session.gpus)["gpus"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        ours = self.session
        width = shutil.get_terminal_size((140, 24)).columns
        if ours.results:
            terminalreporter.write_sep("=", "claims")
            verbose = terminalreporter.verbosity > 0
            for line in terminal.table(list(ours.results.values()), width, verbose=verbose):
                terminalreporter.write_line(line)
            for line in terminal.profiles(list(ours.results.values()), width):
                terminalreporter.write_line(line)
        if ours.closing:
            terminalreporter.write_sep("=", "records")
            for line in ours.closing:
                terminalreporter.write_line(line)


def _warm_up(items: Sequence[pytest.Item]) -> None:
    """Import once, here, what every claim's process would import for itself."""
    import_module(".fixtures", __package__)
    stats.t_quantile(0.995, 7)  # scipy
    if any("torch.compile(" in file.read_text() for file in {item.path for item in items}):
        import_module("torch._dynamo")  # seconds, for each claim that compiles


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    # as Ctrl-C: after any other code pytest prints no summary, and xdist takes it for a bug
    pytest.exit("SIGTERM: finished results are kept", returncode=pytest.ExitCode.INTERRUPTED)


def _failed(
    item: pytest.Item, why: str, seconds: float = 0.0, output: Sequence[tuple[str, str]] = ()
) -> pytest.TestReport:
    return pytest.TestReport(
        item.nodeid, item.location, {}, "failed", why, "call", list(output), seconds
    )


def _output(config: pytest.Config) -> list[tuple[str, str]]:
    """Take what a lost process had printed from pytest's capture."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        return []
    texts = zip(("stdout", "stderr"), capture.read_global_capture(), strict=True)
    return [(f"Captured {n} of the lost process", _end(t)) for n, t in texts if t]


def _end(text: str) -> str:
    before = len(text) - KEPT
    return text if before <= 0 else f"[{before} characters before this left out]\n{text[before:]}"
