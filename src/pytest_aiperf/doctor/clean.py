"""What this plugin left on the disk, and how it goes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pytest_aiperf.records.results import writing

# A folder is ours by what it is called and by what lies in it, never by where it lies.
_RUN: Final = re.compile(r"\d{8}T\d{6}\.\d{6}-\d+")
_BUILD: Final = re.compile(r"[0-9a-f]{32}(\.lock|\.new)?")
_CEILINGS: Final = re.compile(r"[\w+.-]+\.json")
_FOREIGN: Final = frozenset({".git", ".venv", "node_modules", "site-packages"})


def find_artifacts(below: Path, cache: Path, runs: str, artifacts: str) -> list[Path]:
    """List what is ours: runs and artefacts below a folder, builds and ceilings in a cache.

    No link is followed. A folder that also holds something else stays, with that in it.
    """
    found: list[Path] = []
    for folder, names, _ in os.walk(below, followlinks=False):
        for name in sorted({runs, artifacts} & set(names)):
            place = Path(folder, name)
            if not place.is_symlink():
                found += _runs(place, mark=name == runs)
        names[:] = [n for n in names if n not in {*_FOREIGN, runs, artifacts}]
    if cache.is_dir() and not cache.is_symlink():
        found += [p for p in sorted(cache.iterdir()) if _BUILD.fullmatch(p.name) and _plain(p)]
        kept = cache / "ceilings"
        if kept.is_dir() and not kept.is_symlink():
            found += [p for p in sorted(kept.iterdir()) if _CEILINGS.fullmatch(p.name)]
    return found


def _runs(place: Path, *, mark: bool) -> Iterator[Path]:
    """List the runs of one folder; with ``mark``, also what stands beside them."""
    runs = [p for p in sorted(place.iterdir()) if _RUN.fullmatch(p.name) and _plain(p)]
    yield from runs
    if mark:
        yield from (p for p in sorted(place.glob("*.lock")) if p.is_file() and _plain(p))
        latest, ignore = place / "latest", place / ".gitignore"
        if latest.is_symlink() and _RUN.fullmatch(str(latest.readlink())):
            yield latest
        if ignore.is_file() and not ignore.is_symlink() and ignore.read_bytes() == b"*\n":
            yield ignore


def _plain(path: Path) -> bool:
    return not path.is_symlink() and path.stat().st_uid == os.geteuid()


def remove(found: Sequence[Path]) -> None:
    """Remove what was listed, and each folder that nothing is left in."""
    for path in found:
        with writing(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    for folder in sorted({path.parent for path in found}, key=lambda p: -len(p.parts)):
        if not any(folder.iterdir()):
            folder.rmdir()


def size(path: Path) -> int:
    """Count the bytes of a file, or of the files in a folder."""
    files = [path]
    if path.is_dir() and not path.is_symlink():
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sum(file.lstat().st_size for file in files)
