"""The nightly gate: bands, sick machines, fleet-wide shifts, confirmation, and its error rates."""

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest
from aiperf_nightly import history
from aiperf_nightly.history import Flag, Gate, Night

from pytest_aiperf.cli import main
from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Interval, Outcome
from pytest_aiperf.schema import to_json
from tests.plugin.records import result

SENTINEL = "ch01/batched_gemm"


def night(epoch="driver 580", sentinel=1e-3, void="", **claims):
    return Night("2026-11-01T02:00:00+00:00", "run", "h200", epoch, claims,
                 {SENTINEL: sentinel}, void)  # fmt: skip


def quiet(nights, **claims):
    """Make nights whose speedups differ by up to 0.4 %."""
    wobble = [1 + 0.002 * ((i * 7) % 5 - 2) / 2 for i in range(nights)]
    return [night(**{c: v * w for c, v in claims.items()}) for w in wobble]


def test_a_claim_that_falls_out_of_its_band_is_flagged():
    gate = history.judge(quiet(10, copy=1.5, gemm=2.0), night(copy=1.44, gemm=2.0))
    assert [(f.claim, f.value) for f in gate.flags] == [("copy", 1.44)]
    assert gate.flags[0].median == pytest.approx(1.5, rel=0.002)
    assert str(gate.flags[0]) == "copy: 1.440x, 4.0% below its median 1.500x"


def test_a_drop_as_between_two_sessions_is_never_flagged():
    assert not history.judge(quiet(10, copy=1.5), night(copy=1.5 * 0.97)).flags
    assert history.judge(quiet(10, copy=1.5), night(copy=1.5 * 0.96)).flags


def test_a_noisy_claim_has_a_wide_band():
    noisy = [night(launch=5.0 * f) for f in (0.9, 1.1, 0.95, 1.0, 1.05, 0.92, 1.08, 1.0, 0.97)]
    assert not history.judge(noisy, night(launch=4.5)).flags
    assert history.judge(noisy, night(launch=2.9)).flags


def test_faster_is_never_flagged():
    assert not history.judge(quiet(10, copy=1.5), night(copy=3.0)).flags


def test_a_short_past_is_provisional():
    gate = history.judge(quiet(7, copy=1.5), night(copy=0.5))
    assert gate == Gate(provisional=("copy",))


@pytest.mark.parametrize("past", [{"epoch": "driver 590"}, {"void": "sick"}])
def test_other_epochs_and_void_nights_do_not_count(past):
    nights = [dataclasses.replace(n, **past) for n in quiet(20, copy=1.5)]
    nights.insert(0, night(copy=1.5))
    assert history.judge(nights, night(copy=0.5)).provisional == ("copy",)


@pytest.mark.parametrize("seconds", [1.2e-3, 0.8e-3])
def test_a_sentinel_out_of_its_band_voids_the_night(seconds):
    gate = history.judge(quiet(10, copy=1.5), night(sentinel=seconds, copy=0.5))
    assert SENTINEL in gate.void
    assert not gate.flags


def test_a_listed_sentinel_that_has_no_figure_voids_the_night():
    lost = measured(SENTINEL, 1.5, outcome=Outcome.INVALID)
    [tonight] = history.nights_of([measured("copy", 1.5), lost], [SENTINEL])
    assert "no valid figure" in history.judge(quiet(10, copy=1.5), tonight).void


def test_only_tonights_sentinels_count():
    tonight = dataclasses.replace(night(copy=1.0), sentinels={"other": 1.0})
    gate = history.judge(quiet(10, copy=1.5), tonight)
    assert (gate.void, len(gate.flags)) == ("", 1)


def test_a_shift_of_everything_is_one_alarm():
    claims = {f"c{i}": 2.0 for i in range(20)}
    gate = history.judge(quiet(10, **claims), night(**dict.fromkeys(claims, 1.8)))
    assert "20 of 20 claims lie below their bands, by 10.0%" in gate.shift


def test_a_flag_stands_unless_a_further_run_clears_it():
    flag = Flag("copy", 1.5, 1.45, 1.40)
    low, high = (measured("copy", v) for v in (1.41, 1.5))
    crashed = dataclasses.replace(high, outcome=Outcome.ERROR, speedup=None)
    elsewhere = dataclasses.replace(high, key="2xh200")
    for second in ([low], [crashed], [elsewhere], []):
        assert history.confirmed([flag], [[low], second], "h200") == [flag]
    assert history.confirmed([flag], [[low], [high]], "h200") == []
    assert history.confirmed([flag], [], "h200") == []


def test_the_first_night_of_an_epoch_has_the_band_of_the_epoch_before():
    nights = [*quiet(10, copy=1.5), night(void="sick", epoch="driver 590", copy=1.5)]
    first = night(epoch="driver 590", sentinel=5e-3, copy=1.0)  # a sentinel is not compared
    assert [f.claim for f in history.judge(nights, first).flags] == ["copy"]
    assert history.judge([*nights, first], first).provisional == ("copy",)


def test_a_night_has_the_epoch_of_a_record_that_names_its_gpu():
    early = measured("ch07/early", 1.5, gpu=None, stack={}, started="2025-01-01T00:00:00+00:00")
    assert history.night_of([early, measured("ch07/copy", 1.5)]).epoch.startswith("NVIDIA H200, ")


def measured(claim, speedup, **more):
    words = {"key": "h200", "outcome": Outcome.PASSED} | more
    record = result(claim, **words)
    return dataclasses.replace(record, speedup=Interval(speedup, speedup, speedup))


def test_a_night_is_made_of_valid_results_on_one_gpu():
    rows = [
        measured("ch07/copy", 1.5),
        measured("ch07/lost", 9.0, outcome=Outcome.INVALID),
        measured("ch05/shard", 3.0, key="cpu", host=True),
    ]
    tonight = history.night_of(rows)
    assert dict(tonight.claims) == {"ch07/copy": 1.5}
    assert tonight.key == "h200"
    with pytest.raises(UsageError, match="one kind of GPU"):
        history.night_of([*rows, measured("ch07/other", 1.0, key="b200")])


def test_only_sentinels_are_recorded_with_their_seconds():
    rows = [measured(SENTINEL, 1.5), measured("ch07/copy", 1.5)]
    assert list(history.night_of(rows, [SENTINEL]).sentinels) == [SENTINEL]
    assert not history.night_of(rows).sentinels


def test_history_is_appended_and_read_back(tmp_path):
    path = tmp_path / "history" / "h200.jsonl"
    nights = quiet(3, copy=1.5)
    for n in nights:
        history.append(path, n)
    assert history.read_history(path) == nights


def test_a_line_torn_at_any_byte_costs_that_night_only(tmp_path):
    path = tmp_path / "h200.jsonl"
    first, second = quiet(2, copy=1.5)
    history.append(path, first)
    history.append(path, second)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert history.read_history(path) == [first]
        history.append(path, second)
        assert path.read_bytes() == whole


def test_a_night_whose_line_only_lacks_its_end_is_kept(tmp_path):
    path = tmp_path / "h200.jsonl"
    nights = quiet(3, copy=1.5)
    history.append(path, nights[0])
    history.append(path, nights[1])
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    history.append(path, nights[2])
    assert history.read_history(path) == nights


def test_a_torn_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "h200.jsonl"
    history.append(path, night(copy=1.5))
    path.write_text('{"started": \n' + path.read_text())
    with pytest.raises(UsageError, match=r"h200\.jsonl:1 is not a line of a history"):
        history.read_history(path)


def test_a_missing_file_of_sentinels_is_status_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    benchmark = {"name": "ch06/a", "aiperf": to_json(result("ch06/a"))}
    Path("run.json").write_text(json.dumps({"benchmarks": [benchmark]}))
    assert main(["gate", "run.json", "--sentinels", "missing.txt"]) == 2
    assert capsys.readouterr().err.startswith("gate: cannot read missing.txt: ")


def test_a_lasting_step_is_found():
    rng = random.Random(1)
    nights = [night(copy=1.5 * math.exp(rng.gauss(0, 0.004)) * (0.98 if i > 25 else 1),
                    gemm=2.0 * math.exp(rng.gauss(0, 0.004))) for i in range(50)]  # fmt: skip
    nights = [dataclasses.replace(n, started=f"night {i}") for i, n in enumerate(nights)]
    [step] = history.change_points(nights)
    assert (step.claim, step.night) == ("copy", nights[26])
    assert step.ratio == pytest.approx(0.98, abs=0.003)


def test_each_night_has_the_band_of_the_nights_before_it():
    nights = [*quiet(8, copy=1.5), night(copy=1.4), night(copy=1.5, epoch="driver 590")]
    points = history.courses(nights)["copy"]
    assert [point.night for point in points] == nights
    assert [point.band for point in points[:8]] == [None] * 8
    band = points[8].band
    assert band == history.band([n.claims["copy"] for n in nights[:8]])
    assert (band.low, band.high) == pytest.approx((1.5 * 0.965, 1.5 / 0.965), rel=0.002)
    assert [point.is_outside for point in points] == [False] * 8 + [True, False]
    assert points[9].band is None  # first night of its epoch
    assert not history.courses([*nights[:8], night(copy=1.4, void="sick")])["copy"][8].is_outside
    assert not history.courses([*nights[:8], night(copy=9.0)])["copy"][8].is_outside


def test_a_sentinel_is_outside_on_either_side():
    for seconds, is_outside in ((0.85e-3, True), (1.05e-3, False), (1.15e-3, True)):
        nights = [*quiet(8, copy=1.5), night(sentinel=seconds, copy=1.5)]
        points = history.courses(nights, sentinels=True)[SENTINEL]
        assert points[8].is_outside is is_outside
        assert bool(history.judge(nights[:8], nights[8]).void) is is_outside


# Error rates of simulated nights. The assumed standard deviation between processes is 0.15 % for
# most claims, as measured on an H200, 0.5 % for a third, and 2 % for a tenth, which stands for
# claims that wait for the host. One of 200 figures is an outlier, 3 % too low.


def simulated(rng, spreads, slowed=()):
    def speedup(i, spread):
        odd = 0.97 if rng.random() < 0.005 else 1.0
        return 2.0 * odd * math.exp(rng.gauss(0, spread)) * (0.95 if i in slowed else 1.0)

    return {f"c{i}": speedup(i, spread) for i, spread in enumerate(spreads)}


def spreads_of(claims):
    return [0.02 if i % 10 == 0 else 0.005 if i % 3 == 0 else 0.0015 for i in range(claims)]


def runs(rng, spreads, flags, slowed=()):
    """Simulate two further runs of the flagged claims."""
    flagged = {f.claim for f in flags}
    for _ in range(2):
        values = simulated(rng, spreads, slowed)
        yield [measured(c, v) for c, v in values.items() if c in flagged]


def test_false_alarms_are_at_most_one_a_month_at_250_claims():
    rng, spreads = random.Random(7), spreads_of(250)
    nights = [night(**simulated(rng, spreads)) for _ in range(10)]
    alarms, months = 0, 4
    for _ in range(30 * months):
        tonight = night(**simulated(rng, spreads))
        gate = history.judge(nights, tonight)
        alarms += bool(gate.shift) + len(
            history.confirmed(gate.flags, list(runs(rng, spreads, gate.flags)), "h200")
        )
        nights.append(tonight)
    assert alarms <= months


def test_five_percent_is_found_within_three_nights():
    rng, spreads = random.Random(8), spreads_of(60)
    quick = [i for i, spread in enumerate(spreads) if spread < 0.01]
    confirmed = 0
    for slow in quick:
        nights = [night(**simulated(rng, spreads)) for _ in range(12)]
        for _ in range(3):
            tonight = night(**simulated(rng, spreads, {slow}))
            gate = history.judge(nights, tonight)
            again = list(runs(rng, spreads, gate.flags, {slow}))
            sure = history.confirmed(gate.flags, again, "h200")
            if f"c{slow}" in {f.claim for f in sure}:
                confirmed += 1
                break
            nights.append(tonight)
    assert confirmed >= 0.95 * len(quick)
