"""The proof counts right, finds what is planted in a fake device, and keeps what it found."""

import contextlib
import dataclasses
import json
import math
import random
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest
from aiperf_selfcheck import checks, ground_truth, other_timers
from aiperf_selfcheck import record as records
from aiperf_selfcheck.checks import Scale, fit
from aiperf_selfcheck.ground_truth import Heated, Judged, Workbench
from aiperf_selfcheck.other_timers import Answer, Case

from pytest_aiperf.build.launcher import Kernels
from pytest_aiperf.build.nvcc import build
from pytest_aiperf.claim.stopping_rule import StoppingRule
from pytest_aiperf.cli import main
from pytest_aiperf.errors import AiperfError, InvalidMeasurement, UsageError
from pytest_aiperf.model import Interval, Mode, Verdict
from tests.fake_gpu import CEILINGS, FAKE_GPU, FakeDevice, Noise, spend

ROOT = Path(__file__).parents[2]
TINY = Scale(runs=2, aa=8, power=4, drift=1, repeat=3, rivals=4)
TIMES = {"copy": 60e-6, "gemm": 200e-6, "softmax": 65e-6, "add": 5e-6}
UNSTOPPED = StoppingRule(
    target_half_width=0,
    min_replicates=16,
    max_replicates=16,
    rounds_per_replicate=5,
    time_budget_s=9,
)
CALM = Noise(white=0.0005, tail=0, drift=0, ramp=0, throttle_per_s=0, layout=0.0005, jump_chance=0)


def numbers(bench):
    return (np.random.default_rng(bench.seed).random(64),)


def taking(seconds):
    def arm(x):
        spend(seconds)
        return -x

    return arm


def by_blocks(workbench):
    """One of the ways: the median of our own blocks, of one arm after the other."""

    def way(call):
        block = workbench.device.block([call] * 10, Mode.PLAIN)
        return statistics.median(block.run() for _ in range(10)) / 10

    return way


class Cache:
    """An L2 of the fake device: what was read last is read fast."""

    def __init__(self, size=32 << 20):
        self.size, self.held = size, {}

    def sweep(self, size):
        def call():
            warm = self.held.pop(id(call), 0) == size
            self.held[id(call)] = size
            while sum(self.held.values()) > self.size:
                del self.held[next(iter(self.held))]
            spend(1e-6 + size / (7e12 if warm else 4e12))  # as any kernel, and for its bytes

        return call


def workbench(noise=CALM, seed=1, **changes):
    device = FakeDevice(FAKE_GPU, noise, seed=seed)
    spun, seeds = [], iter(range(100, 200))

    def timed_spin(seconds):
        spun.append(seconds)
        spend(seconds)

    def mean_spin_s():
        mean = statistics.fmean(spun) if spun else 0.0
        spun.clear()
        return mean

    def heat():
        device._wander = 0.03  # and the fake's own drift forgets it, as a GPU cools

    def in_fresh_process():
        return checks.one(workbench(noise, next(seeds)), TINY)["ratio"]

    fields = {
        "device": device,
        "kinds": {name: (numbers, taking(seconds)) for name, seconds in TIMES.items()},
        "claim": (numbers, taking(200e-6), taking(100e-6)),
        "spin": spend,
        "timed_spin": timed_spin,
        "mean_spin_s": mean_spin_s,
        "empty": lambda: spend(1e-6),
        "sweep": Cache().sweep,
        "limit": lambda: CEILINGS["read"],
        "heat": heat,
        "in_fresh_process": in_fresh_process,
        "progress": ground_truth.quiet,
        "random": random.Random(seed),
        "rest_s": 0.0,
    }
    return Workbench(**{**fields, **changes})


# arithmetic


def test_a_line_with_two_constants_is_found_again():
    truths, calls = [500e-6, 500e-6, 1e-3, 0.1], [250, 25, 1, 1]
    measured = [1.0005 * t + 0.5e-6 * n + 2e-6 for t, n in zip(truths, calls, strict=True)]
    slope, a_call, a_block = fit(truths, calls, measured)
    assert slope == pytest.approx(1.0005, abs=1e-7)
    assert a_call == pytest.approx(0.5e-6, rel=1e-3)
    assert a_block == pytest.approx(2e-6, rel=1e-2)


def test_relative_errors_decide_so_that_the_longest_does_not_alone():
    # 0.1 % too much at the longest would shift the constant of a plain fit by microseconds
    truths = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    slope, a_call, _ = fit(truths, [1] * 5, [t + 1e-6 + (1e-4 if t == 0.1 else 0) for t in truths])
    assert slope == pytest.approx(1, abs=5e-4)
    assert a_call == pytest.approx(1e-6, abs=2e-8)


def test_one_number_of_calls_gives_one_constant():
    truths = [1e-3, 2e-3, 5e-3]
    slope, a_call, a_block = fit(truths, [1, 1, 1], [t + 3e-6 for t in truths])
    assert (slope, a_call, a_block) == (pytest.approx(1), pytest.approx(3e-6), 0.0)


def said(verdict, value, half=0.004, **spreads):
    return Judged(verdict, Interval(value - half, value, value + half), 0.5, **spreads)


def test_identical_arms_are_counted():
    ones = [
        said(Verdict.SAME, 1.0, replicate_sd=0.003, round_sd=0.001),
        said(Verdict.FASTER, 1.031, replicate_sd=0.004, round_sd=0.001),
        said(Verdict.SLOWER, 0.97, half=0.002, replicate_sd=0, round_sd=0.001),
        said(Verdict.INCONCLUSIVE, 1.029, replicate_sd=0, round_sd=0.001),
        Judged(None, None, 1.0),
    ]
    found = checks.counted(ones)
    assert (found["comparisons"], found["refused"], found["false_alarms"]) == (5, 1, 2)
    assert found["beyond_3_percent"] == 2  # 1 / 0.97 is beyond, too
    assert found["half_width"] == pytest.approx(0.004, rel=0.05)
    assert found["replicate_sd"] == pytest.approx(0.0025)
    assert found["round_sd"] == pytest.approx(0.001)
    assert found["seconds_each"] == pytest.approx(0.6)


def test_nothing_to_count_is_no_error():
    assert checks.counted([Judged(None, None, 1.0)])["half_width"] is None


def test_answers_are_scored():
    answers = [
        Answer(1.0, Verdict.SAME, 1.001, 1.0),
        Answer(1.0, Verdict.FASTER, 1.05, 1.0),
        Answer(1.05, Verdict.FASTER, 1.05, 2.0),
        Answer(1.05, Verdict.SLOWER, 0.96, 2.0),
        Answer(1.05, Verdict.INCONCLUSIVE, 1.05, 2.0),
        Answer(1.05, None, None, 4.0),
    ]
    found = other_timers.scored(answers)
    off = [math.log(1.001), math.log(1.05), 0.0, math.log(0.96 / 1.05), 0.0]
    assert (found["identical"], found["different"]) == (2, 4)
    assert (found["false_alarms"], found["seen"]) == (2, 1)  # the wrong way is a false alarm
    assert found["bias"] == pytest.approx(statistics.fmean(off))
    assert found["error"] == pytest.approx(statistics.fmean(map(abs, off)))
    assert found["worst"] == pytest.approx(-off[3])
    assert found["seconds_each"] == 2.0


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.021, "FASTER"), (1.019, "SAME"), (0.981, "SAME"), (0.979, "SLOWER")],
)
def test_a_bare_ratio_is_judged_by_its_threshold(ratio, verdict):
    assert other_timers.by_threshold(ratio) == verdict


def test_spreads_tell_replicates_from_rounds():
    calm, laid = (
        ground_truth.judged(
            FakeDevice(FAKE_GPU, noise, seed=3), numbers, (taking(1e-4),) * 2, 0.0,
            UNSTOPPED, 7,
        )
        for noise in (
            Noise(**{**dict.fromkeys(Noise.__slots__, 0.0), "white": 0.004}),
            Noise(**{**dict.fromkeys(Noise.__slots__, 0.0), "layout": 0.004}),
        )
    )  # fmt: skip
    assert calm.round_sd == pytest.approx(0.004, rel=0.3)  # of a mean of two blocks each side
    assert calm.replicate_sd < calm.round_sd
    assert laid.replicate_sd == pytest.approx(0.004 * math.sqrt(2), rel=0.4)
    assert laid.round_sd < 1e-6


# on the fake device


def test_spins_are_timed_as_they_are():
    found = checks.spin(workbench(Noise.none()), TINY)
    for mode in ("graph", "backlog", "plain"):
        assert found[mode]["slope"] == pytest.approx(1, abs=1e-6)
        assert found[mode]["a_call_us"] == pytest.approx(0, abs=1e-4)
    assert found["host_clock"] == pytest.approx(1)


def test_a_clock_that_is_off_is_found_out():
    class Off(FakeDevice):
        def run(self, calls, mode, layout):
            seconds, last = super().run(calls, mode, layout)
            return 1.002 * seconds + 1e-6 * len(calls), last

    found = checks.spin(workbench(device=Off(FAKE_GPU, Noise.none())), TINY)
    assert found["graph"]["slope"] == pytest.approx(1.002, abs=1e-4)
    assert found["graph"]["a_call_us"] == pytest.approx(1, abs=0.01)
    graph, *_, host = records.rows({"spin": found})
    assert graph.holds is False
    assert host.holds is False


def test_a_block_that_ran_twice_does_not_count_twice():
    class Twice(FakeDevice):
        def run(self, calls, mode, layout):
            for call in calls:  # held back too short: its time does not count
                call()
            return super().run(calls, mode, layout)

    found = checks.spin(workbench(device=Twice(FAKE_GPU, Noise.none())), TINY)
    assert found["backlog"]["slope"] == pytest.approx(1, abs=1e-6)


def test_the_floor_is_that_of_an_empty_kernel():
    assert checks.floor(workbench(Noise.none()), TINY) == pytest.approx(dict.fromkeys(Mode, 1.0))


def test_rotated_inputs_are_as_cold_as_flushed_ones():
    found = checks.flush(workbench(Noise.none()), TINY)
    assert found["sets"] >= 3
    assert found["as_cold_as_flushed"] == pytest.approx(1)
    assert found["rotated_us"] == pytest.approx(1 + found["bytes"] / 4e12 * 1e6)
    assert found["warm_of_limit"] == pytest.approx(7 / 4.5)
    assert [row.holds for row in records.rows({"flush": found})] == [True]


def test_a_rotation_that_stays_in_the_cache_is_found_out():
    found = checks.flush(workbench(Noise.none(), sweep=Cache(200 << 20).sweep), TINY)
    assert found["as_cold_as_flushed"] < 0.1
    assert [row.holds for row in records.rows({"flush": found})] == [False]


def test_the_modes_agree():
    found = checks.modes(workbench(Noise.none()), TINY)
    assert set(found["us"]) == set(Mode)
    assert found["us"]["graph"] == pytest.approx(60)
    assert found["apart"] == pytest.approx(0)


def test_identical_arms_are_told_to_be_the_same(record):
    found = record["parts"]["aa"]
    assert (found["comparisons"], found["false_alarms"], found["confirmed"]) == (8, 0, 0)
    assert {kind: f["comparisons"] for kind, f in found["kinds"].items()} == dict.fromkeys(TIMES, 2)
    assert 0 < found["floor"] < 0.02


def test_an_alarm_is_asked_again(monkeypatch):
    plans = []

    def alarmed(_clock, _inputs, _arms, _floor, plan, *_):
        plans.append(plan)
        first = plan is ground_truth.SHORT or len(plans) < 3
        return said(Verdict.FASTER if first else Verdict.SAME, 1.04)

    monkeypatch.setattr(checks, "judged", alarmed)
    found = checks.aa(workbench(known_floor=0.0), Scale(2, 3, 0, 0, 0, 0))
    assert (found["false_alarms"], found["confirmed"]) == (3, 1)
    assert plans == [ground_truth.SHORT, ground_truth.STANDARD] * 3


def test_comparisons_that_break_keep_those_before(monkeypatch):
    ones = iter([said(Verdict.SAME, 1.0)] * 2)
    monkeypatch.setattr(checks, "judged", lambda *_: next(ones))
    found = checks.aa(workbench(known_floor=0.0), Scale(2, 3, 0, 0, 0, 0))
    assert (found["comparisons"], found["broken"]) == (2, "StopIteration: ")
    first = records.rows({"aa": found})[0]
    assert first.found.endswith("; then StopIteration: ")
    assert not first.holds


@pytest.mark.parametrize("kind", TIMES)
def test_an_arm_is_made_longer_by_a_share(kind):
    here = workbench(Noise.none())
    slow, fast = ground_truth.longer(here, here.kinds[kind])(0.02)
    clock = here.device
    x = np.ones(3)
    took = [clock.block([lambda a=a: a(x)], Mode.PLAIN).run() for a in (slow, fast)]
    assert took[0] / took[1] == pytest.approx(1.02, abs=1e-5)


def test_a_spin_that_does_not_show_is_no_proof():
    with pytest.raises(InvalidMeasurement, match="did not show"):
        ground_truth.longer(
            (here := workbench(Noise.none(), spin=lambda _: None)), here.kinds["copy"]
        )


def test_slowdowns_are_seen_in_either_direction(record):
    found = record["parts"]["power"]
    assert {"0.005", "0.01", "0.02", "0.05"} < set(found)
    assert (found["0.05"]["seen"], found["0.05"]["of"], found["0.05"]["wrong"]) == (4, 4, 0)
    assert found["0.02"]["seen"] == 4
    assert found["0.05"]["mean"] == pytest.approx(0.05, abs=0.005)


def test_heat_disturbs_medians_one_after_the_other_and_not_rounds():
    noise = dataclasses.replace(CALM, drift=1e-4, drift_s=0.003)
    found = checks.drift(workbench(noise), Scale(2, 0, 0, 4, 0, 0))
    heated = found["heated"]
    assert heated["comparisons"] == 8
    assert (heated["ours"]["false_alarms"], heated["ours"]["refused"]) == (0, 0)
    assert heated["sequential"]["sd"] > heated["ours"]["sd"]
    assert heated["slower_after_heat"] > 0.005
    assert found["cold"]["slower_after_heat"] is None


def test_heat_comes_before_some_timed_blocks_and_no_other():
    heats = []
    clock = Heated(FakeDevice(FAKE_GPU, Noise.none()), lambda: heats.append(1), random.Random(2))
    for _ in range(20):
        clock.block([lambda: "last"], Mode.WALL).run()
    assert not heats
    block = clock.block([lambda: "last" if spend(1e-6) is None else None], Mode.GRAPH)
    assert block.last is None or block.last == "last"
    for _ in range(100):
        block.run()
    assert block.last == "last"
    assert 30 < len(heats) < 70
    assert clock.effect() == pytest.approx(0)


def test_one_claim_is_measured_in_several_processes(record):
    found = record["parts"]["repeat"]
    assert found["processes"] == 3
    assert found["ratio"] == pytest.approx(2, rel=0.01)
    assert 0 < found["sd"] < 0.01


def test_ways_are_held_against_each_other():
    here = workbench(known_floor=0.0)
    cases = (Case(5e-6), Case(5e-6, 0.05), Case("copy", stress="heated"), Case("copy", 0.05))
    found = other_timers.head_to_head(
        here, cases, {"blocks": by_blocks(here), "blind": lambda _: 1.0}
    )
    assert set(found["ways"]) == {"ours", "blocks", "blind"}
    assert found["ways"]["ours"]["seen"] == 2
    assert found["ways"]["ours"]["false_alarms"] == 0
    assert found["ways"]["blind"]["seen"] == 0
    assert found["ways"]["blind"]["bias"] == pytest.approx(-math.log(1.05) / 2)
    assert list(found["cases"]) == [
        "spin 5 us 1x",
        "spin 5 us 1.05x",
        "copy 1x heated",
        "copy 1.05x",
    ]


def test_ten_cases_are_identical_and_ten_are_not_and_names_are_distinct():
    assert len(other_timers.CASES) == len({str(case) for case in other_timers.CASES}) == 20
    assert sum(case.share == 0 for case in other_timers.CASES) == 10
    assert {case.kind for case in other_timers.CASES if isinstance(case.kind, str)} <= set(TIMES)


# the record


class Alone:
    """Counts the turns in which a GPU was had alone."""

    def __init__(self):
        self.turns, self.held = 0, False

    @contextlib.contextmanager
    def __call__(self):
        assert not self.held
        self.turns, self.held = self.turns + 1, True
        try:
            yield
        finally:
            self.held = False


def test_each_part_is_kept_and_one_that_breaks_costs_no_other(monkeypatch):
    def breaks(*_):
        raise RuntimeError("CUDA error: an illegal address\nmore")

    alone, kept, told = Alone(), {}, []
    monkeypatch.setattr(records, "PARTS", {**records.PARTS, "flush": breaks})
    monkeypatch.setattr(records, "QUICK", TINY)
    names = ("floor", "flush", "modes")
    records.run(names, workbench, alone, kept.__setitem__, told.append, quick=True)
    assert list(kept) == list(names)
    assert kept["flush"]["failed"] == "RuntimeError: CUDA error: an illegal address"
    assert kept["modes"]["quick"] is True
    assert alone.turns == 4  # one to make the workbench
    assert any("Traceback" in line for line in told)
    assert [row.holds for row in records.rows(kept)] == [None, False, None]


def test_processes_take_the_lease_themselves(monkeypatch):
    alone, kept = Alone(), {}

    def in_fresh_process():
        assert not alone.held
        return 2.0

    monkeypatch.setattr(records, "FULL", TINY)
    records.run(
        ("repeat",),
        lambda: workbench(in_fresh_process=in_fresh_process),
        alone,
        kept.__setitem__,
        ground_truth.quiet,
    )
    assert kept["repeat"]["ratio"] == pytest.approx(2)


def test_an_interrupt_keeps_what_has_ended(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "FULL", TINY)
    monkeypatch.setattr(records, "PARTS", {**records.PARTS, "aa": interrupted})
    record = records.Record(FAKE_GPU, tmp_path / "proof.json")
    with pytest.raises(KeyboardInterrupt):
        records.run(("floor", "aa"), workbench, Alone(), record.keep, ground_truth.quiet)
    assert list(records.read(tmp_path / "proof.json")["parts"]) == ["floor"]


def test_parts_of_the_same_machine_stay_in_the_record(tmp_path):
    path = tmp_path / "proof.json"
    records.Record(FAKE_GPU, path).keep("floor", {"graph": 0.123456789})
    records.Record(FAKE_GPU, path).keep("spin", {"slope": [1.0]})
    content = records.read(path)
    assert content["parts"] == {"spin": {"slope": [1.0]}, "floor": {"graph": 0.12346}}
    assert content["gpu"]["uuid"] == ""
    other = FakeDevice(None).gpu or records.replace(FAKE_GPU, driver="1")
    records.Record(other, path).keep("aa", {})
    assert list(records.read(path)["parts"]) == ["aa"]


def test_what_is_no_record_is_refused(tmp_path):
    (path := tmp_path / "x.json").write_text('{"schema": 2, "parts": {}}')
    with pytest.raises(UsageError, match="no proof of schema 1"):
        records.read(path)


def test_unknown_parts_are_refused():
    assert records.parts_named(None) == records.ALL
    assert records.parts_named("spin, aa") == ("spin", "aa")
    assert "one" not in records.ALL
    with pytest.raises(UsageError, match="no part is called 'spins'"):
        records.parts_named("spins")


@pytest.fixture(scope="module")
def record():
    """Prove all that can be proven on the fake device."""
    made = {name: part for name, part in records.PARTS.items() if name != "rivals"}
    here = workbench(dataclasses.replace(CALM, white=5e-5, layout=5e-5))
    found = {name: {"date": "2026-11-22", **part(here, TINY)} for name, part in made.items()}
    cases = other_timers.head_to_head(here, other_timers.CASES[:2], {"blocks": by_blocks(here)})
    found["rivals"] = {"date": "2026-11-21", **cases}
    path = records.Record(FAKE_GPU, None)
    for name, figures in found.items():
        path.keep(name, figures)
    return path.content


def test_a_record_is_small_strict_json(record):
    text = json.dumps(record, allow_nan=False)
    assert len(text) < 8_000


def test_all_parts_have_their_lines(record):
    rows = records.rows(record["parts"])
    assert [row.proof for row in rows if row.holds is False] == []
    shown = "\n".join(records.lines(record["parts"]))
    for word in ("graph", "nothing", "MiB", "0.5 % slower", "heated", "3 processes", "identical"):
        assert word in shown
    assert "| ours " in shown
    assert len({len(line) for line in shown.split("\n\n")[0].splitlines()}) == 1


def test_figures_that_miss_what_is_wanted_do_not_hold(record):
    aa = {**record["parts"]["aa"], "comparisons": 300, "false_alarms": 4, "confirmed": 1}
    repeat = {**record["parts"]["repeat"], "sd": 0.006}
    heated = {"ours": {"false_alarms": 0, "refused": 2, "sd": None}}
    drift = {"heated": {**record["parts"]["drift"]["heated"], **heated}}  # all of them refused
    rows = records.rows({"aa": aa, "repeat": repeat, "drift": drift})
    assert [row.holds for row in rows] == [False, False, True, False, False]


def test_a_readme_gets_its_section(tmp_path, record, capsys):
    (proof := tmp_path / "p.json").write_text(json.dumps(record))
    (readme := tmp_path / "README.md").write_text("A\n<!-- proof -->\nbygone\n<!-- /proof -->\nB\n")
    for _ in range(2):  # and nothing grows
        assert main(["prove", "--readme", str(readme), str(proof)]) == 0
    text = readme.read_text()
    assert text.startswith("A\n<!-- proof -->\n\nFake H200, driver 0, torch ")
    assert "2026-11-21 to 2026-11-22, `python -m pytest_aiperf prove`:" in text
    assert text.endswith("\n\n<!-- /proof -->\nB\n")
    assert "bygone" not in text
    readme.write_text("No marks.")
    assert main(["prove", "--readme", str(readme), str(proof)]) == 2
    assert "put a line <!-- proof -->" in capsys.readouterr().err
    assert main(["prove", "--readme", str(readme)]) == 2
    assert "goes with a record" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_proven(monkeypatch, capsys):
    monkeypatch.setattr("pytest_aiperf.session.cuda_machine.CudaMachine.gpus", lambda _: [])
    assert main(["prove"]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err


def test_the_command_prints_and_keeps(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PYTEST_AIPERF_LOCKS", str(tmp_path / "locks"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("pytest_aiperf.session.cuda_machine.CudaMachine.gpus", lambda _: [FAKE_GPU])
    monkeypatch.setattr(
        "pytest_aiperf.session.cuda_machine.CudaMachine.open_device", lambda *_: None
    )
    monkeypatch.setattr(ground_truth, "on_gpu", lambda _, progress: workbench(progress=progress))
    path = tmp_path / "proof.json"
    assert main(["prove", "--only=floor,repeat", "--quick", f"--json={path}"]) == 0
    out, err = capsys.readouterr()
    assert "| a kernel that does nothing " in out
    assert "repeat: 2 of 2: " in err
    assert list(records.read(path)["parts"]) == ["floor", "repeat"]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "PARTS", {**records.PARTS, "aa": interrupted})
    assert main(["prove", "--only=floor,aa"]) == 1
    out, err = capsys.readouterr()
    assert "| a kernel that does nothing " in out
    assert "interrupted" in err


def test_the_readmes_proof_is_that_of_the_record(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    path = ROOT / "results" / "proof-h200.json"
    if not path.exists():
        assert "<!-- proof -->" not in text
        return
    command = f"python -m pytest_aiperf prove --readme README.md {path.relative_to(ROOT)}"
    (copy := tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert main(["prove", "--readme", str(copy), str(path)]) == 0
    assert text == copy.read_text(encoding="utf-8"), f"run: {command}"


def test_a_gpus_rig_calibrates_its_spins(monkeypatch):
    """The kernels are stood in for: 2 GHz, and a timer that counts."""
    seen = []

    def spin(cycles):
        seen.append(cycles)
        spend(cycles / 2e9)

    def timed_spin(cycles, counts):
        spin(cycles)
        counts[0] += round(cycles / 2)
        counts[1] += 1

    looked_up = []

    class Kernels(dict):
        def __getitem__(self, name):
            looked_up.append(name)
            return super().__getitem__(name)

    kernels = {
        "spin": spin,
        "timed_spin": timed_spin,
        "empty": lambda: None,
        "sweep": lambda data, size, _: spend(size),
    }
    monkeypatch.setattr(ground_truth.nvcc, "Nvcc", lambda *_: lambda _: Kernels(kernels))
    monkeypatch.setattr(ground_truth, "_SIDE", 8)
    monkeypatch.setattr(
        ground_truth.ceilings, "known", lambda _clock, names, _say: {names[0]: 4e12}
    )
    here = ground_truth.on_gpu(FakeDevice(FAKE_GPU, Noise.none()), ground_truth.quiet)
    assert len(looked_up) == 4  # which takes the host longer than a launch: never in a call
    here.timed_spin(5e-6)
    here.timed_spin(15e-6)
    here.spin(1e-6)
    assert seen[-3:] == [10_000, 30_000, 2_000]
    assert here.mean_spin_s() == pytest.approx(10e-6)
    assert here.mean_spin_s() == 0  # asked anew
    assert here.device.block([here.sweep(3)], Mode.PLAIN).run() == 3
    assert here.limit() == 4e12
    here.heat()
    assert set(here.kinds) == set(TIMES)
    assert len(looked_up) == 4


@pytest.mark.parametrize("works", [True, False])
def test_a_process_of_its_own_measures_one_claim(monkeypatch, works):
    def ran(command, **options):
        assert command[1:5] == ["-m", "pytest_aiperf", "prove", "--only=one"]
        assert options["timeout"]
        if works:
            path = command[5].removeprefix("--json=")
            Path(path).write_text('{"parts": {"one": {"ratio": 2.5}}}')
        return subprocess.CompletedProcess(command, 0, "", "no GPU\n")

    monkeypatch.setattr(ground_truth.subprocess, "run", ran)
    if works:
        assert ground_truth._in_fresh_process() == 2.5
    else:
        with pytest.raises(AiperfError, match="failed and said: no GPU"):
            ground_truth._in_fresh_process()


def test_the_kernels_build_and_take_what_they_are_given():
    source = ground_truth._KERNELS
    made = build(source, "sm90")
    kernels = Kernels(source.name, source.read_text(), made.path)
    assert {name: kernels[name].text.partition("(")[2] for name in kernels} == {
        "spin": "long long cycles, cudaStream_t stream)",
        "timed_spin": "long long cycles, unsigned long long* totals, cudaStream_t stream)",
        "empty": "cudaStream_t stream)",
        "sweep": "const void* in, size_t bytes, unsigned* out, cudaStream_t stream)",
    }
    assert all(kernel.spill_bytes == 0 for kernel in made.kernels)
