"""The page of a history draws each claim's nights, bands, flags, epochs and lasting changes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from aiperf_nightly import history, page
from aiperf_nightly.history import Night

from pytest_aiperf.cli import main

HOSTILE = "x\"'><script>alert(1)</script>"


def nights(count=40, **changes):
    """Make nights of three claims: the last night of `drop` is low, `step` is faster from 20 on."""
    made = []
    for i in range(count):
        wobble = 1 + 0.001 * ((i * 7) % 5 - 2)
        claims = {
            "ch01/calm": 2.0 * wobble,
            "ch02/drop": 1.5 * wobble * (0.8 if i == count - 1 else 1.0),
            "ch03/step": 3.0 * wobble * (1.1 if i >= 20 else 1.0),
        }
        day = f"2026-{9 + i // 30:02}-{1 + i % 30:02}T02:00:00+00:00"
        made.append(Night(day, f"run{i}", "h200", "driver 580", claims, {"ch01/calm": 1e-3}))
    return [dataclasses.replace(night, **changes) for night in made]


def figures(text):
    """Return the HTML of each claim's chart by its id, in the order of the page."""
    found = re.findall(r'<figure class="series" id="([^"]*)">(.*?)</figure>', text, re.DOTALL)
    assert len(found) == len(dict(found))
    return dict(found)


def test_claims_that_changed_come_first_with_what_changed():
    drawn = figures(page.page([nights()]))
    assert list(drawn) == [
        *("h200/speedup/ch02/drop", "h200/speedup/ch03/step", "h200/speedup/ch01/calm"),
        "h200/seconds/ch01/calm",
    ]
    drop, step, calm, sentinel = drawn.values()
    assert "BELOW ITS BAND" in drop
    assert drop.count('class="point v v-regressed"') == 1
    assert "1.100x since 2026-09-21" in step
    assert step.count('class="step v-improved"') == 1
    assert 'class="step' not in calm
    assert "BELOW" not in calm + step
    for text in drawn.values():
        assert text.count('class="night"') == 40
        assert text.count("<polyline") == text.count('<polygon class="band"') == 1
    assert "<b>1.201x</b>" in drop
    assert "1.000 ms" in sentinel
    assert "band 1.4" in drop


def test_epochs_and_void_nights_are_marked():
    later = nights(epoch="driver 590")
    void = [dataclasses.replace(later[20], void="sick")]
    text = page.page([[*nights(20), *later[:20], *void, *later[21:]]])
    calm = figures(text)["h200/speedup/ch01/calm"]
    assert calm.count('class="lim"') == 1
    assert calm.count("<polyline") == 2
    assert calm.count('class="point void"') == 1
    assert "void: sick" in calm
    assert "driver 580 &rarr; driver 590" in text
    assert "1 void" in text


def test_only_the_latest_nights_are_drawn_and_a_void_last_night_is_announced(monkeypatch):
    monkeypatch.setattr(page, "MAX_DRAWN", 12)
    made = nights()
    text = page.page([[*made[:-1], dataclasses.replace(made[-1], void="sick")]])
    assert {chart.count('class="night"') for chart in figures(text).values()} == {12}
    assert "40, the last 12 are drawn" in text
    assert "The latest night is void: sick" in text
    assert "BELOW ITS BAND" not in text


def test_the_page_loads_nothing_and_no_text_of_a_history_becomes_structure():
    made = nights(3, key=HOSTILE, epoch=HOSTILE, claims={HOSTILE: 2.0}, void=HOSTILE)
    text = page.page([made])
    assert text.count("<script") == 1
    assert "alert(1)</script>" not in text
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for night in nights(3):
        history.append(Path("history/h200.jsonl"), night)
        history.append(Path("history/b200.jsonl"), dataclasses.replace(night, key="b200"))
    assert main(["history", "history/h200.jsonl", "history/b200.jsonl", "-o", "out.html"]) == 0
    assert len(figures(Path("out.html").read_text())) == 8
    assert main(["history", "history/other.jsonl"]) == 2
    assert "history/other.jsonl does not exist; `gate` adds" in capsys.readouterr().err
    assert not Path("history.html").exists()


@pytest.mark.parametrize("command", ["drift", "history"])
def test_a_history_without_nights_is_an_error(command, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    problems = {
        tmp_path / "no": "does not exist",
        empty: "holds no night",
        tmp_path: "Is a directory;",
    }
    for path, problem in problems.items():
        assert main([command, str(path)]) == 2
        error = capsys.readouterr().err
        assert problem in error
        assert "`gate`" in error


def test_a_single_night_is_drawn():
    assert len(figures(page.page([nights(1)]))) == 4
