"""The live line shows what is measured, and never blocks or breaks a run."""

import socket
import time
from types import SimpleNamespace

import pytest

from pytest_aiperf.report.live import Live

FIGURES = {"claim": "ch07/copy", "phase": "measuring", "replicate": 3, "most": 32}
LINE = "ch07/copy  measuring  replicate 3  of at most 32"


class Terminal:
    """Stands in for pytest's plugin manager and terminal reporter."""

    def __init__(self, *, isatty: bool = True) -> None:
        self.written = []
        self.isatty = isatty

    def getplugin(self, name):
        assert name == "terminalreporter"
        return self

    def ensure_newline(self):
        self.written.append("\n")

    def rewrite(self, line, *, erase):
        assert erase
        self.written.append(line)

    def write(self, text):
        assert text == "\r"


def test_the_line_is_shown_and_gives_way(tmp_path):
    terminal = Terminal()
    live = Live(terminal, tmp_path / "live", worker=False)
    live.show(FIGURES)
    live.show(FIGURES)
    live.clear()
    live.clear()
    assert terminal.written == ["\n", LINE, LINE, ""]


@pytest.mark.parametrize(
    "plugins", [Terminal(isatty=False), SimpleNamespace(getplugin=lambda _: None)]
)
def test_without_a_terminal_nothing_is_written(tmp_path, plugins):
    live = Live(plugins, tmp_path / "live", worker=False)
    live.listen()
    live.show(FIGURES)
    live.clear()
    assert not getattr(plugins, "written", None)
    assert not (tmp_path / "live").exists()


def test_workers_lines_come_to_the_controller(tmp_path):
    terminal = Terminal()
    controller = Live(terminal, tmp_path / "live", worker=False)
    controller.listen()
    Live(Terminal(), tmp_path / "live", worker=True).show(FIGURES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"{", str(tmp_path / "live"))  # must not end the thread that listens
    Live(Terminal(), tmp_path / "live", worker=True).show(FIGURES)
    limit = time.monotonic() + 60
    while terminal.written.count(LINE) < 2 not in terminal.written:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_line_is_as_wide_as_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "21")
    terminal = Terminal()
    Live(terminal, tmp_path / "live", worker=False).show(FIGURES)
    assert terminal.written == ["\n", "ch07/copy  measuring"]


def test_the_claims_are_counted_and_the_time_left_is_shown_once_it_is_known(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    terminal = Terminal()
    live = Live(terminal, tmp_path / "live", worker=False)
    live.begin(24)
    for _ in range(24):
        live.show({"claim": "a/b"})
        now[0] += 30
        live.ended()
    live.show({"claim": "a/b"})
    lines = terminal.written[1:]
    assert lines[:3] == [f"{i} of 24  a/b" for i in (1, 2, 3)]
    assert lines[3] == "4 of 24  10 min left  a/b"
    assert lines[-1] == "24 of 24  under 1 min left  a/b"


def test_a_path_too_long_for_a_socket_costs_only_the_line(tmp_path):
    address = tmp_path / ("x" * 120)
    Live(Terminal(), address, worker=False).listen()
    Live(Terminal(), address, worker=True).show(FIGURES)


def test_a_worker_whose_controller_does_not_listen_goes_on(tmp_path):
    Live(Terminal(), tmp_path / "live", worker=True).show(FIGURES)
