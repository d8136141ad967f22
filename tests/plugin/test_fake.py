"""The fake device has the noise and the faults that it documents."""

import json
import math
import random
import statistics

import pytest

from pytest_aiperf.errors import CannotCapture, InvalidMeasurement, UsageError
from pytest_aiperf.model import Bench, Mode
from pytest_aiperf.rules import validity
from tests import fake_gpu
from tests.fake_gpu import (
    FAKE_GPU,
    Allocation,
    FakeDevice,
    FakeMachine,
    Fault,
    Noise,
    spend,
)

pytest_plugins = ["pytester"]

MODES = (Mode.GRAPH, Mode.BACKLOG, Mode.PLAIN, Mode.WALL)


def arm(seconds=100e-6):
    return lambda: spend(seconds)


def quiet(**changes):
    return Noise(**dict.fromkeys(Noise.__slots__, 0.0) | changes)


def blocks(device, count, calls=10):
    block = device.block([arm()] * calls, Mode.BACKLOG)
    return [block.run() / (calls * 100e-6) for _ in range(count)]


@pytest.mark.parametrize("mode", MODES)
def test_without_noise_time_is_what_was_spent(mode):
    device = FakeDevice(noise=Noise.none())
    block = device.block([arm(1e-3), arm(2e-3)], mode)
    assert block.run() == pytest.approx(3e-3)
    assert device.now == pytest.approx(3e-3)
    assert device.estimate_s(arm(1e-3)) == pytest.approx(1e-3)
    spend(1.0)  # outside a block: no effect
    assert device.now == pytest.approx(4e-3)


@pytest.mark.parametrize("mode", MODES)
def test_a_block_keeps_the_result_of_one_call(mode):
    calls = [lambda: "first", lambda: "last"]
    for keep, kept in ((-1, "last"), (0, "first")):
        block = FakeDevice().block(calls, mode, keep)
        block.run()
        assert block.kept == kept


def test_hooks_run_around_a_block_and_take_no_time():
    device, ran = FakeDevice(noise=Noise.none()), []
    block = device.block([lambda: ran.append("call") or spend(1e-3)], Mode.PLAIN)
    hooks = [lambda: ran.append("before") or spend(1.0), lambda: ran.append("after") or spend(1.0)]
    assert block.run(*hooks) == pytest.approx(1e-3)
    assert ran == ["before", "call", "after"]


def test_white_noise_has_its_deviation():
    seen = blocks(FakeDevice(noise=quiet(white=0.01), seed=1), 1_000)
    assert statistics.stdev(seen) == pytest.approx(0.01, rel=0.1)
    assert statistics.fmean(seen) == pytest.approx(1, abs=0.002)


def test_the_tail_is_to_the_right():
    seen = blocks(FakeDevice(noise=quiet(tail=0.25, tail_chance=0.01), seed=1), 2_000, calls=1)
    late = [s for s in seen if s > 1 + 1e-9]
    assert 0.005 < len(late) / len(seen) < 0.02
    assert max(seen) <= 1.25
    assert min(seen) == pytest.approx(1)


def test_drift_is_remembered_for_its_correlation_time():
    seen = blocks(FakeDevice(noise=quiet(drift=0.006, drift_s=0.020), seed=1), 4_000)  # 1 ms each
    assert statistics.stdev(seen) == pytest.approx(0.006, rel=0.2)
    assert statistics.correlation(seen[:-1], seen[1:]) == pytest.approx(math.exp(-0.05), abs=0.02)
    assert abs(statistics.correlation(seen[:-200], seen[200:])) < 0.2


def test_drift_spoils_sequential_timing_and_spares_interleaved():
    noise = quiet(white=0.001, drift=0.006, drift_s=0.020)
    sequential, mirrored = [], []
    for seed in range(40):
        seen = blocks(FakeDevice(noise=noise, seed=seed), 16)
        sequential.append(statistics.fmean(seen[:8]) - statistics.fmean(seen[8:]))
        first, second = seen[0::4] + seen[3::4], seen[1::4] + seen[2::4]
        mirrored.append(statistics.fmean(first) - statistics.fmean(second))
    assert statistics.stdev(sequential) > 3 * statistics.stdev(mirrored)


def test_the_start_is_slow_until_the_clocks_are_stable():
    noise = quiet(ramp=0.03, ramp_s=0.030)
    cold, warm = FakeDevice(noise=noise), FakeDevice(noise=noise)
    warm.stabilize_clocks(arm())
    assert blocks(cold, 1)[0] == pytest.approx(1.03, abs=0.002)
    assert blocks(warm, 1)[0] == pytest.approx(1, abs=1e-4)


def test_layout_is_constant_until_the_next_padding():
    device, rng = FakeDevice(noise=quiet(layout=0.01)), random.Random(3)
    effects = []
    for _ in range(200):
        device.random_padding(rng)
        first = device.block([arm()], Mode.GRAPH)
        second = device.block([arm()], Mode.GRAPH)
        seen = [(first.run(), second.run()) for _ in range(3)]
        assert len(set(seen)) == 1
        effects.append(math.log(seen[0][0] / seen[0][1]))
    assert len(set(effects)) == 200
    assert statistics.stdev(effects) == pytest.approx(0.01 * math.sqrt(2), rel=0.2)


def test_the_seed_of_the_padding_decides_the_layout():
    def effect(seed):
        device = FakeDevice(noise=quiet(layout=0.01))
        device.random_padding(random.Random(seed))
        return device.block([arm()], Mode.GRAPH).run()

    assert effect(1) == effect(1) != effect(2)


def test_a_jump_has_two_states():
    seen = blocks(FakeDevice(noise=quiet(jump=0.03, jump_chance=0.05), seed=1), 500)
    assert {round(s, 6) for s in seen} == {1.0, 1.03}


def test_throttling_comes_and_goes_and_shows():
    noise = quiet(throttle=0.06, throttle_s=0.010, throttle_per_s=5.0)
    device = FakeDevice(noise=noise, seed=1)
    block = device.block([arm(1e-3)], Mode.PLAIN)
    states, reported = [], []
    for _ in range(1_000):
        before = device.telemetry()
        states.append(round(block.run() / 1e-3, 6))
        reported.append(validity.round_problem(before, device.telemetry()) is not None)
    assert set(states) == {1.0, 1.06}
    assert 5 < states.count(1.06) < 500
    assert all(hit for state, hit in zip(states, reported, strict=True) if state > 1)


def test_a_scheduled_throttle_slows_its_blocks_and_no_other():
    device = FakeDevice(noise=Noise.none(), faults=[Fault(2, "throttle", blocks=2, reasons=0x40)])
    block = device.block([arm(1e-3)], Mode.PLAIN)
    seen, problems = [], []
    for _ in range(6):
        before = device.telemetry()
        seen.append(round(block.run() / 1e-3, 6))
        problems.append(validity.round_problem(before, device.telemetry()))
    assert seen == [1, 1, 1.06, 1.06, 1, 1]
    assert [bool(p) for p in problems] == [False, False, True, True, True, False]
    assert "0x40" in problems[3]


def test_a_throttle_inside_a_round_leaves_its_mark():
    device = FakeDevice(noise=Noise.none(), faults=[Fault(1, "throttle")])
    before = device.telemetry()
    blocks(device, 4)
    after = device.telemetry()
    assert after.event_reasons == 0
    assert "violation counter" in validity.round_problem(before, after)


def test_a_power_cap_is_tolerated():
    device = FakeDevice(noise=quiet(throttle=0.02), faults=[Fault(0, "throttle", reasons=0x4)])
    assert blocks(device, 1) == [pytest.approx(1.02)]
    assert device.telemetry().event_reasons == 0x4


def test_a_raise_comes_in_its_block():
    device = FakeDevice(faults=[Fault(1, "raise", error="out of memory")])
    blocks(device, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        blocks(device, 1)
    blocks(device, 1)


def test_a_hang_never_returns(monkeypatch):
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(fake_gpu.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        blocks(FakeDevice(faults=[Fault(0, "hang")]), 1)


def test_a_synchronizing_call_is_only_plain_or_wall():
    device = FakeDevice(noise=Noise.none())
    calls = [fake_gpu.synchronise, arm(1e-3)]
    with pytest.raises(CannotCapture, match="synchronizes"):
        device.block(calls, Mode.GRAPH)
    with pytest.raises(InvalidMeasurement, match='metric="wall"'):
        device.block(calls, Mode.BACKLOG).run()
    for mode in (Mode.PLAIN, Mode.WALL):
        assert device.block(calls, mode).run() == pytest.approx(1e-3)


def test_the_peak_counts_memory_that_is_held_at_once():
    device, kept = FakeDevice(), Allocation(1_000)

    def call():
        first = Allocation(10)
        del first
        second, third = Allocation(20), Allocation(5)
        return second, third

    assert device.peak_bytes(call, call)[0] == 25
    assert device.peak_bytes(list, lambda: Allocation(7))[0] == 7
    assert device.peak_bytes(list, list) == (0, [])
    held = []
    assert device.peak_bytes(lambda: held.append(Allocation(3)), lambda: Allocation(7))[0] == 10
    del kept


def test_a_machine_has_fake_gpus_and_repeatable_devices():
    gpus = FakeMachine().gpus()
    assert gpus == (FAKE_GPU,)
    first = [blocks(FakeMachine(seed=1).open_device(gpus[0]), 3) for _ in range(2)]
    assert first[0] == first[1] != blocks(FakeMachine(seed=2).open_device(gpus[0]), 3)
    machine = FakeMachine(seed=1)
    assert blocks(machine.open_device(None), 3) != blocks(machine.open_device(None), 3)
    assert machine.open_device(None).gpu is None


def test_devices_of_one_seed_differ_once_their_claims_seed_them():
    def seen(*seeds):
        device = FakeDevice(noise=quiet(white=0.01, layout=0.01), seed=1)
        for seed in seeds:
            device.seed(seed)
        device.random_padding(random.Random(5))
        return blocks(device, 3)

    assert seen(7) == seen(7)
    draws = [seen(), seen(7), seen(8), seen(7, 7), seen(7, 8)]
    assert len({tuple(d) for d in draws}) == len(draws)


def test_seeding_makes_inputs_repeatable():
    import numpy as np

    FakeDevice().seed(3)
    first = random.random(), np.random.random()  # noqa: NPY002 - inputs may draw from NumPy
    FakeDevice().seed(3)
    assert (random.random(), np.random.random()) == first  # noqa: NPY002


def test_the_noise_probe_takes_time_and_depends_on_the_seed():
    device = FakeDevice(noise=Noise.none())
    inputs, negate = device.noise_probe()
    (x,), (other,) = (inputs(Bench("cpu", seed, full=True)) for seed in (1, 2))
    assert (x != other).all()
    block = device.block([lambda: negate(x)], Mode.GRAPH)
    assert block.run() == pytest.approx(100e-6)
    assert (block.kept == -x).all()


def test_it_has_all_methods_of_a_real_device():
    from pytest_aiperf.device.device import HostDevice
    from pytest_aiperf.session.cuda_machine import CudaMachine

    for real, fake in ((CudaMachine(), FakeMachine()), (HostDevice(), FakeDevice())):
        assert {n for n in dir(real) if not n.startswith("_")} <= set(dir(fake))


def test_a_machine_is_described_in_json():
    described = fake_gpu.machine(
        '{"gpus": [{"arch": "sm100"}, {"uuid": "x", "l2_bytes": 5}], "noise": {"white": 0},'
        ' "seed": 4, "faults": [{"block": 1, "kind": "raise", "error": "lost"}]}'
    )
    first, second = described.gpus()
    assert (first.arch, first.uuid, first.name) == ("sm100", "fake-0", FAKE_GPU.name)
    assert (second.uuid, second.l2_bytes) == ("x", 5)
    same = FakeMachine(noise=Noise(white=0.0), faults=[Fault(1, "raise", error="lost")], seed=4)
    device, other = described.open_device(first), same.open_device(first)
    assert blocks(device, 1) == blocks(other, 1)
    with pytest.raises(RuntimeError, match="lost"):
        blocks(device, 1)
    assert [g.uuid for g in fake_gpu.machine('{"gpus": 2}').gpus()] == ["fake-0", "fake-1"]
    noiseless = fake_gpu.machine('{"noise": "none"}').open_device(None)
    assert blocks(noiseless, 2) == [pytest.approx(1)] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "PYTEST_AIPERF_FAKE: a mapping is needed"),
        ('{"gpu": 1}', "unknown gpu"),
        ('{"gpus": "two"}', "must be a mapping|is not a mapping"),
        ('{"gpus": [{"sms": "x"}]}', r"gpus\[0\].sms: int is needed"),
        ('{"noise": "loud"}', "noise: a mapping is needed, not 'loud'"),
        ('{"noise": {"withe": 1}}', "unknown withe"),
        ('{"faults": [{"block": 0, "kind": "melt"}]}', "'melt' is not one of 'throttle'"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused_by_name(text, message):
    with pytest.raises(UsageError, match=message):
        fake_gpu.machine(text)


CLAIMS = """
import numpy as np
import pytest
from tests.fake_gpu import spend

def inputs(bench):
    return (np.random.default_rng(bench.seed).random(16),)

def arm(seconds):
    def call(x):
        spend(seconds)
        return -x
    return call

@pytest.mark.parametrize("n", [1, 2])
def test_claim(compare, gpu, n):
    assert gpu.key == "h300"
    compare(baseline=arm(100e-6), optimized=arm(80e-6), inputs=inputs, reference=lambda x: -x)
"""


def test_pytest_measures_on_it_and_each_claim_draws_its_own_noise(pytester, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # set by the outer pytest run
    monkeypatch.setenv("PYTEST_AIPERF_FAKE", '{"gpus": [{"key": "h300"}], "seed": 1}')
    pytester.makepyfile(CLAIMS)
    options = ("-ptests.fake_gpu", "--gpu", "--quick", "--reproducible")
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=2)
    results = pytester.path / ".aiperf/latest/results.json"
    first, second = (b["aiperf"] for b in json.loads(results.read_text())["benchmarks"])
    for claim in (first, second):
        assert claim["key"] == "h300"
        assert claim["speedup"]["value"] == pytest.approx(1.25, rel=0.02)
    assert first["timing"]["replicates"] != second["timing"]["replicates"]
    assert first["speedup"] != second["speedup"]


def test_what_the_description_gets_wrong_is_a_usage_error(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_AIPERF_FAKE", '{"noise": "loud"}')
    ended = pytester.runpytest_subprocess("-ptests.fake_gpu", "--gpu")
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    ended.stderr.fnmatch_lines(["ERROR: PYTEST_AIPERF_FAKE=*noise: a mapping is needed*"])
