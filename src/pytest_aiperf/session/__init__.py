"""One pytest session: its settings, records and fixtures, and one process per claim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import pytest

if TYPE_CHECKING:
    from .session import Session  # noqa: F401  named in the string below

Kind = Literal["gpu", "cpu"]  #: What a claim is about, and so the option that measures it.
KINDS: Final[tuple[Kind, ...]] = ("gpu", "cpu")
SESSION = pytest.StashKey["Session"]()  #: Key of this process's session in config.stash.
