"""One pytest session: its settings, records and fixtures, and one process per claim."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .session import Session  # noqa: F401  ruff does not see the string below

SESSION = pytest.StashKey["Session"]()  #: The session of this process, in pytest's config.
