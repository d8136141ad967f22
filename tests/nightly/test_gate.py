"""The command `gate` from results files to exit status, history and file of flagged claims."""

import dataclasses
import json

import pytest
from aiperf_nightly import history
from aiperf_nightly.history import Night

from pytest_aiperf.cli import main
from pytest_aiperf.model import Interval, Outcome
from pytest_aiperf.schema import to_json
from tests.plugin.records import STACK, result, timing_of

EPOCH = "NVIDIA H200, driver 580.159, cuda 13.0, torch 2.11.0"
SENTINEL = "ch01/gemm"
COPY = "ch07/copy"
LOW, USUAL = 1.5, 2.0


def claim(name=COPY, speedup=USUAL, key="h200", run="tonight", **more):
    more |= {"key": key, "run": run}
    if speedup is None:
        return result(name, speedup=None, **more)
    times = timing_of(baseline=Interval(speedup * 0.998, speedup, speedup * 1.002))
    return result(name, timing=times, **more)


def crashed(name=COPY, **more):
    return claim(name, speedup=None, outcome=Outcome.ERROR, message="it crashed", **more)


def failed(name=COPY, **more):
    return claim(name, outcome=Outcome.FAILED, message="its evidence does not hold", **more)


def skipped(name=COPY, **more):
    return claim(name, speedup=None, outcome=Outcome.SKIPPED, message="needs transformers", **more)


class Machine:
    """A folder with histories in which `gate` runs."""

    def past(self, count=10, key="h200", sentinels=(), seconds=1e-3, **more):
        """Add nights in which every claim has its usual speedup."""
        claims = dict.fromkeys((SENTINEL, COPY, "ch04/ring"), USUAL)
        for i in range(count):
            times = dict.fromkeys(sentinels, seconds)
            night = Night(f"2025-02-{i + 1:02}", f"past {i}", key, EPOCH, claims, times)
            history.append(self.file(key), dataclasses.replace(night, **more))

    def file(self, key="h200"):
        return self.path / "history" / f"{key}.jsonl"

    def nights(self, key="h200"):
        return history.read_history(self.file(key))

    def write(self, name, results):
        benchmarks = [{"name": r.claim, "aiperf": to_json(r)} for r in results]
        (self.path / name).write_text(json.dumps({"benchmarks": benchmarks}))
        return name

    def gate(self, *results, again=(), sentinels=()):
        """Run `gate`; return its exit status, its output and the flagged test ids."""
        words = ["gate", self.write("night.json", results), "--flagged", "flagged.txt"]
        if sentinels:
            (self.path / "sentinels.txt").write_text("\n".join(sentinels) + "\n\n")
            words += ["--sentinels", "sentinels.txt"]
        files = [self.write(f"again-{i}.json", run) for i, run in enumerate(again)]
        status = main([*words, *(["--again", *files] if files else [])])
        out, err = self.capsys.readouterr()
        flagged = self.path / "flagged.txt"
        return status, out + err, flagged.read_text().split() if flagged.exists() else []


@pytest.fixture
def machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    machine = Machine()
    machine.path, machine.capsys = tmp_path, capsys
    return machine


def further(*runs):
    return [[dataclasses.replace(r, run=f"again {i}") for r in run] for i, run in enumerate(runs)]


def test_a_usual_night_is_added_and_exits_0(machine):
    machine.past()
    assert machine.gate(claim()) == (
        0,
        "h200: 1 claims, 0 provisional, 0 flagged, 0 confirmed\n",
        [],
    )
    assert machine.nights()[-1].run == "tonight"


def test_a_night_is_added_once_on_a_machine_with_two_kinds_of_results(machine):
    machine.past()
    machine.past(key="2xh200")
    night = [claim(speedup=LOW), claim("ch04/ring", key="2xh200")]
    status, out, flagged = machine.gate(*night)
    assert (status, flagged) == (0, ["tests/ch07/test_x.py::test_copy"])
    assert "flagged, to be measured again: ch07/copy: 1.500x, 25.0% below" in out
    status, out, _ = machine.gate(*night, again=further([night[0]], [night[0]]))
    assert status == 1
    assert "\nconfirmed: ch07/copy" in f"\n{out}"
    assert [len(machine.nights(key)) for key in ("h200", "2xh200")] == [11, 11]


@pytest.mark.parametrize("order", [1, -1])
def test_a_further_run_counts_for_its_own_kind_of_gpu(machine, order):
    machine.past(key="2xh200")
    machine.past(key="4xh200")
    night = [claim("ch04/ring", LOW, "2xh200"), claim("ch04/ring", USUAL, "4xh200")]
    status, out, _ = machine.gate(*night, again=further(night[::order], night[::order]))
    assert status == 1
    assert "\nconfirmed: ch04/ring" in f"\n{out}"


@pytest.mark.parametrize(
    "worse",
    [
        crashed(),
        claim(speedup=LOW, outcome=Outcome.INVALID, message="too fast"),
        claim(speedup=None, outcome=Outcome.FAILED, message="wrong result"),
        claim("ch07/other"),
    ],
    ids=["crash", "invalid", "wrong", "missing"],
)
def test_a_flagged_claim_that_gets_worse_or_is_lost_is_confirmed(machine, worse):
    machine.past()
    low = claim(speedup=LOW)
    assert machine.gate(low, again=further([low], [worse]))[0] == 1


def test_one_further_run_with_the_usual_speedup_clears_a_flag(machine):
    machine.past()
    low = claim(speedup=LOW)
    status, out, _ = machine.gate(low, again=further([low], [claim()]))
    assert status == 0
    assert "not confirmed: ch07/copy" in out
    assert len(machine.nights()) == 11


@pytest.mark.parametrize(
    "worse", [failed(), crashed(), claim(outcome=Outcome.INVALID, message="too fast"), skipped()],
    ids=["failed", "crashed", "invalid", "skipped"],
)  # fmt: skip
def test_a_claim_that_passed_in_the_last_valid_night_and_not_tonight_is_flagged(machine, worse):
    machine.past()
    machine.past(1, void="sick", failed={COPY: "FAILED"})
    status, out, flagged = machine.gate(worse, claim(SENTINEL))
    assert (status, flagged) == (0, [worse.nodeid])
    assert f"ch07/copy: {worse.outcome}, and it passed in the night of 2025-02-10" in out
    again = further([worse], [worse])
    assert machine.gate(worse, claim(SENTINEL), again=again)[0] == 1
    tomorrow = dataclasses.replace(worse, run="tomorrow")
    assert machine.gate(tomorrow, claim(SENTINEL, run="tomorrow"))[0::2] == (0, [])


def test_a_failure_that_a_further_run_clears_is_flagged_again_the_next_night(machine):
    machine.past()
    assert machine.gate(failed(), again=further([failed()], [claim()]))[0] == 0
    assert machine.gate(failed(run="tomorrow"))[2] == [failed().nodeid]


def test_a_failure_hides_no_drop_and_a_drop_hides_no_failure(machine):
    machine.past()
    low = failed(speedup=LOW)
    for cleared_only_of_one in (claim(speedup=LOW), failed()):
        status, out, _ = machine.gate(low, again=further([low], [cleared_only_of_one]))
        assert status == 1, out
        machine.file().unlink()
        machine.past()


def test_a_kind_of_gpu_on_which_no_claim_has_a_speedup_is_judged(machine):
    machine.past()
    machine.past(key="2xh200")
    broken = crashed("ch04/ring", key="2xh200")
    assert machine.gate(claim(), broken)[2] == [broken.nodeid]


def test_a_drop_that_comes_with_a_new_driver_is_flagged(machine):
    machine.past()
    new = {"stack": {**STACK, "driver": "590"}}
    low = claim(speedup=LOW, **new)
    assert machine.gate(low)[0::2] == (0, [low.nodeid])
    assert machine.gate(low, again=further([low], [low]))[0] == 1
    second = claim(speedup=LOW, run="second", **new)
    assert machine.gate(second) == (
        0,
        "h200: 1 claims, 1 provisional, 0 flagged, 0 confirmed\n",
        [],
    )


def test_a_claim_that_fails_with_a_new_driver_is_flagged(machine):
    machine.past(3)
    assert machine.gate(failed(stack={**STACK, "driver": "590"}))[2] == [failed().nodeid]


def test_a_void_night_is_added_and_exits_1(machine):
    machine.past(sentinels=[SENTINEL], seconds=2e-4)
    status, out, flagged = machine.gate(claim(SENTINEL), claim(speedup=LOW), sentinels=[SENTINEL])
    assert (status, flagged) == (1, [])
    assert "void: the sentinel ch01/gemm takes 5.00 times its usual 0.0002 s" in out
    assert machine.nights()[-1].void


def test_a_void_night_waits_for_further_runs_on_another_kind_of_gpu(machine):
    machine.past(sentinels=[SENTINEL], seconds=2e-4)
    machine.past(key="2xh200")
    night = [claim(SENTINEL), claim("ch04/ring", LOW, "2xh200")]
    assert machine.gate(*night, sentinels=[SENTINEL])[0] == 0
    again = further([claim("ch04/ring", key="2xh200")])
    assert machine.gate(*night, again=again, sentinels=[SENTINEL])[0] == 1
    assert [len(machine.nights(key)) for key in ("h200", "2xh200")] == [11, 11]


@pytest.mark.parametrize("tonight", [(), (crashed(SENTINEL),)], ids=["renamed", "crashed"])
def test_a_listed_sentinel_without_a_figure_voids_the_night(machine, tonight):
    machine.past(sentinels=[SENTINEL])
    status, out, _ = machine.gate(claim(), *tonight, sentinels=[SENTINEL])
    assert status == 1
    assert "void: the sentinel ch01/gemm has no valid figure" in out


def test_a_sentinel_that_is_no_longer_listed_does_not_count(machine):
    machine.past(sentinels=["ch01/gemm"])
    night = [claim(speedup=LOW), claim("ch07/new")]
    status, out, flagged = machine.gate(*night, sentinels=["ch07/new"])
    assert (status, len(flagged)) == (0, 1)
    assert "void" not in out


def test_a_sentinel_that_one_kind_of_gpu_measures_suffices(machine):
    night = [claim(SENTINEL), claim("ch04/ring", key="2xh200")]
    assert machine.gate(*night, sentinels=[SENTINEL])[0] == 0


def test_a_run_is_judged_and_added_only_once(machine):
    machine.past()
    assert machine.gate(claim())[0] == 0
    status, out, _ = machine.gate(claim())
    assert status == 2
    assert out.startswith("gate: history/h200.jsonl has the run tonight already")
    assert len(machine.nights()) == 11


def test_a_night_is_not_added_if_the_flagged_claims_cannot_be_written(machine):
    machine.past()
    (machine.path / "flagged.txt").mkdir()
    assert main(["gate", machine.write("night.json", [claim()]), "--flagged", "flagged.txt"]) == 2
    assert len(machine.nights()) == 10


def test_a_further_run_is_another_run(machine):
    machine.past()
    low = claim(speedup=LOW)
    first, _ = further([low], [low])
    for again in ([[low]], [first, first]):
        status, out, _ = machine.gate(low, again=again)
        assert status == 2
        assert f"again-{len(again) - 1}.json is no further run" in out
    assert len(machine.nights()) == 10
