"""Results read well, hostile names stay harmless, and pytest-benchmark's options work."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aiperf import evidence
from pytest_aiperf.model import (
    Against,
    Evidence,
    EvidenceKind,
    Expectation,
    Finding,
    Interval,
    Limit,
    Metric,
    Outcome,
    Recorded,
    Replicate,
    Require,
    Round,
    Verdict,
    Work,
)
from pytest_aiperf.records.results import read_results
from pytest_aiperf.report import formatting, markdown, terminal, views
from pytest_aiperf.rules.verdict import judge
from pytest_aiperf.schema import to_json
from tests.plugin.records import HOST, ladder, result, timing

pytest_plugins = ["pytester"]

HOSTILE = "ch07/x[\x1b]0;owned\x07\x1b[31m\n::set-env name=A::b\r##[error]\u202e|<script>`\ud800]"


def ended(outcome, claim, message=""):
    bare = {"timing": None, "speedup": None, "library": None, "verdict": None, "key": ""}
    return result(claim, outcome=outcome, message=message, **bare)


COPY = Limit("copy", 4.2e12, 4.28e12, "B/s", 0.981)
RECORDED = Recorded((1.9, 2.0, 2.1), 3, "c", "s", "2025-01-01")


def test_the_table_is_grouped_aligned_and_fits():
    results = [
        result("ch07/copy[vector]", library=None, limits={"optimized": COPY}),
        result("ch07/copy[strided]", verdict=Verdict.SAME, speedup=Interval(0.99, 1.0, 1.01)),
        result("ch06/bank_conflicts[padded]", expectation=Expectation(recorded=RECORDED)),
    ]
    figures = "2.011 ms   1.000 ms  2.011x [2.000, 2.022]"
    same = "2.011 ms   1.000 ms  1.000x [0.990, 1.010]"
    rate = "4.200 TB/s"
    heads = (
        "  baseline  optimized  ratio [99 % interval]  library        rate   of limit  verdict"
        "  expected"
    )
    assert terminal.table(results, 120) == [
        f"claim                   {heads}",
        "ch06 (h200)",
        f"  bank_conflicts[padded]  {figures}    1.01x  {rate}          -  FASTER   2.00x",
        "ch07 (h200)",
        f"  copy[vector]            {figures}        -  {rate}  98 % copy  FASTER   -",
        f"  copy[strided]           {same}    1.01x  {rate}          -  SAME     -",
        (
            "3 claims: 2 FASTER, 1 SAME; geometric mean 1.59x; "
            "median share of the limit 98% (1 claim)"
        ),
    ]


def rows(results, width=120, **options):
    return [line.split() for line in terminal.table(results, width, **options)]


def test_a_slash_in_a_parameter_ends_no_folder():
    alone = result("ch07/load[a/b]")
    rungs = [
        dataclasses.replace(r, claim=f"ch07/sum[{name}-c/d]", ladder="ch07/sum[size=c/d]")
        for name, r in zip(("two", "four"), ladder(two=4e-3, four=1e-3), strict=True)
    ]
    lines = rows([alone, *rungs])
    assert lines[1] == ["ch07", "(h200)"]
    names = {"load[a/b]", "sum[size=c/d]", "two-c/d", "four-c/d"}
    assert {line[0] for line in lines[2:6]} == names
    assert "\n| load\\[a/b\\] |" in markdown.tables([alone])
    assert '"name mono">load<wbr>[a/<wbr>b]<' in views.speedups([alone])


def test_a_ladder_is_one_block_in_the_order_of_its_rungs():
    lines = rows([*reversed(ladder(two=4e-3, four=1e-3)), result("ch07/alone")])
    assert lines[0][7:9] == ["over", "first"]
    assert [line[:3] for line in lines[2:5]] == [
        ["sum", "8.390", "ms"],  # the first arm; the geometric mean of 8.0 and 8.8 ms
        ["two", "4.195", "ms"],  # its baseline is the first arm, shown above it
        ["four", "1.049", "ms"],  # its baseline is the rung above it
    ]
    assert lines[3][3:7] == ["2.000x", "[2.000,", "2.000]", "-"]
    assert lines[4][3:7] == ["4.000x", "[4.000,", "4.000]", "8.00x"]
    assert lines[5][:5] == ["alone", "2.011", "ms", "1.000", "ms"]


def test_a_rung_that_was_measured_apart_shows_its_own_baseline():
    two, four = ladder(two=4e-3, four=1e-3)
    apart = dataclasses.replace(four, timing=timing(5e-3, 1e-3), first=None)
    lines = rows([two, apart])
    assert [line[:3] for line in lines[2:]][:3] == [
        ["sum"],
        ["two", "8.390", "ms"],
        ["four", "5.000", "ms"],
    ]


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (115, ["claim", "over first", "library", "rate", "of limit", "expected"]),
        (93, ["claim", "over first", "library", "of limit"]),
        (87, ["over first", "library", "of limit"]),
        (80, ["library", "of limit"]),
        (66, ["of limit"]),
        (55, []),
    ],
)
def test_a_narrow_table_leaves_out_columns_and_then_uses_two_lines(width, heads):
    expected, limits = Expectation(recorded=RECORDED), {"optimized": COPY}
    results = [
        dataclasses.replace(r, expectation=expected, limits=limits)
        for r in ladder(library=2e-3, two=4e-3, four=1e-3)
    ]
    lines = terminal.table(results, width)
    always = ["baseline", "optimized", "ratio [99 % interval]", "verdict"]
    shown = re.split("  +", lines[0].strip())
    assert sorted(shown) == sorted([*heads, *always])
    assert max(map(len, lines[:5])) <= width
    two_lines = [line.strip() for line in lines[2:8]]
    if "claim" not in heads:
        assert two_lines[::2] == ["sum", "two", "four"]
    rungs = lines[3:5] if "claim" in heads else two_lines[3::2]
    assert all(re.search(r"x \[.*\] .*FASTER", line) for line in rungs)


def test_a_verbose_table_keeps_every_column():
    [narrow, wide] = (terminal.table([result()], 60, verbosity=v)[0].split() for v in (0, 1))
    assert "rate" not in narrow
    assert {"rate", "library", "expected"} < {*wide}


def test_a_rung_alone_keeps_its_id():
    assert rows(ladder(two=4e-3))[2][0] == "sum[two]"


def test_an_inconclusive_verdict_is_explained_whole():
    why = (
        "INCONCLUSIVE: the interval is 9 % wide, and the noise floor is 3 %; "
        + "measure again " * 9
    )
    lines = terminal.table([result(verdict=Verdict.INCONCLUSIVE, message=why)], 80)
    assert why.strip() in " ".join(line.strip() for line in lines)
    assert max(map(len, lines[3:])) <= 80


def test_rungs_share_a_note():
    two, four = (dataclasses.replace(r, notes=("a note",)) for r in ladder(two=4e-3, four=1e-3))
    lines = terminal.table([two, four, result("ch07/other", notes=("a note",))])
    assert "ch07/sum[two], ch07/sum[four]: a note" in lines
    assert "ch07/other: a note" in lines


@pytest.mark.parametrize(
    ("figures", "shown"),
    [
        ({}, "launches <= 1: not looked at"),
        ({"value": 5.0, "held": False}, "launches <= 1: 5, does not hold"),
        ({"value": 1.0, "held": True}, "launches <= 1: 1, holds"),
        (
            {"value": 1.0, "held": True, "baseline_value": 5.0, "baseline_held": False},
            "launches <= 1: 1 (baseline 5), holds",
        ),
        (
            {"value": 1.0, "held": True, "baseline_value": 0.0, "baseline_held": True},
            "launches <= 1: 1 (baseline 0), condition (the baseline meets it, too)",
        ),
    ],
)
def test_evidence_holds_or_not_or_was_not_looked_at(figures, shown):
    finding = Finding(Evidence(EvidenceKind.LAUNCHES, max=1), **figures)
    lines = terminal.table([result(evidence=(finding,))], verbosity=1)
    assert f"ch07/copy[vector]: evidence: {shown}" in lines
    quiet = terminal.table([result(evidence=(finding,))])
    noted = "ch07/copy[vector]: evidence not looked at: launches <= 1" in quiet
    assert noted is ("not looked at" in shown)
    tables = markdown.tables([result(evidence=(finding,))])
    assert tables.endswith(r"not looked at: ch07/copy\[vector\]") is noted


def test_why_several_pieces_were_not_looked_at_is_said_once():
    counters = [Evidence(EvidenceKind.COUNTER, of, max=1) for of in ("a.sum", "b.sum")]
    findings = [Finding(piece, where="counters are reserved") for piece in counters]
    findings.append(Finding(Evidence(EvidenceKind.LAUNCHES, max=1)))
    lines = terminal.table([result(evidence=tuple(findings))])
    assert (
        "ch07/copy[vector]: evidence not looked at: counter a.sum <= 1, counter b.sum <= 1 "
        "(counters are reserved); launches <= 1"
    ) in lines


@pytest.mark.parametrize(
    ("piece", "value", "shown"),
    [
        (evidence.launches(max=3), 3, "launches <= 3: 3 (baseline 3)"),
        (evidence.spills(max=8), 8, "spills <= 8 B: 8 B (baseline 8 B)"),
        (evidence.peak_memory(max=2**21), 2**20, "<= 2.000 MiB: 1.000 MiB (baseline 1.000 MiB)"),
        (evidence.peak_memory(max=0.5, per="baseline"), 0.25, "<= 0.5 of the baseline: 0.25x ("),
        (evidence.busy_share(min=0.9), 0.95, "busy share >= 90.0 %: 95.0 % (baseline 95.0 %)"),
        (evidence.overlap(min=1.5), 1.75, "overlap >= 1.5x: 1.75x (baseline 1.75x)"),
        (evidence.overlap(min=0.5, of="copies"), 0.7, "overlap copies >= 50.0 %: 70.0 % ("),
        (evidence.counter("dram__bytes.sum", max=1024), 2048, "<= 1.000 KiB: 2.000 KiB ("),
        (evidence.counter("dram__bytes.sum", max=1.1, per="work"), 1.003, "of work: 1.003x ("),
        (evidence.counter("lts__t_sectors.sum", max=9, per="work"), 0.03, ": 0.03 per byte ("),
        (evidence.counter("sm__cycles.avg.pct_of_peak", min=9), 12, ">= 9 %: 12 % (baseline 12 %)"),
    ],
)
def test_figures_of_evidence_have_units(piece, value, shown):
    finding = Finding(piece, value, held=True, baseline_value=value, baseline_held=True)
    assert shown in formatting.finding(finding)
    rows = views.evidence([result(evidence=(finding,))])
    assert f"<td>{formatting.amount(value, piece)}</td>" in rows


def test_neither_a_name_nor_a_figure_is_clipped():
    name = "a_very_long_name_of_a_claim_that_goes_on_and_on_and_on[with_its_rung]"
    lines = terminal.table([result(f"ch07/{name}")], 60)
    assert lines[2] == f"  {name}"
    assert lines[3] == "    2.011 ms   1.000 ms  2.011x [2.000, 2.022]  FASTER"


@pytest.mark.parametrize(
    ("work", "rate"),
    [
        (Work(read=2.1e09, written=2.1e09), "4.200 TB/s"),
        (Work(read=2.765e07, written=2.765e07), "55.30 GB/s"),
        (Work(read=1500, written=1500), "3.000 MB/s"),
        (Work(read=0.5, written=0.5), "1.000 kB/s"),
        (Work(flops=686e9, dtype="bf16"), "686.0 TFLOP/s"),
        (Work(read=2e08, written=2e08, flops=1.1e12), "1100 TFLOP/s"),
        (Work(read=2.1e09, written=2.1e09, flops=4.2e9), "4.200 TB/s"),
        (Work(), "-"),
        (None, "-"),
    ],
)
def test_the_rate_is_what_limits_the_call(work, rate):
    assert cells(result(work=work))["rate"] == rate


def cells(one):
    head, _, laid = terminal.markdown([one]).split("\n")[2:5]
    heads, row = ([c.strip() for c in line.strip("|").split(" | ")] for line in (head, laid))
    return dict(zip(heads, row, strict=True))


def test_memory_and_scores_have_their_own_units_and_no_rate():
    memory = timing(3 * 2**30, 2**30, metric=Metric.MEMORY, unit="B")
    assert cells(result(timing=memory))["baseline"] == "3.000 GiB"
    assert cells(result(timing=memory))["rate"] == "-"
    score = timing(10.0, 40.0, metric=Metric.SCORE, unit="req/s", better="higher")
    assert cells(result(timing=score))["optimized"] == "40.00 req/s"


@pytest.mark.parametrize(
    ("expectation", "shown"),
    [
        (None, "-"),
        (Expectation(), "-"),
        (Expectation(recorded=RECORDED), "2.00x"),
        (Expectation(recorded=RECORDED, stale=True), "stale"),
        (Expectation(require=Require(speedup=1.5)), "&gt;=1.5x"),
        (Expectation(require=Require(library=0.99)), "&gt;=0.99x lib"),
        (Expectation(require=Require(share=0.85)), "&gt;=85%"),
    ],
)
def test_what_was_expected_stands_beside_the_verdict(expectation, shown):
    assert cells(result(expectation=expectation))["expected"] == shown


@pytest.mark.parametrize(
    ("outcome", "verdict", "shown"),
    [
        (Outcome.PASSED, Verdict.SAME, "SAME"),
        (Outcome.FAILED, Verdict.FASTER, "FASTER, lost"),
        (Outcome.FAILED, Verdict.SLOWER, "SLOWER"),
        (Outcome.FAILED, Verdict.INCONCLUSIVE, "INCONCLUSIVE"),
        (Outcome.FAILED, None, "FAILED"),
        (Outcome.INVALID, Verdict.FASTER, "INVALID"),
        (Outcome.ERROR, None, "ERROR"),
    ],
)
def test_a_lost_or_invalid_claim_never_reads_as_won(outcome, verdict, shown):
    assert cells(result(outcome=outcome, verdict=verdict))["verdict"] == shown


@pytest.mark.parametrize("verdict", [Verdict.FASTER, Verdict.SAME])
def test_a_claim_that_only_noise_keeps_from_being_met_is_undecided(verdict):
    expectation = Expectation(Require(speedup=1.5))
    why = judge(Interval(1.4, 1.6, 1.8), 0.0, expectation).why
    shown = cells(result(outcome=Outcome.FAILED, verdict=verdict, message=why))["verdict"]
    assert shown == f"{verdict}, undecided"


def test_totals_count_every_outcome_and_average_only_what_counts():
    lost = {"verdict": Verdict.SLOWER, "outcome": Outcome.FAILED}
    results = [
        result("a/1", speedup=Interval(1.9, 2.0, 2.1)),
        result("a/2", speedup=Interval(0.4, 0.5, 0.6), **lost),
        result("a/3", speedup=Interval(90, 99, 100), against=Against.NAIVE),
        result("a/4", speedup=Interval(90, 99, 100), outcome=Outcome.INVALID),
        result("a/5", speedup=Interval(8, 9, 10), timing=timing(metric=Metric.MEMORY, unit="B")),
        ended(Outcome.PASSED, "a/6"),
        result("a/7", speedup=Interval(0.1, 9, 800), verdict=Verdict.INCONCLUSIVE),
        ended(Outcome.SKIPPED, "b/1", "needs sm100"),
        ended(Outcome.SKIPPED, "b/2", "needs 2 GPUs"),
        ended(Outcome.SKIPPED, "b/3", "needs sm100"),
        ended(Outcome.NOT_RUN, "c/1", "session budget"),
    ]
    assert terminal.totals(results) == (
        "7 claims, 2 failed: 3 FASTER, 1 SLOWER, 1 INVALID, 1 PASSED, 1 INCONCLUSIVE; "
        "3 skipped (needs sm100: 2, needs 2 GPUs: 1); 1 not run; "
        "geometric mean 1.00x over 2 of 7 claims (the others have a naive baseline, no valid times "
        "or no clear verdict)"
    )
    assert terminal.totals([result()]).startswith("1 claim: 1 FASTER; geometric mean 2.01x")


def test_a_time_that_is_impossible_has_no_part_in_the_median_share():
    impossible = dataclasses.replace(COPY, rate=8.4e12, share=1.96)
    results = [
        result("ch07/copy[vector]", limits={"optimized": COPY}),
        result("ch07/copy[cheat]", limits={"optimized": impossible}, outcome=Outcome.INVALID),
    ]
    assert terminal.totals(results).endswith("median share of the limit 98% (1 claim)")


def test_notes_explain_the_figures():
    capped = Round("ABBA", {"baseline": (2.0,), "optimized": (1.0,)}, event_reasons=0x5)
    free = dataclasses.replace(capped, event_reasons=None)
    reps = (Replicate(1, (capped, free), redone=2), Replicate(2, (capped,), redone=1))
    also = timing(2e-6, 1e-6, metric=Metric.WALL)
    lines = terminal.table(
        [
            result(
                "ch01/a", timing=timing(replicates=reps, notes=("graph refused",)), also=(also,)
            ),
            result("ch01/b", against=Against.NAIVE, notes=("second attempt",), quick=True),
            result("ch01/c", outcome=Outcome.FAILED, message="speedup lost\nmore"),
            result("ch01/quiet", message="FASTER: 2x"),
        ],
        200,
    )
    assert [line for line in lines if line.startswith("  b *  ")]
    second = "wall: 2.000 µs -> 1.000 µs"
    assert lines[6].startswith("4 claims, 1 failed: 3 FASTER, 1 FASTER (lost); ")
    assert lines[7:] == [
        "* naive baseline: left out of the geometric mean",
        "ch01/b: measured with --quick: not accepted into expectations",
        f"ch01/a: graph refused; 3 rounds redone; power cap in 2 of 3 rounds; {second}",
        "ch01/b: second attempt",
        "ch01/c: speedup lost",
    ]


def test_failures_come_last():
    lost = result("ch01/a", outcome=Outcome.FAILED, message="lost")
    lines = terminal.table([lost, result("ch02/b", notes=("second attempt",))])
    assert lines[-2].startswith("ch02/b: second attempt")
    assert lines[-1] == "ch01/a: lost"


def test_a_quick_run_is_named_in_one_line():
    lost = result("ch01/a", outcome=Outcome.FAILED, message="lost", quick=True)
    lines = terminal.table([lost, *(result(f"ch02/{name}", quick=True) for name in "bc")])
    assert lines[-2:] == ["measured with --quick: not accepted into expectations", "ch01/a: lost"]


def test_a_noisy_session_is_named_in_the_summary():
    quiet, noisy = (terminal.table([result(floor=f)], 200) for f in (0.19, 0.947))
    assert [line for line in noisy if line not in quiet] == [
        (
            "noisy: two identical arms differ by 95%, so only larger differences count; end other "
            "work on this machine, and measure again"
        )
    ]


def test_the_next_commands_can_be_typed(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    file = tmp_path / "a b" / "c d" / "results.json"
    names = [f"tests/ch07/test_x.py::test_x[{i}/../{i}]" for i in range(5)]
    lost = [result(nodeid=name, outcome=Outcome.FAILED) for name in names]
    report = "write a report: python -m pytest_aiperf report 'c d/results.json'"
    assert terminal.next_steps([*lost[:1], result()], "pytest --gpu", tmp_path, file) == [
        "measure again:  pytest --gpu -v '../tests/ch07/test_x.py::test_x[0/../0]'",
        report,
    ]
    [again, _] = terminal.next_steps(lost[:1], "pytest --profile=torch", tmp_path, file)
    assert again.startswith("profile again:  pytest --profile=torch -v ")
    [first, _] = terminal.next_steps(lost, "pytest --gpu", tmp_path, file)
    assert first.endswith("test_x[2/../2]'  # and 2 more")
    assert terminal.next_steps([result()], "pytest --gpu", tmp_path, file) == [report]


class Reporter:
    """Stands in for pytest's terminal reporter; notes the color of each text."""

    def __init__(self):
        self.text, self.colours = "", {}

    def write(self, text, **markup):
        self.text += text
        for colour in markup:
            self.colours[text] = colour

    def write_line(self, text, **markup):
        self.write(f"{text}\n", **markup)


def test_verdicts_have_colours():
    states = {
        "a/1": (Outcome.PASSED, Verdict.FASTER),
        "a/2": (Outcome.FAILED, Verdict.FASTER),
        "a/3": (Outcome.FAILED, Verdict.INCONCLUSIVE),
        "a/4": (Outcome.INVALID, Verdict.FASTER),
        "a/5": (Outcome.PASSED, Verdict.SAME),
    }
    results = [result(n, outcome=o, verdict=v, floor=0.5) for n, (o, v) in states.items()]
    results.append(result("a/6", outcome=Outcome.FAILED, message="undecided: wide"))
    for width in (80, 140):
        lines, reporter = terminal.table(results, width), Reporter()
        terminal.write(reporter, lines)
        assert reporter.text == "".join(f"{line}\n" for line in lines)
        noisy = {line: c for line, c in reporter.colours.items() if line.startswith("noisy: ")}
        assert reporter.colours == {
            "FASTER": "green", "FASTER, lost": "red", "INCONCLUSIVE": "yellow", "INVALID": "red",
            "FASTER, undecided": "yellow",
        } | dict.fromkeys(noisy, "yellow")  # fmt: skip
        assert noisy


def test_what_did_not_run_is_listed_whole_by_reason():
    results = [ended(Outcome.NOT_RUN, f"ch07/claim{i}", "session budget") for i in range(20)]
    results += [ended(Outcome.NOT_RUN, "ch08/x", "interrupted")]
    lines = terminal.table(results, 80)
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    assert text.startswith("0 claims; 21 not run not run: ch07/claim0, ")
    assert text.endswith("ch07/claim19 (session budget) not run: ch08/x (interrupted)")


def test_no_results_are_no_table():
    assert terminal.table([], 120) == []


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (
            {
                "claim": "ch07/copy[v]",
                "phase": "measuring",
                "replicate": 5,
                "most": 32,
                "ratio": 1.98,
                "half_width": 0.0061,
                "sm_mhz": 1980,
                "temperature_c": 54,
            },
            "ch07/copy[v]  measuring  replicate 5  of at most 32  1.98x ±0.61%  1980 MHz  54 C",
        ),
        ({"number": 7, "count": 24, "left": "3 min left"}, "7 of 24  3 min left"),
        ({"phase": "building", "done": 3, "total": 7}, "building  3/7"),
        ({"claim": "a/b", "phase": "waiting for GPU"}, "a/b  waiting for GPU"),
        ({"claim": "a/b", "ratio": 2.0, "half_width": None, "sm_mhz": None}, "a/b"),
        ({"claim": "a/b", "ratio": 2.0, "half_width": 1.01}, "a/b"),
        ({"claim": "a/b", "ratio": "x", "half_width": 0.1}, "a/b"),
        ({"claim": "a/b", "ratio": 2.0, "half_width": "x"}, "a/b"),
        ({}, ""),
    ],
)
def test_the_live_line_shows_the_figures_that_are_there(progress, line):
    assert terminal.live_line(progress) == line


def test_the_live_line_fits():
    assert terminal.live_line({"claim": "a" * 50}, 20) == "a" * 9 + "..." + "a" * 8
    figures = {"claim": "a/b", "phase": "measuring", "sm_mhz": 1980, "temperature_c": 54}
    assert [terminal.live_line(figures, width) for width in (30, 23, 10)] == [
        "a/b  measuring  1980 MHz  54 C", "a/b  measuring", "a/b",
    ]  # fmt: skip


def test_nothing_hostile_reaches_the_terminal():
    bad = result(HOSTILE, outcome=Outcome.FAILED, message=HOSTILE, key=HOSTILE)
    lines = [
        *terminal.table([bad, ended(Outcome.SKIPPED, "x", HOSTILE)], 120),
        *terminal.table([ended(Outcome.NOT_RUN, HOSTILE, HOSTILE)], 120),
        terminal.live_line({"claim": HOSTILE, "phase": HOSTILE}),
        *terminal.markdown([bad, ended(Outcome.NOT_RUN, HOSTILE, HOSTILE)]).split("\n"),
    ]
    assert len(lines) > 10
    for line in lines:
        assert line.isprintable()
        assert not re.search(r"(?<!\S)::", line)
        assert "##[" not in line
        line.encode()


@pytest.mark.parametrize("text", ["::", ":::", ":\x00:", "::::", "a ::b", "\n::warning::x"])
def test_no_word_begins_as_a_workflow_command(text):
    assert not any(word.startswith("::") for word in formatting.clean(text).split())


@pytest.mark.parametrize("text", ["aten::mm", "tests/a.py::test_b[x]", "cub<4>::scan(a::b)"])
def test_names_keep_their_colons(text):
    assert formatting.clean(text) == text


def test_an_invalid_ladder_gives_its_reason_once():
    advice = "let the GPU cool, and run again"
    why = f"a round was disturbed 4 times, the last time by heat: {advice}"
    ladders = "timed by itself, because the ladder could not be timed: "
    for earlier, kept in (
        (why, ladders[:-2]),
        (
            why.replace("heat", "noise"),
            f"{ladders}{why.replace('heat', 'noise')[: -len(advice) - 2]}",
        ),
        ("an arm raised", f"{ladders}an arm raised"),
    ):
        bad = result(outcome=Outcome.INVALID, message=why, notes=(ladders + earlier,))
        assert formatting.notes([bad]) == [f"ch07/copy[vector]: {why}; {kept}"]


def test_a_large_verbose_run_explains_only_what_did_not_pass():
    finding = Finding(Evidence(EvidenceKind.LAUNCHES, max=1), 1.0, held=True)
    many = [result(f"ch07/c{i}", evidence=(finding,)) for i in range(terminal.MAX_REASONED)]
    lost = result("ch07/lost", outcome=Outcome.FAILED, message="too slow", evidence=(finding,))

    def explained(results, verbosity):
        lines = terminal.table(results, verbosity=verbosity)
        return sum(": evidence: " in line for line in lines)

    assert explained(many, 1) == len(many)
    assert explained([*many, lost], 1) == 1
    rest = f"-vv shows the bottlenecks and the evidence of the other {len(many)} claims"
    assert rest in terminal.table([*many, lost], verbosity=1)
    assert explained([*many, lost], 2) == len(many) + 1


def test_markdown_cells_cannot_leave_their_table():
    bad = result(HOSTILE, outcome=Outcome.FAILED, message="a|b <img src=x> [l](u) *b* & `c`")
    text = terminal.markdown([bad])
    row = text.split("\n")[4]
    assert len(re.findall(r"(?<!\\)\|", row)) == len(formatting.COLUMNS)  # not "over first"
    assert row.startswith(r"| ch07/x\[")
    assert r"&lt;script&gt;\`" in row
    note = next(line for line in text.split("\n") if line.startswith("- "))
    assert note.endswith(r"a\|b &lt;img src=x&gt; \[l\](u) \*b\* &amp; \`c\`")


def test_markdown_names_the_hosts_of_host_claims():
    host = result("ch01/c", **HOST)
    other = result("ch01/d", **HOST | {"stack": {"processor": "Xeon, 8 logical CPUs"}})
    old = result("ch01/e", **HOST | {"stack": {}})
    for text in (terminal.markdown([host, other, old]), markdown.tables([host, other, old])):
        assert "cpu: EPYC 9654, 16 logical CPUs; Xeon, 8 logical CPUs\n" in text
    assert "cpu:" not in terminal.markdown([old])


def test_host_claims_come_last_in_a_table():
    text = markdown.tables([result("ch01/c", **HOST), result("ch01/d")])
    assert text.index("| d |") < text.index("| c |")


def test_markdown_is_the_same_table():
    text = terminal.markdown(
        [result("ch07/a_b", against=Against.NAIVE), result("ch01/c", key="cpu")]
    )
    head = [
        "",
        f"| {' | '.join(c for c in formatting.COLUMNS if c != 'over first')} |",
        "|:--|--:|--:|--:|--:|--:|--:|:--|:--|",
    ]
    figures = (
        r"2.011 ms | 1.000 ms | 2.011x \[2.000, 2.022\] | 1.01x | 4.200 TB/s | - | FASTER | - |"
    )
    assert text.split("\n") == [
        "**cpu**",
        *head,
        f"| ch01/c | {figures}",
        "",
        "**h200**",
        *head,
        rf"| ch07/a\_b \* | {figures}",
        "",
        r"- \* naive baseline: left out of the geometric mean",
        "",
        f"2 claims: 2 FASTER; geometric mean 2.01x over 1 of 2 claims ({terminal.NOT_AVERAGED})",
        "",
    ]


def session(**changes):
    options = {"compare": [], "compare_fail": None, "histogram": False, "verbose": False}
    return SimpleNamespace(**options | {"benchmarks": [], "quiet": False} | changes)


def test_without_pytest_benchmark_nothing_happens():
    terminal.benchmark_session_add(None, [result()])


def test_only_valid_and_conclusive_results_enter_history():
    theirs = session()
    kept = [result("a/1"), result("a/2", outcome=Outcome.FAILED, verdict=Verdict.SLOWER)]
    terminal.benchmark_session_add(
        theirs,
        [
            *kept,
            result("a/3", outcome=Outcome.INVALID),
            result("a/4", outcome=Outcome.FAILED, verdict=None),
            result("a/5", outcome=Outcome.FAILED, verdict=Verdict.INCONCLUSIVE),
            ended(Outcome.PASSED, "a/6"),
        ],
    )
    assert [b.as_dict()["aiperf"] for b in theirs.benchmarks] == [to_json(r) for r in kept]


@pytest.mark.parametrize(
    ("changes", "quiet"),
    [
        ({}, True),
        ({"compare": True}, False),
        ({"compare_fail": ["mean:5%"]}, False),
        ({"histogram": "h"}, False),
        ({"verbose": True}, False),
        ({"benchmarks": ["theirs"]}, False),
    ],
)
def test_the_table_of_pytest_benchmark_is_shown_only_on_request(changes, quiet):
    theirs = session(**changes)
    terminal.benchmark_session_add(theirs, [result()])
    assert theirs.quiet is quiet


CONFTEST = """
    import json
    import pytest
    from pytest_aiperf.report import terminal
    from pytest_aiperf.model import Result
    from pytest_aiperf.schema import from_json

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(session):
        if not hasattr(session.config, "workerinput"):
            records = json.loads((session.config.rootpath / "records.json").read_text())
            theirs = session.config.pluginmanager.get_plugin("pytest-benchmark")
            terminal.benchmark_session_add(theirs, [from_json(Result, r) for r in records])
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_generate_machine_info():
        return {"machine": "test"}  # asking the processor takes seconds
"""


@pytest.fixture
def inner(pytester, monkeypatch):
    """Return a function that runs pytest in a new process, because both plugins keep state."""
    monkeypatch.setenv("PYTHONPATH", str(Path(terminal.__file__).parents[2]))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("def test_one():\n    pass")

    def run(records, *options):
        (pytester.path / "records.json").write_text(json.dumps(to_json(records)))
        # run pytest without this repository's settings
        apart = ("-pno:aiperf", "-pno:hypothesispytest", "-c/dev/null", "--rootdir=.")
        return pytester.runpytest_subprocess(*apart, *options)

    return run


def test_pytest_benchmarks_own_options_work_on_claims(inner, pytester):
    records = [result(), result("ch07/copy[wide]", timing=timing(4e-3, 3e-3))]
    files = ("--benchmark-json=out.json", "--benchmark-save=mine")

    def written(number):
        (kept,) = pytester.path.glob(f".benchmarks/*/{number}_mine.json")
        for path in (pytester.path / "out.json", kept):
            saved = json.loads(path.read_text())
            assert [b["stats"]["min"] for b in saved["benchmarks"]] == [1e-3, 3e-3]
            assert read_results(path) == records
        (pytester.path / "out.json").unlink()

    alone = inner(records, *files)
    assert alone.ret == 0
    alone.stdout.no_fnmatch_line("*Name (time*")
    written("0001")

    workers = inner(records, "-n2", *files, "--benchmark-compare=0001")
    assert workers.ret == 0
    workers.stdout.fnmatch_lines(["*'ch07/copy': 4 tests*", "*test_copy[[]wide[]] (0001_mine)*"])
    written("0002")

    slower = [result(timing=timing(2e-3, 2e-3))]
    lost = inner(slower, "--benchmark-compare", "--benchmark-compare-fail=min:10%")
    assert lost.ret != 0
    lost.stderr.fnmatch_lines(["*Performance has regressed*"])


def test_the_adapter_gives_way_when_pytest_benchmark_is_off(inner):
    done = inner([result()], "-p", "no:benchmark")
    assert done.ret == 0
    done.assert_outcomes(passed=1)
