"""The live line shows what is measured, and never blocks or breaks a run."""

import time
from types import SimpleNamespace

import pytest

from pytest_aiperf.report.live import Live

FIGURES = {"claim": "ch07/copy", "phase": "measuring", "replicate": 3, "most": 32}
LINE = "ch07/copy  measuring  replicate 3/32"


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
    limit = time.monotonic() + 60
    while LINE not in terminal.written:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_path_too_long_for_a_socket_costs_only_the_line(tmp_path):
    address = tmp_path / ("x" * 120)
    Live(Terminal(), address, worker=False).listen()
    Live(Terminal(), address, worker=True).show(FIGURES)


def test_a_worker_whose_controller_does_not_listen_goes_on(tmp_path):
    Live(Terminal(), tmp_path / "live", worker=True).show(FIGURES)
