"""One pytest session: its settings, records and fixtures, and one process per claim."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .session import Session  # noqa: F401  named in the string below

SESSION = pytest.StashKey["Session"]()  #: Key of this process's session in config.stash.
