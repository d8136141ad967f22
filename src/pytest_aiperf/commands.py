"""What each command of `python -m pytest_aiperf` does, given its arguments."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from .build import nvcc
from .doctor import bundle, clean, doctor, host_facts
from .errors import InvalidMeasurement, UsageError
from .limits import ceilings as limits
from .machine.gpu_lock import GpuLock
from .model import Outcome, Result
from .profilers import capture as captures
from .profilers import target, tools
from .records import comparison, expectations, history, journal, shards
from .records.results import atomic_write, document, dumps, lines, read_json, read_results
from .report import formatting, markdown, page
from .report import terminal as views
from .session import session
from .session.cuda_machine import CudaMachine, measurable_gpus
from .text import si

DONE, REFUSED, MISUSE = 0, 1, 2


def accept(chosen: argparse.Namespace) -> int:
    """Write a run's figures into expectations.yaml and results/, on any machine.

    A result is accepted when a full run measured it on a GPU, it is conclusive and it holds what
    is required today; the others are listed with their reasons. `require` is never written, and
    expectations.yaml changes last and as a whole.
    """
    results = read_results(chosen.measured)
    machine = read_json(chosen.measured).get("machine_info", {})
    update = expectations.propose_update(chosen.expectations, results, datetime.now(UTC).date())
    if not chosen.dry_run:
        update = update.write(chosen.results, machine)
    ends = "unchanged" if chosen.dry_run or not update.accepted else "written"
    counts = f"{len(update.accepted)} accepted, {len(update.refused)} refused"
    said = [*update.lines(), update.diff(), f"{counts}; {chosen.expectations} {ends}"]
    sys.stdout.write("".join(f"{line}\n" for line in said if line))
    return REFUSED if update.refused and not update.accepted else DONE


def ceilings(chosen: argparse.Namespace) -> int:
    """Print what this machine's GPU reaches of each limit, beside its datasheet.

    Measured once for each GPU, driver and torch, on random data; the best block counts. Matrix
    rates are the best of short bursts, at full clocks, and of sustained running, under the power
    cap: a claim's own rate lies in between. Of several GPUs the first is measured, and the links
    between all.
    """
    gpus, say = measurable_gpus(CudaMachine()), _say
    with GpuLock([g.uuid for g in gpus], on_wait=say).exclusive_host():
        clock = CudaMachine().open_device(gpus[0])
        found = limits.known(clock, (*limits.DEVICE, *limits.HOST), say, fresh=chosen.fresh)
        if len(gpus) > 1:
            try:
                found |= limits.known_links(gpus, say, fresh=chosen.fresh)
            except InvalidMeasurement as why:
                say(str(why))
    assert clock.gpu is not None
    sys.stdout.write("\n".join([clock.gpu.name, *limits.table(found, clock.gpu.key), ""]))
    if chosen.json:
        written = dumps(limits.record(clock.gpu, found), "ceilings", indent=1)
        atomic_write(chosen.json, f"{written}\n")
    return DONE


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def capture(chosen: argparse.Namespace) -> int:
    """Profile one function of your own, as `pytest --profile` does with an arm.

    It is warmed up and called once (or as often as said) inside the range "aiperf", in a process
    under the tool; the artefact and the tool's output lie under artifacts/.
    """
    tool, preset = tools.chosen(chosen.tool)
    path, _, name = chosen.function.partition("::")
    gpus = CudaMachine().gpus()
    job = target.job(os.environ)
    if job is not None:
        clock = CudaMachine().open_device(gpus[0] if gpus else None)
        lease = GpuLock([g.uuid for g in gpus[:1]])
        target.perform(job, clock, lease, lambda: (_function(Path(path), name), None))
        return DONE
    run = journal.new_run_id(datetime.now(UTC), os.getpid())
    order = captures.CaptureRequest(
        tool,
        preset,
        Path(captures.ARTIFACTS, run, captures.safe(name)).absolute(),
        (sys.executable, "-m", "pytest_aiperf", "capture", chosen.tool, chosen.function),
        chosen.deadline,
        chosen.calls,
    )
    found, _ = captures.capture(order, "call")
    sys.stdout.write("".join(f"{line}\n" for line in views.profile(name, [found])))
    return DONE


def report(chosen: argparse.Namespace) -> int:
    """Write a run, or several, as one HTML page, as Markdown, or into a README.

    Explanations and code come from the tests and kernels below the current folder, where they are.
    `--readme` replaces what stands between `<!-- results -->` and `<!-- /results -->`.
    """
    results = [result for path in chosen.measured for result in read_results(path)]
    content = read_json(chosen.measured[0])
    machine = {"commit": content.get("commit_info")}
    if isinstance(said := content.get("machine_info"), dict):
        machine |= said
    if chosen.readme:
        views.embed(chosen.readme, "results", markdown.tables(results))
        return DONE
    if chosen.format == "md":
        text = markdown.markdown(results, Path.cwd())
    else:
        chosen.output = chosen.output or Path("report.html")
        folder = chosen.output.parent
        text = page.page(results, machine, chosen.title, root=Path.cwd(), folder=folder)
    if chosen.output:
        atomic_write(chosen.output, text)
        sys.stdout.write(f"written: {chosen.output}\n")
    else:
        sys.stdout.write(text)
    return DONE


def compare(chosen: argparse.Namespace) -> int:
    """Compare two runs claim by claim, on equal kinds of GPU: exit status 1 on a regression."""
    old, new = (_measured(path) for path in (chosen.old, chosen.new))
    found = comparison.changes(old, new)
    lines = [f"differs: {line}" for line in comparison.environment(old, new)]
    for change in found:
        ratio = f"  {change.ratio}" if change.ratio else ""
        why = f"  ({change.why})" if change.why else ""
        lines.append(f"{change.state:<9}  {change.key}  {change.claim}{ratio}{why}")
    count = Counter(change.state.value for change in found)
    lines.append(", ".join(f"{n} {state}" for state, n in count.items()) or "no claims")
    sys.stdout.write("".join(f"{formatting.clean(line)}\n" for line in lines))
    return REFUSED if count[comparison.State.REGRESSED] else DONE


def merge(chosen: argparse.Namespace) -> int:
    """Put the shards of one run together; of a claim that stands in several, the last counts.

    Every record is held to the schema, so files of unknown origin may be merged.
    """
    merged = {(r.claim, r.key): r for path in chosen.parts for r in read_results(path)}
    for claim, key in merged:
        if not claim.isprintable():
            raise UsageError(f"{claim!r} is no claim's name: it has a line break or the like")
        if not re.fullmatch(r"[a-z0-9]*", key):  # files are named after it
            raise UsageError(f"{key!r} is no kind of GPU, as h200 and 2xh200 are")
    machine = read_json(chosen.parts[0]).get("machine_info", {})
    content = document([merged[k] for k in sorted(merged)], machine, datetime.now(UTC))
    atomic_write(chosen.output, lines(content))
    sys.stdout.write(f"{len(merged)} claims written: {chosen.output}\n")
    return DONE


def gate(chosen: argparse.Namespace) -> int:
    """Hold a nightly run against the history of its GPU, and add it there.

    A claim is flagged below its own band, and fails (exit status 1) when every fresh run
    (--again) shows it as well. Sentinels out of their bands void the night; a shift of many
    claims at once is one failure.
    """
    results = [r for r in read_results(chosen.measured) if not r.host]
    again = [read_results(path) for path in chosen.again]
    kinds = sorted({r.key for r in results if r.speedup})
    if not kinds:
        raise UsageError(f"{chosen.measured} holds no figure of a GPU: there is nothing to hold")
    lines: list[str] = []
    flagged: set[str] = set()
    fails = False
    for kind in kinds:
        night = history.night_of([r for r in results if r.key == kind])
        path = chosen.history / f"{kind}.jsonl"
        held = history.judge(history.read_history(path), night)
        sure = history.confirmed(held.flags, again)
        lines += [f"void: {held.void}"] * bool(held.void)
        lines += [f"shift: {held.shift}"] * bool(held.shift)
        told = "confirmed" if again else "flagged, to be measured again"
        lines += [f"{told if flag in sure or not again else 'not confirmed'}: {flag}"
                  for flag in held.flags if not held.shift]  # fmt: skip
        lines.append(
            f"{kind}: {len(night.claims)} claims, {len(held.provisional)} provisional, "
            f"{len(held.flags)} flagged, {len(sure)} confirmed"
        )
        flagged |= {flag.claim for flag in held.flags}
        fails |= bool(sure or (held.shift and again))
        if again or not held.flags:  # a night is added once, when all is known of it
            history.append(path, replace(night, void=held.void))
    if chosen.flagged:
        ids = sorted({r.nodeid for r in results if r.claim in flagged})
        atomic_write(chosen.flagged, "".join(f"{nodeid}\n" for nodeid in ids))
    sys.stdout.write("".join(f"{formatting.clean(line)}\n" for line in lines))
    return REFUSED if fails else DONE


def drift(chosen: argparse.Namespace) -> int:
    """Look for lasting steps in a history that no single night shows; exit status 1 if there are.

    The weekly pass: change points by PELT over the nights of the last epoch.
    """
    nights = history.read_history(chosen.history)
    found = history.change_points(nights) if nights else []
    for claim, night, ratio in found:
        sys.stdout.write(f"{formatting.clean(claim)}: {ratio:.3f}x since {night}\n")
    return REFUSED if found else DONE


def complete(chosen: argparse.Namespace) -> int:
    """Tell whether every claim that a run, or all shards of one, set out to measure has ended.

    Exit status 1 where one has no outcome, or broke before it had a figure.
    """
    found = shards.gathered(chosen.runs)
    lines = []
    for claim, result in sorted(found.items()):
        if result is None:
            lines.append(f"no outcome: {claim}")
        elif shards.broken(result):
            lines.append(f"{result.outcome}: {claim}: {result.message.partition(chr(10))[0]}")
    count = Counter(str(r.outcome if r else Outcome.NOT_RUN) for r in found.values())
    said = ", ".join(f"{n} {outcome}" for outcome, n in sorted(count.items()))
    lines.append(f"{len(found)} claims: {said or 'none'}")
    sys.stdout.write("".join(f"{formatting.clean(line)}\n" for line in lines))
    return REFUSED if len(lines) > 1 else DONE


def examine(chosen: argparse.Namespace) -> int:
    """Say what works on this machine, and what to do about the rest.

    Exit status 1 where something is broken; what is merely not here is no reason. What
    `--bundle` writes names neither the machine nor its user, and no secret of the environment.
    """
    if chosen.capture and not chosen.bundle:
        raise UsageError("--capture adds to an archive: name one with --bundle FILE.tar.gz")
    machine = host_facts.Host()
    found = doctor.checks(machine)
    sys.stdout.write("".join(f"{formatting.clean(check)}\n" for check in found))
    if chosen.bundle:
        bundle.write(chosen.bundle, bundle.contents(machine, found, capture=chosen.capture))
        sys.stdout.write(f"written: {chosen.bundle}\n")
    return REFUSED if bundle.broken(found) else DONE


def tidy(chosen: argparse.Namespace) -> int:
    """Remove builds, ceilings, runs and artefacts that are ours, and nothing else.

    Runs and artefacts go below the current folder; accepted results and links stay. Not to be
    called while a session runs.
    """
    found = clean.find_artifacts(Path.cwd(), nvcc.default_cache(), session.RUNS, captures.ARTIFACTS)
    total = 0
    for path in found:
        total += clean.size(path)
        sys.stdout.write(f"{formatting.clean(path)}\n")
    if not chosen.dry_run:
        clean.remove(found)
    told = "would go" if chosen.dry_run else "removed"
    sys.stdout.write(f"{told}: {len(found)}, {si(float(total), 'B')}\n")
    return DONE


def _measured(path: Path) -> list[Result]:
    """Read a results file, or all of a folder."""
    found = (f for f in path.glob("*.json") if not f.name.startswith(("ceilings-", "proof-")))
    files = sorted(found) if path.is_dir() else [path]
    return [result for file in files for result in read_results(file)]


def _function(path: Path, name: str) -> Callable[[], object]:
    spec = spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file: name FILE.py::FUNCTION")
    sys.path.insert(0, str(path.parent))  # as if it were run as a script
    sys.modules[path.stem] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[], object] | None = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"{path} has no function {name!r}")
    return found
