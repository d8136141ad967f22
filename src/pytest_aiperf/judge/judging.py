"""Judge a solution in a process of its own: its result, its shortcuts, its time."""

import glob
import hashlib
import os
import re
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import cycle, islice
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final, Literal, cast

from pytest_aiperf.claim import arm_errors
from pytest_aiperf.claim.claim import Claim
from pytest_aiperf.correctness import tensors
from pytest_aiperf.correctness.accuracy import ERROR_BUDGETS
from pytest_aiperf.errors import (
    AiperfError,
    ArmError,
    ClaimNotMet,
    InvalidMeasurement,
    UsageError,
    WrongResult,
)
from pytest_aiperf.machine import isolation, nvml
from pytest_aiperf.machine.gpu_lock import GpuLock, continue_paused
from pytest_aiperf.model import (
    Bench,
    CacheName,
    Gpu,
    Interval,
    Metric,
    PrecisionName,
    Result,
    Verdict,
)
from pytest_aiperf.rules import stats, validity
from pytest_aiperf.rules import verdict as rules
from pytest_aiperf.schema import from_json, to_json
from pytest_aiperf.session.figures import SharedFigures
from pytest_aiperf.session.standalone import measure_claims, open_device
from pytest_aiperf.text import percent, si

from . import checks, forms
from .forms import Case, FileError, Loaded, Pair, Problem, SolutionError

UNUSABLE, WRONG, SHORTCUT, BROKEN, INVALID = "UNUSABLE", "WRONG", "SHORTCUT", "BROKEN", "INVALID"
EXIT: Final[Mapping[str, int]] = {
    Verdict.FASTER: 0,
    Verdict.SAME: 1, Verdict.SLOWER: 1, Verdict.INCONCLUSIVE: 1,
    UNUSABLE: 2,
    WRONG: 3,
    SHORTCUT: 4,
    BROKEN: 5,
    INVALID: 6,
}  # fmt: skip
"""Exit status of the command by the status of a judgement; of several, the highest counts."""
_Job = tuple[int, tuple[Path, Path], str | None]
"""Number of a pair, its problem and solution, and the UUID of the GPU that it sees."""
SCHEMA: Final = 1  #: Version of a judgement's JSON.

WAITING: Final = "waiting for other processes"  #: Key of the seconds spent waiting.
OF_PROBLEM: Final = "running the problem's file"
"""The phase in which no code of the solution runs."""
NARROW_OFFSET = 600_011
"""Added to the seed for the check on wider inputs, so that it draws values not used before."""
HISTORY_OFFSET = 700_001
"""Added to the seed for the check of successive calls, so that it draws values not used before."""

_DISTURBED: Final = re.compile(
    "disturbed|unset it to measure|profiler is attached|without coverage|ran idle|create a stream"
)
"""Matches messages of invalid measurements that the solution did not cause."""
_TIMED: Final = re.compile(r" (?:in|on new values in) a timed block")
"""Matches messages of wrong results that timed calls showed, but earlier checks did not."""
_ERROR: Final = re.compile(r"error ([\d.e+-]+), allowed")


@dataclass(frozen=True, slots=True)
class Options:
    """How to judge; the same for all pairs of a folder."""

    device: Literal["cuda", "cpu"] | None = None  #: The first GPU, or the host without one.
    metric: Literal["device", "wall"] | None = None
    """The time that counts; None for the GPU time or, on the host, wall time."""
    quick: bool = False
    tolerance: PrecisionName | None = None  #: For problems that state none.
    cap: PrecisionName = "bf16"  #: Widest tolerance that counts.
    deadline_s: float = 600.0  #: For each pair, without the time spent waiting for others.
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured on one kind of inputs."""

    name: str
    seconds: Mapping[str, float]  #: Seconds per call of "baseline" and "solution".
    speedup: Interval
    share: float | None = None  #: Share of the limit that the solution reaches; None if unknown.
    limit: str = ""  #: Name of that limit.
    diagnosis: Mapping[str, str] = field(default_factory=dict)
    error: float | None = None  #: Largest error of the solution; see the rules of agreement.
    allowed: float | None = None  #: Largest error that passes.
    cache: CacheName = "cold"  #: "warm" if the inputs are too small to be kept out of the L2.


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known about one solution."""

    problem: str
    solution: str
    status: str  #: A verdict, or one of the other keys of ``EXIT``.
    message: str = ""  #: Reason of a status that is no verdict.
    form: str = ""
    speedup: Interval | None = None  #: Geometric mean of the rows.
    rows: tuple[Row, ...] = ()
    setup_s: Mapping[str, float] = field(default_factory=dict)
    tolerance: str = ""  #: Precision in which the solution may compute; empty for the dtype's own.
    notes: tuple[str, ...] = ()
    seed: int = 0
    digests: Mapping[str, str] = field(default_factory=dict)  #: SHA-256 of both files.
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0  #: Duration of the judgement.
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, and those of ``WAITING``, which are in no phase."""
    schema: int = SCHEMA

    @property
    def exit_status(self) -> int:
        return EXIT[self.status]


class _Refused(Exception):  # noqa: N818  ends a judgement; no error of the plugin
    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def judge(
    problem: Path,
    solution: Path,
    options: Options,
    figures: Path | None = None,
    gpu: str | None = None,
) -> Judgement:
    """Judge one solution in a process of its own, which may crash, hang or exhaust its memory.

    ``figures`` is a folder for the noise floor and the limits that several processes share.
    ``gpu`` is the UUID of the only GPU that the process sees.
    """
    _require_device(options)
    started = time.monotonic()
    seed = secrets.randbelow(2**30) if options.seed is None else options.seed
    blank = Judgement(str(problem), str(solution), BROKEN, seed=seed)
    try:
        task = Problem(problem)
        blank = replace(blank, form=task.form)
        forms.require_entry(task.form, solution)
    except (FileError, SolutionError) as error:
        status = UNUSABLE if isinstance(error, FileError) else BROKEN
        return replace(blank, status=status, message=str(error))
    digests = {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in (task.path, solution)}
    blank = replace(blank, problem=str(task.path), digests=digests)

    def work(channel: isolation.Channel) -> None:
        sys.stdout = sys.stderr  # a solution prints what it likes; stdout has the judgement alone
        os.dup2(2, 1)
        os.environ.update({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
        run = _Judging(task, solution, options, blank, figures=figures, channel=channel)
        channel.send("judgement", judgement=to_json(run.judgement()))

    received: list[Judgement] = []
    wrong: list[str] = []  # wrong results, sent before the search for their reason
    phases = _Phases()

    def receive(message: isolation.Message) -> None:
        if message["kind"] == "judgement" and not received:
            received.append(from_json(Judgement, message["judgement"]))
        elif message["kind"] == "wrong":
            wrong.append(str(message["text"]))
        else:
            phases.receive(message)

    ended = isolation.supervise(
        work, deadline_s=options.deadline_s, on_message=receive, on_end=continue_paused
    )
    if received:
        seconds = time.monotonic() - started
        return replace(received[0], seconds=seconds, phases_s=phases.seconds())
    reason = isolation.describe(ended)
    if ended.status == "timeout":
        reason = f"exceeded its deadline of {ended.deadline_s:g} s (--deadline allows more)"
    status = UNUSABLE if phases.current == OF_PROBLEM else BROKEN
    text = f"its process ended without a judgement while {phases.current}: {reason}"
    if wrong:
        status, text = WRONG, f"{wrong[0]} (the search for the reason: {reason})"
    seconds = ended.seconds
    return replace(blank, status=status, message=text, seconds=seconds, phases_s=phases.seconds())


def _require_device(options: Options) -> None:
    """Raise UsageError if the options need a GPU that is not there, or not to be used."""
    if options.device == "cuda" and not nvml.visible():
        raise UsageError(f"there is no NVIDIA GPU here: {nvml.absence()}; use --cpu")
    if options.metric == "device" and options.device == "cpu":
        raise UsageError("--metric device is the time of a GPU: leave out this option, or --cpu")
    if options.metric == "device" and not nvml.visible():
        raise UsageError(
            f"--metric device is the time of a GPU, and there is none here: {nvml.absence()}; "
            "leave out this option to measure wall time on the host"
        )


class _Phases:
    """The phase of a judgement, and how long each took."""

    def __init__(self) -> None:
        self.current = "starting"
        self._is_waiting = False
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}

    def receive(self, message: isolation.Message) -> None:
        """Note the begin of a phase, or of waiting within it, and its end."""
        self.seconds()
        if message["kind"] == "progress":
            self.current = str(message.get("phase"))
        elif message["kind"] in ("waiting", "working"):
            self._is_waiting = message["kind"] == "waiting"

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase until now."""
        now = time.monotonic()
        name = WAITING if self._is_waiting else self.current
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now
        return self._seconds


def judge_all(
    pairs: Sequence[tuple[Path, Path]],
    options: Options,
    processes: int,
    show: Callable[[Judgement], object],
    figures: Path | None = None,
) -> list[Judgement]:
    """Judge pairs, some of them at the same time; timed calls run alone.

    ``show`` gets each judgement once it is there; the returned ones are in the order of the pairs.
    After Ctrl-C these are the ones that are done. ``figures`` is as in :func:`judge`, by default a
    folder that is removed at the end.
    """
    with suppress(ImportError):
        import_module("torch")  # once for all processes, which are forks of this one
    gpus = [] if options.device == "cpu" or processes < 2 else nvml.visible()
    jobs = zip(range(len(pairs)), pairs, cycle([gpu.uuid for gpu in gpus] or [None]))
    done: dict[int, Judgement] = {}
    with tempfile.TemporaryDirectory(prefix="pytest-aiperf-judge-") as folder:
        one = partial(_judge_pair, options=options, figures=figures or Path(folder))
        many = processes > 1 and len(pairs) > 1
        judgements = _in_processes(one, jobs, processes) if many else (one(job) for job in jobs)
        with suppress(KeyboardInterrupt), closing(judgements):
            for index, judgement in judgements:
                done[index] = judgement
                show(judgement)
    return [done[index] for index in sorted(done)]


def _in_processes(
    one: Callable[[_Job], tuple[int, Judgement]], jobs: Iterator[_Job], processes: int
) -> Generator[tuple[int, Judgement], None, None]:
    """Judge each pair in a process; yield judgements as they come.

    A multiprocessing.Pool would not do: it waits forever for a process that a signal has killed.
    """
    fork = get_context("fork")  # each process of a solution is a fork in any case
    running: dict[Any, tuple[Any, _Job]] = {}
    try:
        while True:
            for job in islice(jobs, processes - len(running)):
                result, outlet = fork.Pipe(duplex=False)
                process = fork.Process(target=_send, args=(outlet, one, job))
                isolation.end_openmp_threads()
                process.start()
                outlet.close()
                running[result] = process, job
            if not running:
                return
            ready: list[Any] = wait(list(running))
            for result in ready:
                process, (index, (problem, solution), _) = running.pop(result)
                try:
                    yield result.recv()
                except EOFError:
                    text = "a process of the command was killed from outside: judge it again"
                    yield index, Judgement(str(problem), str(solution), INVALID, text)
                process.join()
    finally:
        for process, _ in running.values():
            process.kill()  # and, without this process, its supervisor kills the solution's


def _send(outlet: Any, one: Callable[[_Job], tuple[int, Judgement]], job: _Job) -> None:
    isolation.arm_parent_death()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the command decides about them
    outlet.send(one(job))


def _judge_pair(job: _Job, options: Options, figures: Path) -> tuple[int, Judgement]:
    index, (problem, solution), gpu = job
    try:
        return index, judge(problem, solution, options, figures, gpu)
    except AiperfError as error:
        return index, Judgement(str(problem), str(solution), UNUSABLE, str(error))
    except OSError as error:  # such as no memory for one more process: the other pairs count
        return index, Judgement(str(problem), str(solution), INVALID, f"{error}: judge it again")


class _Judging:
    """One judgement, in the process of the solution."""

    def __init__(
        self,
        task: Problem,
        path: Path,
        options: Options,
        blank: Judgement,
        *,
        figures: Path | None,
        channel: isolation.Channel,
    ) -> None:
        self.task, self.path, self.options, self.blank = task, path, options, blank
        self.channel = channel
        self.seed = blank.seed
        self.figures = SharedFigures(figures)
        gpus: Sequence[Gpu] = [] if options.device == "cpu" else nvml.visible()
        self.gpu = gpus[0] if gpus else None
        self.device: Literal["cuda", "cpu"] = "cuda" if self.gpu else "cpu"
        self.loads = 0
        self.loading_s = 0.0  # of the last time

    def judgement(self) -> Judgement:
        """Judge in this process; every way in which it ends is a status."""
        try:
            return self._run()
        except Exception as error:  # noqa: BLE001  code of others raises anything
            status, message = self._ending(error)
            return replace(self.blank, status=status, message=message)

    def _ending(self, error: Exception) -> tuple[str, str]:
        """Return the status and message for an exception, by whose code raised it."""
        problem, solution = self.task.path, self.path
        if isinstance(error, _Refused):
            return error.status, str(error)
        if text := self._missing_gpu(error):
            return UNUSABLE, text
        if isinstance(error, (SolutionError, FileError)):
            return (UNUSABLE if isinstance(error, FileError) else BROKEN), str(error)
        if forms.passes(solution, error):
            return BROKEN, forms.located(solution, error)
        if forms.passes(problem, error):
            return UNUSABLE, forms.located(problem, error)
        last = traceback.format_exception_only(error)[-1].strip()
        return BROKEN, f"{solution}:1: {last}"

    def _missing_gpu(self, error: Exception) -> str:
        """Return what needs a GPU, if an error on the host is due to its absence."""
        cause = error.__cause__ or error  # a solution's error at import is wrapped
        is_triton = arm_errors.is_triton_launch(cause)
        path = next((p for p in (self.path, self.task.path) if forms.passes(p, cause)), None)
        if self.gpu or path is None or not (is_triton or arm_errors.needs_gpu(cause)):
            return ""
        act = "launches a Triton kernel, which needs" if is_triton else "needs"
        absent = "leave out --cpu to use it" if nvml.visible() else "there is none here"
        what = "" if is_triton else f" ({forms.located(path, cause)})"
        return f"{path.name} {act} an NVIDIA GPU{what}; {absent}"

    def _run(self) -> Judgement:
        with suppress(ImportError):
            import_module("torch")
        with self._shared():
            self._begin(OF_PROBLEM)
            self.module = self.task.load()
            with suppress(Exception):  # it raises again when it is needed
                forms.rehearse(self.task, self.module, self.device, self.seed)
            settings, known = validity.flags(), checks.functions(self.module)
            self._begin("loading the solution and constructing models")
            pair = self._pair()
            loading_s = self.loading_s
            self._refuse_tampering(settings, known)
            self._begin("checking results")
            problem = next(filter(None, (check() for check in pair.checks)), "")
            self._refuse_tampering(settings, known)
        if problem:
            self._diagnose_wrong(pair.cases[0], pair, problem)
        on_host = self.gpu is None and self.options.device is None
        notes = ["no GPU: measured on the host (wall time)"] if on_host else []
        notes += pair.notes
        measured = []
        for case in pair.cases:
            self._begin(f"measuring {case.name}".strip())
            measured.append(self._measure(case, pair, notes))
        self._begin("checking results on other inputs")
        if changed := checks.replaced(known, self.module):
            raise _Refused(SHORTCUT, f"the solution replaces {changed} while it runs")
        with self._shared():
            where = checks.narrowness(pair.cases[0], self.device, self.seed + NARROW_OFFSET)
        if where:
            text = f"the solution is right on the problem's inputs, and not on {where}"
            raise _Refused(SHORTCUT, text)
        rows, results = zip(*measured, strict=True)
        bounds = ((r.speedup.low, r.speedup.value, r.speedup.high) for r in rows)
        ratio = Interval(*map(geometric_mean, zip(*bounds, strict=True)))
        floor = max(result.floor for result in results)
        status = rules.verdict(ratio, floor)
        notes += [n for n in dict.fromkeys(n for r in results for n in r.notes) if n not in notes]
        if len(rows) > 1:
            worst = min(rows, key=lambda row: row.speedup.value)
            notes.append(f"least speedup: {worst.speedup} for {worst.name}")
        if noise := rules.noise_problem(floor):
            notes.append(noise)
        return replace(
            self.blank,
            status=status.value,
            speedup=ratio,
            rows=rows,
            setup_s={"loading": loading_s, **pair.setup_s},
            tolerance=pair.precision or "",
            notes=tuple(notes),
            environment={"device": results[0].key, **results[0].stack},
        )

    def _begin(self, phase: str) -> None:
        """Note the phase that begins, for the message in case it never ends."""
        self.channel.send("progress", phase=phase)

    def _shared(self) -> AbstractContextManager[None]:
        """Hold the shared lock, so that nobody times calls meanwhile."""
        return GpuLock(
            [self.gpu.uuid] if self.gpu else [],
            on_wait=lambda _: self.channel.send("waiting"),
            on_acquired=lambda: self.channel.send("working"),
        ).shared()

    def _pair(self) -> Pair:
        """Load the solution, each time as if it had not run before, and construct the models."""
        self.loads += 1
        begun = time.perf_counter()
        try:
            solution = forms.load(self.path, f"judged_solution_{self.loads}")
        except Exception as error:
            raise SolutionError(forms.located(self.path, error)) from error
        self.loading_s = time.perf_counter() - begun
        entry = forms.ENTRY[self.task.form]
        if not callable(getattr(solution, entry, None)):
            raise SolutionError(f"{self.path}:1: {entry} is not defined when the file has run")
        loaded = Loaded(self.task, self.module, solution, self.path, self.device, self.seed)
        return loaded.pair(self.options.tolerance, self.options.cap)

    def _refuse_tampering(
        self, settings: Mapping[str, str], known: Mapping[str, int] | None = None
    ) -> None:
        """Raise _Refused if the solution has changed settings or functions in ``known``."""
        changed = validity.changed_flags(settings, validity.flags())
        # of a function, the address is the setting
        timers = [line.partition(": ")[0] for line in changed if " at 0x" in line]
        if timers:
            text = f"replaces {timers[0]}, on which the measurement relies"
        elif changed:
            text = (
                f"changes global settings ({', '.join(changed)}), under which the baseline would "
                "run as well: set them for its own calls only"
            )
        elif known and (name := checks.replaced(known, self.module)):
            text = f"replaces {name}, which the baseline uses"
        else:
            return
        raise _Refused(SHORTCUT, f"the solution {text}")

    def _measure(self, case: Case, pair: Pair, notes: list[str]) -> tuple[Row, Result]:
        work = pair.work
        l2_bytes = self._l2_bytes()  # takes the lock itself
        with self._shared():
            settings = validity.flags()
            cache = self._cache(case, l2_bytes, notes)
            if kind := checks.not_plain(case, self.device, self.seed):
                raise _Refused(
                    SHORTCUT,
                    f"the solution returns an object of the class {kind}, which may compute when "
                    "it is read: return numbers, or plain, dense arrays of them",
                )
            if work is None and self.gpu is not None:
                moved = checks.bytes_to_move(case, self.device, self.seed)
                work = lambda *_args: moved  # noqa: E731
            # measuring would note the settings that these calls have left as the user's own
            self._refuse_tampering(settings)
        claim = Claim(
            arms={"baseline": case.baseline, "optimized": case.solution},
            inputs=case.inputs,
            reference=case.reference,
            work=work,
            metrics=(Metric(self.options.metric or "device") if self.gpu else Metric.WALL,),
            cache=cache,
            precision=pair.precision,
        )
        [(result, error)] = measure_claims(
            [claim],
            quick=self.options.quick,
            device=self.device,
            seed=self.seed,
            figures=self.figures,
            progress=self._progress,
        )
        if error is not None and not isinstance(error, ClaimNotMet):
            self._refuse(case, pair, error)
        return _row(case, result, cache), result

    def _progress(self, phase: str, **_figures: object) -> None:
        if phase in ("waiting", "working"):
            self.channel.send(phase)

    def _l2_bytes(self) -> int:
        """Return the size of the GPU's L2, which CUDA knows and NVML does not; 0 on the host."""
        if self.gpu is None:
            return 0
        opened = open_device(self.device, self._progress)[2].gpu
        return opened.l2_bytes if opened else 0

    def _cache(self, case: Case, l2_bytes: int, notes: list[str]) -> CacheName:
        """Return "warm" for inputs too small to be kept out of the L2, with a note."""
        if not l2_bytes:
            return "cold"
        size = tensors.nbytes(case.inputs(Bench(self.device, self.seed, full=True)))
        try:
            validity.rotation(size, l2_bytes)
        except UsageError:
            where = f" for {case.name}" if case.name else ""
            notes.append(
                f"warm caches{where}: a set of inputs has {si(float(size), 'B')} and stays in the "
                f"L2 of {si(float(l2_bytes), 'B')} from call to call"
            )
            return "warm"
        return "cold"

    def _refuse(self, case: Case, pair: Pair, error: Exception) -> None:
        """Raise what an error of the measurement means for the solution."""
        if isinstance(error, ArmError) and isinstance(error.__cause__, Exception):
            raise error.__cause__
        text = re.sub(r"\boptimized\b", "the solution", str(error))
        text = text.replace('claim metric="wall"', "use --metric wall")
        if isinstance(error, WrongResult) and text.startswith(("baseline", "library")):
            raise _Refused(UNUSABLE, f"{self.task.path}:1: {text} (does it draw random numbers?)")
        if isinstance(error, WrongResult):
            self._diagnose_wrong(case, pair, text)
        if isinstance(error, InvalidMeasurement):
            innocent = _DISTURBED.search(text) or text.startswith("baseline:")
            raise _Refused(INVALID if innocent else SHORTCUT, text)
        if isinstance(error, UsageError) and str(error).startswith("optimized"):
            raise _Refused(WRONG, text)
        if isinstance(error, UsageError):
            raise _Refused(UNUSABLE, f"{self.task.path}:1: {text}")
        if isinstance(error, AiperfError):
            raise _Refused(INVALID, text)
        raise error

    def _diagnose_wrong(self, case: Case, pair: Pair, text: str) -> None:
        """Raise SHORTCUT if the wrong result comes from skipped work, and WRONG if not."""
        index = pair.cases.index(case)

        def anew() -> Case:
            return self._pair().cases[index]

        why = ""
        self._begin("looking for the reason of a wrong result")
        # the wrong result is certain, whatever happens to the search for its reason
        self.channel.send("wrong", text=text)
        with self._shared(), suppress(Exception):
            why = checks.history(anew, self.device, self.seed + HISTORY_OFFSET, pair.precision)
        if why:
            raise _Refused(SHORTCUT, f"{why} ({text})")
        found = _ERROR.search(text)
        if found and (name := _precision_of(float(found[1]), self.options)):
            text += f'; a problem that allows {name} states: tolerance = "{name}"'
        if _TIMED.search(text):
            raise _Refused(SHORTCUT, f"right when it was checked, and wrong when timed: {text}")
        raise _Refused(WRONG, text)


def _precision_of(error: float, options: Options) -> str:
    """Return the narrowest lower precision that explains an error; empty if none does."""
    lower = forms.WIDENING[forms.WIDENING.index("fp32") + 1 :]
    cap = ERROR_BUDGETS[options.cap]
    return next((name for name in lower if error <= ERROR_BUDGETS[name] <= cap), "")


def _row(case: Case, result: Result, cache: CacheName) -> Row:
    assert result.timing is not None
    assert result.speedup is not None
    limit = result.limits.get("optimized")
    names = {"baseline": "baseline", "optimized": "solution"}
    error = next((e for e in result.agreement if e.arm == "optimized"), None)
    return Row(
        name=case.name,
        seconds={
            name: stats.mean_call_s(result.timing.replicates, arm) for arm, name in names.items()
        },
        speedup=result.speedup,
        share=limit.share if limit else None,
        limit=limit.ceiling if limit else "",
        diagnosis={names[arm]: text for arm, text in result.diagnosis.items() if arm in names},
        error=error.error if error else None,
        allowed=error.allowed if error else None,
        cache=cache,
    )


def lines(judgement: Judgement) -> Iterator[str]:
    """Format a judgement: one line, then what explains it."""
    j = judgement
    head = f"{j.status:<12}  {j.solution}"
    if not j.speedup:
        yield head
        yield f"    {j.message}"
        return
    yield f"{head}  {j.speedup} of {j.problem}"
    for row in j.rows:
        times = f"{si(row.seconds['baseline'], 's')} -> {si(row.seconds['solution'], 's')}"
        share = f", {percent(row.share)} of the {row.limit} rate" if row.share is not None else ""
        name = f"{row.name}: {row.speedup}, " if row.name else ""
        yield f"    {name}{times}{share}"
        for arm, text in row.diagnosis.items():
            yield f"      {arm}: {text}"
    errors = [row for row in j.rows if row.error is not None and row.allowed is not None]
    if errors:
        worst = max(errors, key=lambda r: (r.error or 0) / (r.allowed or 1))
        yield f"    error {worst.error:.2g}, allowed {worst.allowed:.2g}"
    setup = ", ".join(f"{name} {si(s, 's', 3)}" for name, s in j.setup_s.items())
    yield f"    setup, not timed: {setup}"
    for note in j.notes:
        yield f"    note: {note}"


def data(judgement: Judgement) -> dict[str, Any]:
    """Return a judgement as JSON values."""
    return cast("dict[str, Any]", to_json(judgement)) | {"exit_status": judgement.exit_status}


def pairs(folder: Path, solutions: Path | None = None) -> list[tuple[Path, Path]]:
    """Find the pairs in a folder.

    A folder that has ``problem.py`` has its solutions in ``solution*.py``; one that has
    ``reference.py`` has them in ``submission*.py``. A file ``NAME.py`` has them in
    ``NAME_solution*.py`` beside it. With a folder of ``solutions``, a problem ``NAME.py`` has them
    in ``NAME.py`` or ``NAME_*.py`` there, unless a longer name of a problem fits, and a problem of
    KernelBench also in files such as ``level_1_problem_3_sample_0_kernel.py``.
    """
    if not folder.exists():
        raise UsageError(f"{folder} does not exist")
    if folder.is_file() and solutions is None:
        command = f"judge {folder} solution.py"
        raise UsageError(
            f"{folder} is a file: name the solution as well ({command}), or give the folder"
        )
    if folder.is_file():
        raise UsageError(
            f"{folder} is a file, but {solutions} is a folder: name one of its files, or give the "
            "folder of the problems"
        )
    found: list[tuple[Path, Path]] = []
    files, stems = sorted(folder.rglob("*.py")), set[str]()
    if solutions is not None and (place := solutions.resolve()) != folder.resolve():
        files = [file for file in files if place not in file.resolve().parents]
        stems = {file.stem for file in files}
    for file in files:
        stem = glob.escape(file.stem)
        longer = tuple(f"{other}_" for other in stems if other.startswith(f"{file.stem}_"))
        if solutions is None:
            names = {"problem": "solution", "reference": "submission"}
            patterns = [f"{names.get(file.stem, f'{stem}_solution')}*.py"]
        else:
            patterns = [f"{stem}.py", f"{stem}_*.py"]
            level, number = re.search(r"\d+", file.parent.name), re.match(r"\d+", file.stem)
            if level and number:
                patterns.append(f"level_{level[0]}_problem_{number[0]}_*.py")
        search = file.parent.glob if solutions is None else solutions.rglob
        matches = {match for pattern in patterns for match in search(pattern)}
        found += [
            (file, match)
            for match in sorted(matches)
            if match != file and not f"{match.stem}_".startswith(longer)
        ]
    if not found:
        where = f" in {solutions}" if solutions else ""
        raise UsageError(
            f"{folder} has no problem with a solution{where}: put problem.py beside solution.py, "
            "reference.py beside submission.py, or NAME.py beside NAME_solution.py"
        )
    return found
