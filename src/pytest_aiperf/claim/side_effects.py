"""Finds what calls do beside their results: to globals that others use, and to files."""

import contextlib
import logging
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_aiperf.correctness import files
from pytest_aiperf.correctness.references import Kept, Place, References, State, replaced_functions
from pytest_aiperf.correctness.tensors import Args
from pytest_aiperf.model import Metric
from pytest_aiperf.rules import validity
from pytest_aiperf.text import si

MORE = 2
"""An arm is reported if the baseline always writes more than this many times as many bytes: then
the arm does not do all that the baseline does."""
MAX_NAMES = 4  #: Most names in one message.
WRITTEN_BYTES = 1 << 20
"""Bytes that an arm may write to files beyond what the baseline writes. If it writes more, the
files may hold memory that is not counted."""


class SideEffects:
    """What the calls of a claim's arms changed and wrote.

    A value that the baseline changes as well, such as a cache, is not reported: the baseline may
    have stored the present content itself.
    """

    def __init__(
        self,
        arms: Mapping[str, object],
        inputs: Callable[..., object],
        reference: Callable[..., object],
    ) -> None:
        self.references = {name: References(arm) for name, arm in arms.items()}
        self._users = {  # by user of values that no arm may change: the consequence, its values
            "the baseline": (
                "whether another arm slows the baseline down",
                self.references["baseline"],
            ),
            "inputs()": ("whether inputs are drawn as the test says", References(inputs)),
            "the reference": ("whether results are judged as the test says", References(reference)),
        }
        self._states: dict[Place, State] = {}
        self._changed: dict[str, set[Place]] = defaultdict(set)
        self._to_disk: dict[str, list[int]] = defaultdict(list)  # bytes of each checked call
        self._written: dict[str, list[int]] = defaultdict(list)
        self._files: dict[str, list[files.Changes]] = defaultdict(list)
        self._open_files: dict[str, list[files.Changes]] = defaultdict(list)
        self._logged: dict[str, list[int]] = defaultdict(list)
        self._starts: dict[str, list[bool]] = defaultdict(list)  # whether a call starts processes
        self._others: dict[str, validity.OtherProcesses] = defaultdict(validity.OtherProcesses)
        self._kept: Kept = ()  # objects that the arm referred to before its checked call
        self._borrowing: set[str] = set()  # arms whose results lie in memory of the module

    def begin(self, _name: str = "") -> None:
        """Read what the baseline, inputs() and the reference refer to, ahead of an arm's calls."""
        self._states = self._read()

    def end(self, name: str) -> None:
        """Find out what the calls of an arm since :meth:`begin` have changed there."""
        before, after = self._states, self._read()
        places = before.keys() | after.keys()
        self._changed[name] |= {p for p in places if before.get(p) != after.get(p)}

    def _read(self) -> dict[Place, State]:
        states: dict[Place, State] = {}
        for _, references in self._users.values():
            states |= references.states(but=states.keys())
        return states

    @contextlib.contextmanager
    def of(self, name: str, args: Args) -> Iterator[None]:
        """Observe one checked call of an arm."""
        files_before = files.read(args)
        if files.are_new(files_before | files.opened(files_before)):
            time.sleep(files.CLOCK_S)  # else files that inputs() wrote have the call's time stamp
        opened_before = files.opened(files_before)
        self._kept = self.references[name].kept()
        written, pages = _written_bytes(), _pages_of_children()
        self.begin()
        # not in a first call, which may start compilers
        with (
            self._others[name] if self._starts[name] else contextlib.nullcontext(),
            _counting_records(self._logged[name]),
        ):
            yield
        self.end(name)
        to_disk, in_all = _written_bytes()
        self._to_disk[name].append(to_disk - written[0])
        self._written[name].append(in_all - written[1])
        self._starts[name].append(_pages_of_children() != pages)
        files_after = files_before and files.read(args)
        self._files[name].append(files.changes(files_before, files_after))
        opened = files.changes(opened_before, files.opened(files_before))
        self._open_files[name].append(opened)

    def returns(self, name: str, returned: object) -> None:
        """Note an arm whose result is, in part, an object that its code refers to."""
        if self.references[name].holds(returned, self._kept):
            self._borrowing.add(name)

    def unchecked(self, label: Callable[[str], str], metrics: Collection[Metric]) -> Iterator[str]:
        """Describe effects that make the arms differ, or memory that is not counted.

        ``label`` names a place in the arguments. The claim is judged on ``metrics``.
        """
        yield from self._changed_for_others()
        for name in sorted(self._borrowing if "baseline" not in self._borrowing else ()):
            yield (
                f"copies of the result: {name} returns memory that its own code refers to (a "
                "global, a closure, an attribute), so a caller that changes the result changes "
                "what later calls use; the baseline's result is new"
            )
        yield from self._made_by_the_test()
        least = min(self._to_disk["baseline"], default=0)
        for name, counts in sorted(self._to_disk.items()):
            if least > MORE * max(counts):
                yield (
                    f"what calls write to files: baseline writes {si(least, 'B')} to disk, {name} "
                    f"{si(max(counts), 'B')}"
                )
        yield from self._left_in_files(label)
        # Messages take time, but change neither memory nor scores.
        is_timed = any(metric.is_time for metric in metrics)
        yield from self._written_to_open_files(() if is_timed else files.STREAMS.values())
        if is_timed:
            yield from self._not_logged()
            yield from self._rewritten_by_pytest()
        if Metric.MEMORY in metrics:
            yield from self._uncounted_memory()

    def _left_in_files(self, label: Callable[[str], str]) -> Iterator[str]:
        """Describe what only the baseline leaves in files that are arguments."""
        baseline = self._files["baseline"]
        least = min((call.nbytes for call in baseline), default=0)
        for name, calls in sorted(self._files.items() if baseline else ()):
            most = max(call.nbytes for call in calls)
            if missing := files.missing(calls, baseline):
                shown = ", ".join(
                    f"{kind} at {label(place)}" for place, kind in missing[:MAX_NAMES]
                )
                yield f"what calls leave in files: baseline leaves {shown}, and {name} does not"
            elif least > MORE * most:
                yield (
                    f"what calls leave in files: baseline's are of {si(least, 'B')}, {name}'s of "
                    f"{si(most, 'B')}"
                )

    def _written_to_open_files(self, but: Collection[str]) -> Iterator[str]:
        """Describe open files that the baseline writes to while an arm writes to no open file.

        Files that are arguments, or named in ``but``, are left out. An arm may write its data to
        another file.
        """
        baseline = self._open_files["baseline"]
        for name, calls in sorted(self._open_files.items() if baseline else ()):
            missing = [path for path, _ in files.missing(calls, baseline) if path not in but]
            if missing and not files.missing(baseline, calls):
                paths = ", ".join(missing[:MAX_NAMES])
                yield f"what calls write to files: baseline writes to {paths}, {name} to no file"

    def _not_logged(self) -> Iterator[str]:
        """Describe arms that make fewer than half as many log records as the baseline."""
        least = min(self._logged["baseline"], default=0)
        for name, counts in sorted(self._logged.items()):
            if least > MORE * max(counts):
                most = max(counts)
                yield f"what calls log: number of log records: baseline {least}, {name} {most}"

    def _rewritten_by_pytest(self) -> Iterator[str]:
        """Describe the baseline's assert statements that pytest has rewritten."""
        if functions := sorted(self.references["baseline"].asserting):
            yield (
                f"assert statements of {', '.join(functions[:MAX_NAMES])}: pytest rewrites those "
                "of test files, which makes the baseline slower: move them to another file"
            )

    def _changed_for_others(self) -> Iterator[str]:
        """Describe what arms change in what the baseline, inputs() or the reference uses."""
        for user, (unknown, references) in self._users.items():
            for name, places in sorted(self._changed.items()):
                others = places - self._changed["baseline"]
                labels = sorted(filter(None, {*map(references.label, others)}))
                if labels:
                    names = ", ".join(labels[:MAX_NAMES])
                    yield f"{unknown}: {name} changes {names}, which {user} uses"

    def _uncounted_memory(self) -> Iterator[str]:
        most = max(self._written["baseline"], default=0)
        for name, counts in sorted(self._written.items()):
            if min(counts) > WRITTEN_BYTES + most:
                yield (
                    f"memory of file systems: {name} writes {si(min(counts), 'B')} to files, "
                    "which may be in memory"
                )
        for name, starts in sorted(self._starts.items()):
            # the library's memory is not judged
            if name != "library" and (all(starts) or self._others[name].do_work()):
                yield f"memory of child processes that {name} starts"

    def _made_by_the_test(self) -> Iterator[str]:
        """Name library functions that were replaced, and slow settings that the test has made."""
        replaced = replaced_functions().union(*(r.replaced for r in self.references.values()))
        if replaced:
            names = sorted(replaced)
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            yield f"functions that the test has replaced: {', '.join(names[:MAX_NAMES])}{more}"
        if changed := validity.changed_since_start():
            yield f"settings that the test has changed: {', '.join(changed)}"


@contextlib.contextmanager
def _counting_records(counts: list[int]) -> Iterator[None]:
    """Append how many log records are made meanwhile."""
    usual, count = logging.getLogRecordFactory(), 0

    def counted(*words: Any, **named: Any) -> logging.LogRecord:
        nonlocal count
        count += 1
        return usual(*words, **named)

    logging.setLogRecordFactory(counted)
    try:
        yield
    finally:
        logging.setLogRecordFactory(usual)
        counts.append(count)


def _written_bytes() -> tuple[int, int]:
    """Return how much this process has written to disks, and to files, pipes and sockets."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return int(counts["write_bytes"]), int(counts["wchar"])
    return 0, 0


def _pages_of_children() -> int:
    """Return the pages that ended child processes have touched."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
