"""The live line: the progress of the current claim, on the controller's terminal."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from . import terminal

MIN_ENDED: Final = 3
"""Number of tests that must have ended before the time left is shown: one alone says little."""


class Live:
    """The live line; nothing is shown if the output is not a terminal.

    An xdist worker sends its figures as a datagram to ``address``, so that it never has to wait.
    """

    def __init__(self, plugins: pytest.PytestPluginManager, address: Path, *, worker: bool) -> None:
        self._plugins = plugins
        self._address = str(address)
        self._outgoing = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if worker else None
        self._shown = False
        self._count = self._ended = 0
        self._started = 0.0

    def begin(self, count: int) -> None:
        """Set the number of tests; each call of :meth:`ended` then counts one."""
        self._count, self._started = count, time.monotonic()

    def ended(self) -> None:
        self._ended += 1

    def _position(self) -> dict[str, object]:
        """Return the number of the current test, the number of tests and the time left."""
        if not self._count:
            return {}
        position: dict[str, object] = {
            "number": min(self._ended + 1, self._count),
            "count": self._count,
        }
        if self._ended < MIN_ENDED:
            return position
        each_s = (time.monotonic() - self._started) / self._ended
        minutes = round(each_s * (self._count - self._ended) / 60)
        return position | {"left": f"{minutes} min left" if minutes else "under 1 min left"}

    @property
    def _reporter(self) -> Any:
        # not stored, because pytest creates its reporter after it configures this plugin
        reporter = self._plugins.getplugin("terminalreporter")
        return reporter if reporter is not None and reporter.isatty else None

    def listen(self) -> None:
        """Show the workers' lines; call it only on an xdist controller, which never forks."""
        if self._reporter is None:
            return
        incoming = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            incoming.bind(self._address)
        except OSError:  # the socket's path is too long: show no live line
            incoming.close()
            return
        threading.Thread(target=self._forward, args=(incoming,), daemon=True).start()

    def _forward(self, incoming: socket.socket) -> None:
        while True:
            with suppress(ValueError):  # a datagram that was cut off
                self._write(json.loads(incoming.recv(4096)))

    def show(self, figures: Mapping[str, object]) -> None:
        if self._outgoing is None:
            self._write(figures)
        else:
            with suppress(OSError):  # the controller is busy or does not listen
                data = json.dumps(figures).encode()
                self._outgoing.sendto(data, socket.MSG_DONTWAIT, self._address)

    def _write(self, figures: Mapping[str, object]) -> None:
        if (reporter := self._reporter) is not None:
            if not self._shown:
                reporter.ensure_newline()  # keeps pytest's dots from being overwritten
            width = shutil.get_terminal_size().columns - 1  # a full line would wrap
            line = terminal.live_line({**figures, **self._position()}, width)
            reporter.rewrite(line, erase=True)
            self._shown = True

    def clear(self) -> None:
        """Remove the line; call this before pytest prints."""
        if self._shown:
            self._shown = False
            self._reporter.rewrite("", erase=True)
            self._reporter.write("\r")
