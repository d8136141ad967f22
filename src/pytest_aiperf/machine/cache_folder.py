"""Folders of generated data: tagged, so that ``clean`` removes no others, or empty for a run."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

TAG_FILE: Final = "CACHEDIR.TAG"
"""Name of the file that marks a folder of generated data: https://bford.info/cachedir/."""
_TAG: Final = """\
Signature: 8a477f597d28d172789f06886806bc55
# Created by pytest-aiperf; `python -m pytest_aiperf clean` removes this folder.
"""
BUILD_CACHES: Final = {
    "PYTEST_AIPERF_CACHE": "nvcc",
    "TRITON_CACHE_DIR": "Triton",
    "TORCHINDUCTOR_CACHE_DIR": "Inductor",
    "TORCH_EXTENSIONS_DIR": "torch extensions",
    "CUPY_CACHE_DIR": "CuPy",
    "CUDA_CACHE_PATH": "the CUDA driver",
}
"""Environment variables that name the folder of a build cache, and what builds into it."""


@contextmanager
def empty_build_caches() -> Iterator[None]:
    """Let this process and those that it starts build into a new folder, removed in the end."""
    with (
        tempfile.TemporaryDirectory(prefix="pytest-aiperf-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as environ,
    ):
        for variable in BUILD_CACHES:
            environ.setenv(variable, str(Path(folder, variable.lower())))
        yield


def create_tagged(folder: Path, mode: int = 0o777) -> None:
    """Create a folder and tag it, unless it exists with content, which may belong to others."""
    folder.mkdir(mode, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        return
    tag = folder / TAG_FILE
    try:
        tag.write_text(_TAG, encoding="utf-8")
    except OSError:
        tag.unlink(missing_ok=True)
        raise


def is_tagged(folder: Path) -> bool:
    """Whether this plugin created a folder for the current user; a symbolic link never counts."""
    tag = folder / TAG_FILE
    if folder.is_symlink() or tag.is_symlink() or not tag.is_file():
        return False
    return folder.stat().st_uid == os.geteuid() and tag.read_text(errors="replace") == _TAG
