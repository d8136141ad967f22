"""What the server of tests/fork_server.py imports: all that a run on the fake GPU imports."""

import contextlib
import logging
import os
import sys
import tempfile
from typing import Final

import pytest
import scipy.special  # noqa: F401  a run imports it with its first verdict

_first = os.environ.get("PYTHONPATH", "").split(os.pathsep)
PATH: Final = [entry for entry in sys.path if entry and entry not in _first]
"""Where Python looks for modules after PYTHONPATH."""

# Run pytest in an empty folder: it warns of plugins that were imported in any other way.
with (
    tempfile.TemporaryDirectory() as folder,
    open(os.devnull, "w") as nowhere,  # noqa: PTH123  no path of a file
    contextlib.chdir(folder),
    contextlib.redirect_stdout(nowhere),
    contextlib.redirect_stderr(nowhere),
):
    pytest.main(["-pno:cacheprovider", "-pno:hypothesispytest", "-ptests.fake_gpu", "--gpu"])
logging.getLogger("torch.__trace").disabled = False  # the plugin has pytest disable it
