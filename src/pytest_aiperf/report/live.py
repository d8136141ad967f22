"""One line that says what is being measured, on the terminal of the pytest that was started."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from . import formatting, terminal


class Live:
    """The live line; where there is no terminal, nothing.

    A worker sends its line to ``address`` as a datagram, so that nothing waits for the terminal.
    """

    def __init__(self, plugins: pytest.PytestPluginManager, address: Path, *, worker: bool) -> None:
        self._plugins = plugins
        self._address = str(address)
        self._outgoing = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if worker else None
        self._shown = False
        if self._outgoing is not None:
            self._outgoing.setblocking(False)

    @property
    def _reporter(self) -> Any:
        # asked for each time: pytest makes its reporter only after plugins are configured
        reporter = self._plugins.getplugin("terminalreporter")
        return reporter if reporter is not None and reporter.isatty else None

    def listen(self) -> None:
        """Show what workers send; only on the controller of an xdist run, which never forks."""
        if self._reporter is None:
            return
        incoming = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            incoming.bind(self._address)
        except OSError:  # a path over 108 bytes: no live line, and nothing else is lost
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
            return
        with suppress(OSError):  # nobody listens, or the controller is busy
            self._outgoing.sendto(line.encode(), self._address)

    def _write(self, line: str) -> None:
        reporter = self._reporter
        if reporter is None:
            return
        if not self._shown:
            reporter.ensure_newline()  # the dots before it stay
        reporter.rewrite(line, erase=True)
        self._shown = True

    def clear(self) -> None:
        """Make room for what pytest itself says next."""
        if self._shown:
            self._shown = False
            self._reporter.rewrite("", erase=True)
            self._reporter.write("\r")
