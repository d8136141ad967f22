"""Finds what calls leave in files: those among their arguments, and those that are open.

Names, modes, lengths and targets of links are compared, and whether a call has written a file at
all. The contents of files are not compared, as two formats of the same data may both be right. Of
files that are open and no arguments, such as a log, only writes are compared.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import stored, tensors
from .tensors import Args

MAX_FILES = 1000
"""If the arguments and their folders have more files than this, none of them is compared."""
CLOCK_S = 0.01
"""Longest step of a file system's clock, which advances every 4 ms or every 10 ms."""
STREAMS = {1: "standard output", 2: "standard error"}
"""Names of the streams for messages, by descriptor."""
MAX_TEXT = 4096  #: A path has fewer characters than this.
Entry = tuple[str, str]  #: Place of a file, and its kind and mode, or the target of a link.


@dataclass(frozen=True, slots=True)
class State:
    """One file or folder."""

    kind: str  #: Type and mode as ``ls`` writes them, or the target of a link.
    nbytes: int = 0
    changed_ns: int = 0
    number: int = 0  #: Inode number, which changes if the file is replaced.
    position: int = 0  #: Offset of the next write, for open files that are no arguments.


@dataclass(frozen=True, slots=True)
class Changes:
    """Files and folders that one call has created, changed or removed."""

    entries: frozenset[Entry]
    nbytes: int  #: Bytes of the files that the call has created or changed.


NOTHING = State("nothing")


def read(args: Args) -> dict[str, State]:
    """Return the state of the files among the arguments by place, including nonexistent files.

    Return {} if there are too many.
    """
    states: dict[str, State] = {}
    for place, state in _files(args):
        states[place] = state
        if len(states) > MAX_FILES:
            return {}
    return states


def opened(arguments: Mapping[str, State]) -> dict[str, State]:
    """Return the state, by path or stream, of files open for writing that are no arguments."""
    argument_inodes, states = {state.number for state in arguments.values()}, {}
    streams = {_inode(descriptor): name for descriptor, name in STREAMS.items()}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):  # the descriptor has been closed
            file = descriptor.stat()
            lines = Path("/proc/self/fdinfo", descriptor.name).read_text().splitlines()
            rows = dict(line.split(":") for line in lines[:2])
            is_written = int(rows["flags"], 8) & os.O_ACCMODE != os.O_RDONLY
            if stat.S_ISREG(file.st_mode) and is_written and file.st_ino not in argument_inodes:
                states[streams.get(file.st_ino) or str(descriptor.readlink())] = State(
                    stat.filemode(file.st_mode),
                    changed_ns=file.st_mtime_ns,
                    number=file.st_ino,
                    position=int(rows["pos"]),
                )
    return states


def _inode(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:  # it is closed
        return None


def are_new(states: Mapping[str, State]) -> bool:
    """Whether a file was written so recently that another write may get the same time stamp."""
    now = time.time_ns()
    return any(now - state.changed_ns < CLOCK_S * 1e9 for state in states.values())


def changes(before: Mapping[str, State], after: Mapping[str, State]) -> Changes:
    """Compare what :func:`read` returned before a call and after it."""
    if not before or not after:
        return Changes(frozenset(), 0)
    places = [p for p in before.keys() | after.keys() if before.get(p) != after.get(p)]
    states = {place: after.get(place, NOTHING) for place in places}
    entries = frozenset((place, state.kind) for place, state in states.items())
    return Changes(entries, sum(state.nbytes for state in states.values()))


def missing(calls: Sequence[Changes], baseline: Sequence[Changes]) -> list[Entry]:
    """Return the entries that each call of the baseline leaves and no call of an arm leaves."""
    first, *others = (call.entries for call in baseline)
    always = first.intersection(*others)
    return sorted(always.difference(*(call.entries for call in calls)))


def _files(args: Args) -> Iterator[tuple[str, State]]:
    for name, leaf in tensors.walk(args, "args"):
        if root := _path(leaf):
            yield name, _state(root)
            for folder, names, files in os.walk(root):  # it follows no links
                for path in (Path(folder, name) for name in (*names, *files)):
                    yield f"{name}/{path.relative_to(root)}", _state(path)
        elif stored.is_one_of(type(leaf), stored.ON_DISK):
            with contextlib.suppress(OSError, ValueError):  # it is closed
                yield name, _described(os.fstat(leaf.fileno()))


def _path(leaf: Any) -> Path | None:
    """Return an argument as a path; None if it is no path."""
    if type(leaf) is type(Path()):
        return Path(leaf)
    is_text = type(leaf) is str and leaf.startswith("/") and len(leaf) < MAX_TEXT
    return Path(leaf) if is_text and "\0" not in leaf and _can_be_a_name(leaf) else None


def _can_be_a_name(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _state(path: Path) -> State:
    try:
        found = path.lstat()
        is_link = stat.S_ISLNK(found.st_mode)
        return State(f"a link to {path.readlink()}") if is_link else _described(found)
    except OSError:
        return NOTHING


def _described(found: os.stat_result) -> State:
    mode = stat.filemode(found.st_mode)
    if stat.S_ISDIR(found.st_mode):  # temporary files of a call change a folder's time as well
        return State(mode)
    return State(mode, found.st_size, found.st_mtime_ns, found.st_ino)
