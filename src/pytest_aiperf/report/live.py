"""The live line: the progress of the current claim, on the controller's terminal."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from . import formatting, terminal


class Live:
    """The live line; nothing is shown if the output is not a terminal.

    An xdist worker sends its line as a datagram to ``address``, so that it never has to wait.
    """

    def __init__(self, plugins: pytest.PytestPluginManager, address: Path, *, worker: bool) -> None:
        self._plugins = plugins
        self._address = str(address)
        self._outgoing = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if worker else None
        self._shown = False

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
            self._write(formatting.clean(incoming.recv(4096).decode(errors="replace")))

    def show(self, figures: Mapping[str, object]) -> None:
        line = terminal.live_line(figures)
        if self._outgoing is None:
            self._write(line)
        else:
            with suppress(OSError):  # the controller is busy or does not listen
                self._outgoing.sendto(line.encode(), socket.MSG_DONTWAIT, self._address)

    def _write(self, line: str) -> None:
        if (reporter := self._reporter) is not None:
            if not self._shown:
                reporter.ensure_newline()  # keeps pytest's dots from being overwritten
            reporter.rewrite(line, erase=True)
            self._shown = True

    def clear(self) -> None:
        """Remove the line; call this before pytest prints."""
        if self._shown:
            self._shown = False
            self._reporter.rewrite("", erase=True)
            self._reporter.write("\r")
