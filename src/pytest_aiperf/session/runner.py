"""The hooks of a pytest run that measures: one process per item, one record per claim."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import pytest

# pytest has no public function that runs the three phases of one item.
from _pytest.runner import runtestprotocol

from pytest_aiperf.errors import AiperfError, says_out_of_memory
from pytest_aiperf.machine import gpu_memory, isolation, requirements
from pytest_aiperf.machine.file_lock import locked
from pytest_aiperf.machine.gpu_lock import continue_paused
from pytest_aiperf.model import Gpu, Outcome, Result
from pytest_aiperf.records import journal, results
from pytest_aiperf.records.consistency import contradiction
from pytest_aiperf.report import terminal
from pytest_aiperf.rules import stats
from pytest_aiperf.rules.verdict import noise_problem
from pytest_aiperf.schema import from_json, to_json

from . import SESSION
from .config import Role
from .context import ItemContext
from .ladder import LadderRun, Reports, ladders
from .modes import measure_together
from .session import LOST, NOT_RUN, Session, on_cuda

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


@dataclass(slots=True)
class Measured:
    """The reports of an item that was run, and its record if it is a claim."""

    reports: Reports
    result: Result | None = None  #: The claim's record; None if the item is not a claim.

    @property
    def is_complete(self) -> bool:
        """Whether the item ran to its end."""
        return bool(self.reports) and self.reports[-1].when == "teardown"

    @property
    def is_not_met(self) -> bool:
        """Whether the item is a valid claim that is not met."""
        result = self.result
        return (
            result is not None and result.outcome is Outcome.FAILED and result.verdict is not None
        )

    @property
    def lacked_memory(self) -> bool:
        """Whether the claim ran out of GPU memory, which other claims may have used."""
        return bool(self._about_memory)

    @property
    def needs_another(self) -> bool:
        """Whether a second attempt may have another outcome."""
        return self.is_not_met or self.lacked_memory

    @property
    def why_another(self) -> str:
        """Why there is a second attempt, in a line; empty if there is none."""
        if self.result is not None and self.is_not_met:
            return self.result.message.partition("\n")[0]
        return self._about_memory

    @property
    def _about_memory(self) -> str:
        """The message or note about missing GPU memory; empty if there is none."""
        result = self.result
        if result is None:
            return ""
        texts = [*result.notes, result.message if result.outcome is Outcome.ERROR else ""]
        return next(filter(says_out_of_memory, texts), "")

    def note(self, text: str) -> None:
        """Add a note to the claim's record."""
        if self.result is not None:
            self.result = replace(self.result, notes=(*self.result.notes, text))


FAILURES: Final = (Outcome.FAILED, Outcome.INVALID, Outcome.ERROR)
"""Outcomes of claims that make a run fail."""
KEPT_CHARACTERS: Final = 100_000
"""Number of characters that a report keeps from the end of each output stream; many megabytes would
not fit through the channel of the claim's process."""


def register(config: pytest.Config, session: Session) -> None:
    """Register the hooks of a run that measures, on its controller, its workers and its ranks."""
    if "TORCH_TRACE" not in os.environ and hasattr(config.option, "logger_disable"):
        # torch logs each compilation in hundreds of lines, which pytest would show with a failure
        config.option.logger_disable = [*config.option.logger_disable, "torch.__trace"]
    if getattr(config.option, "maxschedchunk", 1) is None:
        config.option.maxschedchunk = 1  # xdist's default, larger chunks, suits only short tests
    if session.role in (Role.CONTROLLER, Role.WORKER):
        config.pluginmanager.register(Runner(session), "aiperf-runner")
    elif session.settings.rank_job and len(session.settings.rank_job.records) > 1:
        config.pluginmanager.register(RankLoop(), "aiperf-rank-loop")


class RankLoop:
    """The pytest plugin that runs a ladder's rungs in a rank."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        def log(item: pytest.Item, reports: Reports) -> None:
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)

        aiperf = session.config.stash[SESSION]
        aiperf.ladder = LadderRun()
        aiperf.ladder.run(session.items, measure_together, log)
        return True


class Runner:
    """The pytest plugin that runs items on the controller and the workers of a measuring run."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.settings = session.settings
        self.ladders: dict[str, list[pytest.Item]] = {}  # the rungs of each rung's ladder
        self.terminal: Any = None  # None on an xdist worker
        self.phases = session.run.phases(self.settings.worker) if session.run else None
        self.noise_shown = False
        self.waited: set[str] = set()  #: Claims whose wait was printed.
        self.expected: set[str] = set()  # nodeids of claims that failed as expected (xfail)
        if session.role is Role.WORKER:
            # Linux kills this worker when the controller ends. An exception in the worker instead
            # could leave xdist's locks held for ever. The supervisor of a claim that is running
            # then ends the claim's processes.
            isolation.arm_parent_death()
            session.register_worker(os.getpid())
            # Parallel compilation in one claim would disturb the host timings of other claims.
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        signal.signal(signal.SIGTERM, _exit_on_sigterm)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        shared = ("run_id", "seed", "started")
        node.workerinput["aiperf"] = {name: getattr(self.settings, name) for name in shared}
        if self.session.live is not None:
            self.session.live.listen()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        if self.session.live is not None:
            self.session.live.begin(len(ids))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        traces = any(on_cuda(self.session.gpus_for(item)) for item in session.items)
        _import_ahead(session.items, traces=traces)
        if self.session.live is not None and session.items:  # none on an xdist controller
            self.session.live.begin(len(session.items))
        # pdb needs each test in this process, and a profiler runs one arm at a time
        together = not (self.settings.debug or self.settings.profile)
        for rungs in ladders(session.items).values() if together else ():
            self.ladders |= {item.nodeid: rungs for item in rungs}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            measured = self._outcome(item, nextitem)
            reports, result = measured.reports, measured.result
        except AiperfError as error:
            reports, result = [_failed_report(item, str(error))], None
            item.session.shouldstop = str(error)  # further results could not be written either
        if result is not None:
            report = next((r for r in reports if r.when == "call"), reports[0])
            # pytest's status line shows these; xdist sends them to the controller with the report.
            speedup, verdict = result.speedup, result.verdict and result.verdict.value
            report.aiperf = {  # type: ignore[attr-defined]
                "verdict": verdict,
                "speedup": speedup and speedup.value,
                "noise": noise_problem(result.floor),
            }
            properties: list[tuple[str, object]] = [("verdict", verdict)] if verdict else []
            if speedup:
                interval = f"[{speedup.low:.3f}, {speedup.high:.3f}]"
                properties += [("ratio", speedup.value), ("interval", interval)]
            for each in reports:
                each.user_properties += properties  # for other tools, such as JUnit's file
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _outcome(self, item: pytest.Item, nextitem: pytest.Item | None) -> Measured:
        """Measure an item, or read what was measured with another rung of its ladder."""
        if item.nodeid in self.ladders and (measured := self._from_ladder(item)):
            return measured
        if exhausted := self.session.budget_exhausted():
            item.add_marker(pytest.mark.skip(reason=exhausted), append=False)
        measured = self._run(item, nextitem)
        if measured.result is not None:
            self.session.record(measured.result)
        return measured

    def _from_ladder(self, item: pytest.Item) -> Measured | None:
        """Return a rung's part of its ladder; measure the ladder if no worker has done so.

        Return None if the session's time budget is spent.
        """
        rungs, run = self.ladders[item.nodeid], self.session.run
        assert run is not None
        name = f"{requirements.ladder_id(item)}:{rungs[0].nodeid}"
        file = run.path / "ladders" / hashlib.sha256(name.encode()).hexdigest()[:16]
        lock = file.with_suffix(".lock")
        with results.writing(lock):
            lock.parent.mkdir(exist_ok=True)
            lock.touch()
        config, hook = item.config, item.config.hook
        with locked(lock):
            if not file.exists():
                if self.session.budget_exhausted():
                    return None
                content = {}
                for rung, measured in zip(rungs, self._run_ladder(rungs), strict=True):
                    assert measured.result is not None
                    self.session.record(measured.result)
                    reports = [
                        hook.pytest_report_to_serializable(config=config, report=report)
                        for report in measured.reports
                    ]
                    content[rung.nodeid] = [reports, to_json(measured.result)]
                results.atomic_write(file, json.dumps(content))
            reports, result = json.loads(file.read_text())[item.nodeid]
        return Measured([_report(config, data) for data in reports], from_json(Result, result))

    def _run_ladder(self, rungs: Sequence[pytest.Item]) -> list[Measured]:
        """Measure a ladder. If a claim is not met or lacked memory, measure the ladder once more.

        The second measurement counts for all rungs if it has no other failures; otherwise only for
        the rungs that had failed.
        """
        first = self._attempt(rungs, 1, ())
        failed = [measured.needs_another for measured in first]
        if self.settings.quick or not any(failed):
            return first
        second = self._attempt(rungs, 2, first)
        worse = any(
            m.needs_another and not before for m, before in zip(second, failed, strict=True)
        )
        why = next(m.why_another for m in first if m.needs_another)
        for a, b in zip(first, second, strict=True):
            b.note(
                f"second attempt; the first{'' if a.why_another else ' of another rung'}: "
                f"{a.why_another or why}"
            )
        rows = zip(first, second, failed, strict=True)
        return [b if before or not worse else a for a, b, before in rows]

    def _attempt(
        self, rungs: Sequence[pytest.Item], attempt: int, before: Sequence[Measured]
    ) -> list[Measured]:
        """Measure a ladder in one process; measure rungs lost with it in a process each."""
        self.session.attempt = attempt
        self.session.needs_all_memory = any(measured.lacked_memory for measured in before)
        together, reason = self._run_apart(rungs)
        measured = []
        for rung in rungs:
            ended = together[rung.nodeid]
            if not ended.is_complete:
                ended = self._run_apart([rung])[0][rung.nodeid]
                ended.note(f"measured by itself, because the process of its ladder {reason}")
            self._conclude(rung, ended)
            measured.append(ended)
        return measured

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> Measured:
        """Run one item. If its claim is not met or lacked memory, run it once more.

        The second attempt counts.
        """
        here = self.settings.debug or any(item.iter_markers("skip"))
        measured = Measured([])
        for attempt in (1,) if here or self.settings.quick else (1, 2):
            self.session.attempt, why = attempt, measured.why_another
            self.session.needs_all_memory = measured.lacked_memory
            measured = (
                self._run_here(item, nextitem) if here else self._run_apart([item])[0][item.nodeid]
            )
            if requirements.is_claim(item):
                self._conclude(item, measured)
            if not measured.needs_another:
                break
        if attempt > 1:
            measured.note(f"second attempt; the first: {why}")
        return measured

    def _run_here(self, item: pytest.Item, nextitem: pytest.Item | None) -> Measured:
        """Run an item in this process, because it is skipped or a debugger is used."""
        received: list[Result] = []

        def send(kind: str, **fields: Any) -> None:
            if kind == "result":
                received.append(self._consistent(item, fields["result"]))

        stash = item.config.stash
        stash[SESSION] = replace(self.session, role=Role.CLAIM, send=send)
        try:
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        finally:
            stash[SESSION] = self.session
        return Measured(reports, received[0] if received else None)

    def _run_apart(self, items: Sequence[pytest.Item]) -> tuple[dict[str, Measured], str]:
        """Run items in a separate process with a deadline; return them and how the process ended.

        If the process loses its only item, the item gets a report of the loss.
        """
        config, live = items[0].config, self.session.live
        claim = requirements.run_id(items[0].nodeid)
        if len(items) > 1:
            claim = requirements.ladder_id(items[0])
        measured = {item.nodeid: Measured([]) for item in items}

        def receive(message: isolation.Message) -> None:
            if message["kind"] == "report":
                report = _report(config, message["data"])
                measured[report.nodeid].reports.append(report)
            elif message["kind"] == "result":
                nodeid = message["result"]["nodeid"]
                item = next(item for item in items if item.nodeid == nodeid)
                result = self._consistent(item, message["result"])
                # each rung has an equal part of the time, as in measure_ladder()
                worked_s = result.seconds - message["stopped_s"] / len(items)
                result = replace(result, seconds=max(0.0, worked_s))
                # the first record counts: a test is one claim
                measured[nodeid].result = measured[nodeid].result or result
            elif live is not None:
                live.show({**message, "claim": claim})
                self._show_wait(claim, message)
                alone = str(message.get("alone", ""))
                self._log(claim, str(message.get("phase", "")), alone)

        self._log(claim, "starting")
        ended = isolation.supervise(
            lambda channel: self._run_in_child(items, channel),
            deadline_s=self.settings.deadline_s,
            on_message=receive,
            on_end=continue_paused,  # the claim may have been killed while it paused other claims
        )
        self._log(claim, journal.ENDED)
        if ended.status == "interrupted":
            continue_paused()  # its supervisor, which would do it, was killed
        how = isolation.describe(ended)
        [only, *others] = items
        if not others and not measured[only.nodeid].is_complete:
            crash = next((m["text"] for m in ended.messages if m["kind"] == "crash"), "")
            reason = f"{how}\n{crash}".strip()
            lost = _failed_report(only, reason, ended.seconds, _captured_output(config))
            reports = measured[only.nodeid].reports
            reports[:] = [r for r in reports if r.when == "setup"] + [lost]
        return measured, how

    def _log(self, claim: str, phase: str, alone: str = "") -> None:
        if self.phases is not None and phase:  # some messages have no phase
            self.phases.append(claim, phase, alone)

    def _show_wait(self, claim: str, message: isolation.Message) -> None:
        """Print, once per claim, that it waits for another claim, if no live line shows it."""
        phase = str(message.get("phase"))
        reporter = self.terminal  # None on an xdist worker, whose claims wait for each other
        if reporter is None or reporter.isatty or claim in self.waited:
            return
        if message["kind"] == "waiting" and phase.startswith("waiting for "):
            self.waited.add(claim)
            reporter.ensure_newline()
            reporter.write_line(f"{claim} is {phase}")
            reporter.flush()

    def _run_in_child(self, items: Sequence[pytest.Item], channel: isolation.Channel) -> None:
        """Run the items' three phases; called in the process of the claim, a fork of pytest's."""
        gpus = self.session.gpus_for(items[0])
        if on_cuda(gpus):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(g.uuid for g in gpus)
        session = replace(self.session, role=Role.CLAIM, send=channel.send)
        Session.current = session
        items[0].config.stash[SESSION] = session
        gc.freeze()  # keeps the collector from scanning pytest's objects, which stay anyway

        def send(item: pytest.Item, reports: Reports) -> None:
            for report in reports:
                # a report too large for the channel would be lost, and the claim's verdict with it
                report.sections = [(name, _cut(text)) for name, text in report.sections]
                hook = item.config.hook
                data = hook.pytest_report_to_serializable(config=item.config, report=report)
                # record_property() and other plugins may add what is no JSON, such as a path
                data = json.loads(json.dumps(data, default=str))
                channel.send("report", data=data)

        [only, *others] = items
        with ExitStack() as scope:
            scope.enter_context(ItemContext(only, session).lock.use_host())
            if session.needs_all_memory:
                scope.enter_context(self._all_memory(gpus, channel))
            if others:
                session.ladder = LadderRun()
                session.ladder.run(items, measure_together, send)
            else:
                send(only, runtestprotocol(only, log=False, nextitem=None))

    @staticmethod
    @contextmanager
    def _all_memory(gpus: Sequence[Gpu], channel: isolation.Channel) -> Iterator[None]:
        """Reserve all memory of GPUs that claims may use; the wait does not count."""
        known = [gpu for gpu in gpus if gpu.memory_bytes]  # unknown where NVML lacks it (GB10)
        with ExitStack() as scope:
            for gpu in sorted(known, key=lambda gpu: gpu.uuid):
                limit = gpu_memory.limit(gpu)
                scope.enter_context(
                    gpu_memory.reservation(
                        gpu.uuid,
                        limit,
                        limit,
                        on_wait=lambda phase: channel.send("waiting", phase=phase),
                        on_acquired=lambda: channel.send("working", phase="has the memory"),
                    )
                )
            yield

    def _consistent(self, item: pytest.Item, record: object) -> Result:
        """Return the record that a claim's process sent; an error if it contradicts itself."""
        try:
            results.dumps(record, "Result")  # the journal must be able to hold it
            result = from_json(Result, record)
        except ValueError as error:
            message = f"its record is invalid: {error}"
        else:
            if (problem := contradiction(result)) is None:
                return result
            message = f"its record contradicts itself: {problem}"
        return replace(self.session.new_result(item), message=message)

    def _conclude(self, item: pytest.Item, measured: Measured) -> None:
        """Make the record and the reports of a claim agree.

        An error or a skip that pytest reports becomes the outcome of a claim that met no error of
        its own. A claim that FAILED, or is INVALID or an ERROR, fails its test, even if the test
        caught the exception or skipped, or a hook made its reports pass; an expected failure
        (xfail) stays one.
        """
        reports, result = measured.reports, measured.result or self.session.new_result(item)
        failed = next((r for r in reports if r.failed), None)
        # pytest also reports an expected failure as skipped
        expected = any(r.skipped and hasattr(r, "wasxfail") for r in reports)
        skipped = next((r for r in reports if r.skipped and not hasattr(r, "wasxfail")), None)
        if failed is not None and result.outcome in (Outcome.PASSED, Outcome.ERROR):
            crash = getattr(failed.longrepr, "reprcrash", None)
            reason = crash.message if crash is not None else failed.longreprtext
            if result.outcome is Outcome.ERROR and result.message:
                reason = result.message
            result = replace(result, outcome=Outcome.ERROR, message=reason.strip()[:2000])
        elif skipped and (measured.result is None or result.outcome is Outcome.PASSED):
            where = skipped.longrepr
            reason = where[2] if isinstance(where, tuple) else str(where)
            reason = reason.removeprefix("Skipped: ")
            outcome = Outcome.NOT_RUN if reason.startswith(NOT_RUN) else Outcome.SKIPPED
            result = replace(result, outcome=outcome, message=reason.removeprefix(NOT_RUN))
        elif failed is None and result.outcome in FAILURES and not expected:
            message = result.message or "the test passed without a record of its claim"
            result = replace(result, message=message)
            report = next((r for r in reports if r.when == "call"), reports[-1])
            report.outcome, report.longrepr = "failed", message
            vars(report).pop("wasxfail", None)
        call = next((r for r in reports if r.when == "call"), None)
        if call is not None and result.seconds:
            call.duration = result.seconds  # pytest would count a whole ladder for one rung
        measured.result = result

    def pytest_runtest_logfinish(self) -> None:
        if self.session.live is not None:
            self.session.live.ended()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.terminal = session.config.pluginmanager.get_plugin("terminalreporter")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.session.live is not None:
            self.session.live.clear()
        if report.skipped and hasattr(report, "wasxfail"):
            self.expected.add(report.nodeid)
        noise = getattr(report, "aiperf", {}).get("noise")
        if noise and self.terminal is not None and not self.noise_shown:
            self.terminal.ensure_newline()
            self.terminal.write_line(noise, yellow=True)
            self.noise_shown = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Iterator[None]:
        run = self.session.run
        if self.session.role is Role.WORKER:
            self.session.register_worker(None)
        elif run is not None and run.collected:
            self._finish(session, exitstatus)
        failed = session.exitstatus == pytest.ExitCode.TESTS_FAILED
        done = yield  # pytest-benchmark now writes its files, which include the claims
        if failed and session.exitstatus == pytest.ExitCode.OK:  # set by a conftest.py
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.session.role is not Role.WORKER and run is not None and not run.collected:
            shutil.rmtree(run.path, ignore_errors=True)  # refused, or without claims: no results
        return done

    def _finish(self, session: pytest.Session, exitstatus: int) -> None:
        aiperf = self.session
        code = pytest.ExitCode
        complete = (code.OK, code.TESTS_FAILED, code.NO_TESTS_COLLECTED)
        # If a second Ctrl-C came before pytest had handled the first, it is still propagating.
        in_flight = sys.exception() is not None
        interrupted = in_flight or exitstatus not in complete or bool(session.shouldstop)
        try:
            aiperf.finish(interrupted=interrupted, stopped=bool(session.shouldfail))
            claims = list(aiperf.results.values())
            if folder := session.config.option.aiperf_report:
                from pytest_aiperf.report.page import write_report  # here: it imports Jinja2

                assert aiperf.run is not None
                machine, data = results.machine_info(aiperf.gpus), aiperf.run.path / "results.json"
                written = write_report(claims, machine, Path(folder), [data])
                aiperf.closing.append(f"report: {written}")
        except (AiperfError, OSError, ValueError) as error:
            aiperf.closing.append(f"ERROR: {error}")
            session.exitstatus = code.INTERNAL_ERROR
            return
        plugin = session.config.pluginmanager.get_plugin("pytest-benchmark")
        terminal.benchmark_session_add(plugin, claims)
        if plugin is not None and plugin.json and not plugin.benchmarks:
            # pytest-benchmark writes no file without times; but records without times count, too
            assert aiperf.run is not None
            text = (aiperf.run.path / "results.json").read_text(encoding="utf-8")
            results.atomic_write(Path(getattr(plugin.json, "name", plugin.json)), text)
            plugin.json = None
        failed = [r for r in claims if r.message == LOST or r.outcome in FAILURES]
        unreported = [r.claim for r in failed if r.nodeid not in self.expected]
        if unreported and session.exitstatus == code.OK:
            session.exitstatus = code.TESTS_FAILED
            aiperf.closing.append(f"ERROR: pytest reports no failure of {', '.join(unreported)}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        names = {entry["fullname"] for entry in output_json["benchmarks"]}
        others = [r for r in self.session.results.values() if r.nodeid not in names]
        output_json["aiperf_untimed"] = [to_json(r) for r in others]

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        machine_info["gpus"] = results.machine_info(self.session.gpus)["gpus"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        width = shutil.get_terminal_size((140, 24)).columns
        session, settings = self.session, self.settings
        if session.closing:
            terminalreporter.write_sep("=", "records")
            for line in session.closing:
                terminalreporter.write_line(line)
        if claims := list(session.results.values()):
            terminalreporter.write_sep("=", "claims")
            lines = terminal.table(claims, width, verbosity=terminalreporter.verbosity)
            terminal.write(terminalreporter, lines)
            terminal.write(terminalreporter, terminal.profiles(claims, width))
            kinds: list[str] = sorted(settings.measure, reverse=True)
            if settings.profile:  # it implies --gpu and --cpu, or --cpu
                kinds = [*(kinds if len(kinds) == 1 else ()), f"profile={settings.profile}"]
            what = " --".join(kinds)
            ranks = f" --ranks={','.join(map(str, settings.ranks))}" if settings.ranks else ""
            file = settings.runs / "latest" / "results.json"
            steps = terminal.next_steps(claims, f"pytest --{what}{ranks}", settings.root, file)
            terminal.write(terminalreporter, steps)


def _import_ahead(items: Sequence[pytest.Item], *, traces: bool) -> None:
    """Import modules before the forks, so that no claim's process needs time to import them."""
    import_module(".fixtures", __package__)
    stats.t_quantile(0.995, 7)  # imports scipy
    # torch's profiler imports it, too: each claim on a GPU would need up to four seconds for it
    compiles = any(b"torch.compile(" in file.read_bytes() for file in {item.path for item in items})
    if compiles or (traces and "torch" in sys.modules):
        import_module("torch._inductor")


def _report(config: pytest.Config, data: dict[str, Any]) -> pytest.TestReport:
    """Restore a report that was sent as JSON."""
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    assert isinstance(report, pytest.TestReport)
    if isinstance(report.longrepr, list):  # JSON turned a skip's tuple into a list
        report.longrepr = tuple(report.longrepr)
    return report


def _exit_on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    # not pytest.exit: pytest's collection and many libraries catch every Exception and go on
    raise KeyboardInterrupt("SIGTERM: finished results are kept")


def _failed_report(
    item: pytest.Item, reason: str, seconds: float = 0.0, output: Sequence[tuple[str, str]] = ()
) -> pytest.TestReport:
    return pytest.TestReport(
        item.nodeid, item.location, {}, "failed", reason, "call", list(output), seconds
    )


def _captured_output(config: pytest.Config) -> list[tuple[str, str]]:
    """Return what pytest captured of the output of a process that ended without a report."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        return []
    texts = zip(("stdout", "stderr"), capture.read_global_capture(), strict=True)
    return [(f"Captured {name} of the lost process", _cut(text)) for name, text in texts if text]


def _cut(text: str) -> str:
    excess = len(text) - KEPT_CHARACTERS
    return text if excess <= 0 else f"[{excess} characters before this left out]\n{text[excess:]}"
