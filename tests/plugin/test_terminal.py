"""Results read well, hostile names stay harmless, and pytest-benchmark's options work."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

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
from pytest_aiperf.report import formatting, markdown, terminal
from pytest_aiperf.schema import to_json
from tests.plugin.records import ladder, result, timing

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
    figures = "2.000 ms   1.000 ms  2.010x [2.000, 2.022]"
    same = "2.000 ms   1.000 ms  1.000x [0.990, 1.010]"
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
            "3 claims: 2 FASTER, 1 SAME; geometric mean 1.59x against non-naive baselines (3/3); "
            "median share of the limit 98% (1)"
        ),
    ]


def rows(results, width=120, **options):
    return [line.split() for line in terminal.table(results, width, **options)]


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
    assert lines[5][:5] == ["alone", "2.000", "ms", "1.000", "ms"]


def test_a_rung_that_was_measured_apart_shows_its_own_baseline():
    two, four = ladder(two=4e-3, four=1e-3)
    apart = dataclasses.replace(four, timing=timing(5e-3, 1e-3), first=None)
    lines = rows([two, apart])
    assert [line[:3] for line in lines[2:]][:3] == [
        ["sum"],
        ["two", "8.390", "ms"],
        ["four", "5.000", "ms"],
    ]


def test_a_narrow_table_leaves_out_rates_and_keeps_every_verdict():
    results = ladder(two=4e-3, four=1e-3)
    wide, narrow, verbose = (
        terminal.table(results, width, verbose=v)
        for width, v in ((140, False), (100, False), (100, True))
    )
    assert ["rate" in lines[0] for lines in (wide, narrow, verbose)] == [True, False, True]
    assert max(map(len, narrow)) <= 100
    for lines in (wide, narrow, verbose):
        assert all("FASTER" in line for line in lines[3:5])


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
    lines = terminal.table([result(evidence=(finding,))], verbose=True)
    assert f"ch07/copy[vector]: evidence: {shown}" in lines
    quiet = terminal.table([result(evidence=(finding,))])
    noted = "ch07/copy[vector]: evidence not looked at: launches <= 1" in quiet
    assert noted is ("not looked at" in shown)
    tables = markdown.tables([result(evidence=(finding,))])
    assert tables.endswith(r"not looked at: ch07/copy\[vector\]") is noted


def test_a_name_gives_way_in_its_middle_and_no_figure_does():
    name = "ch07/a_very_long_name_of_a_claim_that_goes_on_and_on_and_on[with_its_rung]"
    lines = terminal.table([result(name)], 120)
    assert len(lines[2]) <= 120
    assert re.match(r"  a_very_lon.*\.\.\..*h_its_rung\]  2\.000 ms   1\.000 ms  2\.010x", lines[2])


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
        (Outcome.FAILED, None, "FAILED"),
        (Outcome.INVALID, Verdict.FASTER, "INVALID"),
        (Outcome.ERROR, None, "ERROR"),
    ],
)
def test_a_lost_or_invalid_claim_never_reads_as_won(outcome, verdict, shown):
    assert cells(result(outcome=outcome, verdict=verdict))["verdict"] == shown


def test_totals_count_every_outcome_and_average_only_what_counts():
    lost = {"verdict": Verdict.SLOWER, "outcome": Outcome.FAILED}
    results = [
        result("a/1", speedup=Interval(1.9, 2.0, 2.1)),
        result("a/2", speedup=Interval(0.4, 0.5, 0.6), **lost),
        result("a/3", speedup=Interval(90, 99, 100), against=Against.NAIVE),
        result("a/4", speedup=Interval(90, 99, 100), outcome=Outcome.INVALID),
        result("a/5", speedup=Interval(8, 9, 10), timing=timing(metric=Metric.MEMORY, unit="B")),
        ended(Outcome.PASSED, "a/6"),
        ended(Outcome.SKIPPED, "b/1", "needs sm100"),
        ended(Outcome.SKIPPED, "b/2", "needs 2 GPUs"),
        ended(Outcome.SKIPPED, "b/3", "needs sm100"),
        ended(Outcome.NOT_RUN, "c/1", "session budget"),
    ]
    assert terminal.totals(results) == (
        "6 claims: 3 FASTER, 1 SLOWER, 1 INVALID, 1 PASSED; "
        "3 skipped (needs sm100: 2, needs 2 GPUs: 1); 1 not run; "
        "geometric mean 1.00x against non-naive baselines (2/6)"
    )
    assert terminal.totals([result()]).startswith("1 claim: 1 FASTER; geometric mean 2.01x")


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
            result("ch01/b", against=Against.NAIVE, attempts=2, quick=True),
            result("ch01/c", outcome=Outcome.FAILED, message="speedup lost\nmore"),
            result("ch01/quiet", message="FASTER: 2x"),
        ],
        120,
    )
    assert [line for line in lines if line.startswith("  b *  ")]
    second = "wall: 2.000 µs -> 1.000 µs"
    assert lines[6:-1] == [
        "* naive baseline: left out of the geometric mean",
        f"ch01/a: graph refused; 3 rounds redone; power cap in 2 of 3 rounds; {second}",
        "ch01/b: attempt 2; quick",
        "ch01/c: speedup lost",
    ]


def test_what_did_not_run_is_listed_whole_by_reason():
    results = [ended(Outcome.NOT_RUN, f"ch07/claim{i}", "session budget") for i in range(20)]
    results += [ended(Outcome.NOT_RUN, "ch08/x", "interrupted")]
    lines = terminal.table(results, 80)
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    assert text.startswith("not run: ch07/claim0, ")
    assert (
        "ch07/claim19 (session budget) not run: ch08/x (interrupted) 0 claims; 21 not run" in text
    )


def test_no_results_are_no_table():
    assert terminal.table([], 120) == []


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (
            {
                "claim": "ch07/copy[vector]",
                "phase": "measuring",
                "replicate": 5,
                "most": 32,
                "ratio": 1.98,
                "half_width": 0.0061,
                "sm_mhz": 1980,
                "temperature_c": 54,
            },
            "ch07/copy[vector]  measuring  replicate 5/32  1.98x  +-0.61%  1980 MHz  54 C",
        ),
        ({"phase": "building", "done": 3, "total": 7}, "building  3/7"),
        ({"claim": "a/b", "phase": "waiting for GPU"}, "a/b  waiting for GPU"),
        ({"claim": "a/b", "ratio": 2.0, "half_width": None, "sm_mhz": None}, "a/b  2.00x"),
        ({"claim": "a/b", "ratio": "x"}, "a/b"),
        ({}, ""),
    ],
)
def test_the_live_line_shows_the_figures_that_are_there(progress, line):
    assert terminal.live_line(progress) == line


def test_the_live_line_fits():
    assert terminal.live_line({"claim": "a" * 50}, 20) == "a" * 9 + "..." + "a" * 8


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
        assert "::" not in line
        assert "##[" not in line
        line.encode()


@pytest.mark.parametrize("text", ["::", ":::", ":\x00:", "::::", "a::b", "\n::warning::x"])
def test_no_colons_stay_together(text):
    assert "::" not in formatting.clean(text)


def test_markdown_cells_cannot_leave_their_table():
    bad = result(HOSTILE, outcome=Outcome.FAILED, message="a|b <img src=x> [l](u) *b* & `c`")
    text = terminal.markdown([bad])
    row = text.split("\n")[4]
    assert len(re.findall(r"(?<!\\)\|", row)) == len(formatting.COLUMNS)  # not "over first"
    assert row.startswith(r"| ch07/x\[")
    assert r"&lt;script&gt;\`" in row
    note = next(line for line in text.split("\n") if line.startswith("- "))
    assert note.endswith(r"a\|b &lt;img src=x&gt; \[l\](u) \*b\* &amp; \`c\`")


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
        r"2.000 ms | 1.000 ms | 2.010x \[2.000, 2.022\] | 1.01x | 4.200 TB/s | - | FASTER | - |"
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
        "2 claims: 2 FASTER; geometric mean 2.01x against non-naive baselines (1/2)",
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
