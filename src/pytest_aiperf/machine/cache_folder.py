"""Tag the folders that this plugin creates, so that ``clean`` removes no others."""

import os
from pathlib import Path
from typing import Final

TAG_FILE: Final = "CACHEDIR.TAG"
"""Name of the file that marks a folder of generated data: https://bford.info/cachedir/."""
_TAG: Final = """\
Signature: 8a477f597d28d172789f06886806bc55
# Created by pytest-aiperf; `python -m pytest_aiperf clean` removes this folder.
"""


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
