"""Find and remove the files that this plugin wrote."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from pytest_aiperf.machine.cache_folder import is_tagged
from pytest_aiperf.records.results import writing
from pytest_aiperf.text import si, table

_SKIPPED: Final = frozenset({".git", ".venv", "node_modules", "site-packages"})
"""Large folders that no run writes into."""
SHOWN: Final = 3
"""Number of other programs' files that are named per folder, which may have thousands."""


def find_artifacts(below: Path, cache: Path, runs: str, artifacts: str) -> list[Path]:
    """List runs and profiles below a folder, and the builds and limits of a cache.

    A folder is listed only if it has this plugin's CACHEDIR.TAG. No symbolic link is followed.
    """
    paths: list[Path] = []
    for folder, names, _ in os.walk(below):
        for name in sorted({runs, artifacts} & set(names)):
            paths += _tagged(Path(folder, name))
        names[:] = [n for n in names if n not in {*_SKIPPED, runs, artifacts}]
    paths += _tagged(cache)
    ceilings = cache / "ceilings"
    if not cache.is_symlink() and not ceilings.is_symlink():
        paths += sorted(ceilings.glob("*.json"))
    whole = {*paths}  # a cache that lies in a folder of runs goes with it
    return [path for path in paths if not whole.intersection(path.parents)]


def _tagged(folder: Path) -> Iterator[Path]:
    """Yield the folder if it has this plugin's CACHEDIR.TAG, otherwise its subfolders that do."""
    if is_tagged(folder):
        yield folder
    elif folder.is_dir() and not folder.is_symlink():
        yield from (child for child in sorted(folder.iterdir()) if is_tagged(child))


def remove(paths: Sequence[Path], runs: str) -> None:
    """Remove paths, then their empty parent folders; the parent of a folder of runs stays."""
    for path in paths:
        with writing(path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    parents = {path.parent for path in paths if path.name != runs}
    for parent in sorted(parents, key=lambda p: -len(p.parts)):
        with suppress(OSError):  # it has other files, or is a volume of a container
            parent.rmdir()


def lines(paths: Sequence[Path], runs: str) -> list[str]:
    """Return a line per folder: the size of what :func:`remove` removes, and what it leaves."""
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path if path.name == runs else path.parent, []).append(path)
    rows = []
    for folder, removed in folders.items():
        kept = {*folder.iterdir()} - {*removed, *folders} if [folder] != removed else ()
        names = ", ".join(sorted(path.name for path in kept)[:SHOWN])
        more = f" and {len(kept) - SHOWN} more" if len(kept) > SHOWN else ""
        stays = f", where {names}{more} {'stays' if len(kept) == 1 else 'stay'}" if kept else ""
        rows.append([si(sum(map(size, removed)), "B"), f"{folder}{stays}"])
    return table(rows, "><")


def size(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder."""
    files = [path]
    if path.is_dir() and not path.is_symlink():
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sum(file.lstat().st_size for file in files)
