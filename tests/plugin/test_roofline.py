"""The ceiling that limits an arm, and the line of advice, for each rule."""

from dataclasses import replace

import pytest

from pytest_aiperf.model import Limit, Trace, Work
from pytest_aiperf.rules.roofline import DATASHEET, diagnose, limit_of, too_fast, unit_of
from pytest_aiperf.text import si

CEILINGS = {"copy": 4.28e12, "read": 4.5e12, "l2": 7e12, "fp32": 60e12, "bf16": 790e12}
COPY = Work(read=4.28e9, written=4.28e9)  # 2 ms at the copy rate
GEMM = Work(read=4 * 8192.0**2, written=2 * 8192.0**2, flops=2 * 8192.0**3, dtype="bf16")


def memory(share, ceiling="copy"):
    return Limit(ceiling, share * 4.28e12, 4.28e12, "B/s", share)


def compute(share, ceiling="bf16"):
    return Limit(ceiling, share * 790e12, 790e12, "FLOP/s", share)


def trace(busy, kernels=1, launches=1, copies=0):
    return Trace(launches, kernels, copies, busy, busy)


def test_the_copy_ceiling_limits_a_copy():
    limit = limit_of(2.5e-3, COPY, "cold", CEILINGS)
    assert (limit.ceiling, limit.unit, limit.limit) == ("copy", "B/s", 4.28e12)
    assert limit.rate == pytest.approx(3.424e12)
    assert limit.share == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("written", "ceiling", "rate"),
    [
        (0.0, "read", 4.5e12),
        (0.1, "read", 1 / (0.2 / 4.28e12 + 0.8 / 4.5e12)),
        (0.4, "copy", 1 / (0.8 / 4.28e12 + 0.2 / 4.5e12)),
        (0.5, "copy", 4.28e12),
        (1.0, "read", 4.5e12),  # only writes: the bus never changes direction, as with only reads
    ],
)
def test_the_memory_ceiling_lies_between_read_and_copy(written, ceiling, rate):
    limit = limit_of(1e-3, Work(read=(1 - written) * 1e9, written=written * 1e9), "cold", CEILINGS)
    assert limit.ceiling == ceiling
    assert limit.limit == pytest.approx(rate)


@pytest.mark.parametrize(("l2_bytes", "ceiling"), [(0, "l2"), (3_500_000, "l2"), (1 << 21, "copy")])
def test_the_l2_limits_warm_inputs_that_it_holds(l2_bytes, ceiling):
    limit = limit_of(1e-6, Work(read=1.75e6, written=1.75e6), "warm", CEILINGS, l2_bytes)
    assert limit.ceiling == ceiling
    assert limit.share == pytest.approx(3.5e12 / CEILINGS[ceiling])


def test_the_dtype_limits_a_matrix_product_and_memory_a_thin_one():
    limit = limit_of(1.6e-3, GEMM, "cold", CEILINGS)
    assert (limit.ceiling, limit.unit) == ("bf16", "FLOP/s")
    assert limit.share == pytest.approx(0.87, abs=0.005)
    thin = Work(read=5e8, written=5e8, flops=1e9, dtype="bf16")
    assert limit_of(1e-3, thin, "cold", CEILINGS).ceiling == "copy"


@pytest.mark.parametrize(
    ("work", "cache", "ceilings"),
    [
        (Work(), "cold", CEILINGS),
        (Work(flops=1e12), "cold", CEILINGS),  # no dtype
        (Work(flops=1e12, dtype="fp4"), "cold", CEILINGS),
        (COPY, "cold", {"bf16": 1e15}),
        (COPY, "warm", {"copy": 4e12}),
        (Work(read=1e9, written=0.0), "cold", {"copy": 4e12}),  # reads may be faster than copies
    ],
)
def test_work_without_a_ceiling_has_no_limit(work, cache, ceilings):
    assert limit_of(1e-3, work, cache, ceilings) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_is_not_positive_and_finite_has_no_limit(seconds):
    assert limit_of(seconds, COPY, "cold", CEILINGS) is None


def test_a_rate_more_than_5_percent_above_its_ceiling_is_too_fast():
    assert too_fast(memory(1.04)) is None
    problem = too_fast(memory(1.10))
    assert "4.708 TB/s exceed the 4.280 TB/s that this GPU reaches (copy, measured)" in problem
    assert "skips work" in problem
    assert "--fresh" in problem
    assert "--fresh" not in too_fast(memory(1.10), "datasheet")


@pytest.mark.parametrize(
    ("seconds", "work", "cache", "is_impossible"),
    [
        (1.87e-3, Work(read=4e9, written=4e9), "cold", False),  # measured on an H200
        (1e-3, Work(read=4e9, written=4e9), "cold", True),
        (1e-3, Work(read=4e9, written=4e9), "warm", False),
        (1.6e-3, GEMM, "cold", False),  # measured on an H200
        (1.0e-3, GEMM, "cold", True),
        (0.6e-3, Work(flops=GEMM.flops, dtype="fp8"), "cold", False),
        (0.4e-3, Work(flops=GEMM.flops, dtype="fp8"), "cold", True),
        (1e-9, Work(flops=1e15), "cold", False),  # no dtype
    ],
)
def test_a_time_below_the_datasheet_is_impossible(seconds, work, cache, is_impossible):
    limit = limit_of(seconds, work, cache, DATASHEET["h200"])
    assert bool(limit and too_fast(limit, "datasheet")) is is_impossible


def test_gaps_between_kernels_are_overhead():
    advice = diagnose(None, trace(38e-6, kernels=40, launches=40), 100e-6)
    assert advice == (
        "overhead-bound: 62 % of the time between 40 kernels; capture a graph or fuse "
        "(see ch12/graph_replay)"
    )


def test_the_advice_for_a_graph_with_gaps_is_to_fuse():
    advice = diagnose(memory(0.1), trace(50e-6, kernels=40, copies=2), 100e-6)
    assert "between 42 kernels and copies; fuse" in advice


def test_one_kernel_that_waits_for_the_host_is_overhead():
    advice = diagnose(None, trace(1e-6), 10e-6)
    assert advice == (
        "overhead-bound: 90 % of the time outside kernels; do more per launch "
        "(see ch01/batched_gemm)"
    )


@pytest.mark.parametrize(
    ("limit", "busy"),
    [
        (None, 75e-6),  # less than 30 % idle
        (memory(0.9), 40e-6),  # the traced call hit the cache
    ],
)
def test_a_busy_gpu_is_not_overhead_bound(limit, busy):
    assert "overhead" not in diagnose(limit, trace(busy, kernels=4, launches=4), 100e-6)


@pytest.mark.parametrize(
    ("limit", "advice"),
    [
        (memory(0.99), "memory-bound: 99 % of the copy rate; only fewer bytes help"),
        # beside a copy at 99 % of the rate, it is wrong that only fewer bytes help this one
        (memory(0.94), "memory-bound: 94 % of the copy rate; up to 6 % faster with the same bytes"),
        (memory(0.55), "below its memory limit: 55 % of the copy rate; too few bytes in flight"),
        (compute(0.98), "compute-bound: 98 % of the bf16 rate; only fewer operations or a narrow"),
        (compute(0.97, "fp32"), "compute-bound: 97 % of the fp32 rate; only fewer operations or t"),
        (compute(0.8), "compute-bound: 80 % of the bf16 rate; up to 25 % faster with the same ope"),
        (compute(0.5), "below its compute limit: 50 % of the bf16 rate; operands that arrive to"),
        (memory(0.12), "moves or computes more than it must, or waits: 12 % of the copy rate"),
    ],
)
def test_the_share_of_the_ceiling_decides_the_advice(limit, advice):
    assert diagnose(limit, trace(95e-6), 100e-6).startswith(advice)


@pytest.mark.parametrize(
    ("limit", "kernels", "grid", "seconds", "advice"),
    [
        # figures of records on an H200: an elementwise chain and a norm in eager PyTorch, an MLP
        # and a matrix product in fp32, many small products, and a decoder on few blocks
        (
            memory(0.12), 8, 4096, 1.04e-3,
            "unfused: 12 % of the copy rate; with 8 kernels it moves or computes more than it must",
        ),
        (memory(0.12), 9, 4096, 1.03e-3, "unfused: 12 % of the copy rate; with 9 kernels"),
        (compute(0.064), 4, 4096, 5.46e-3, "compute-bound if it computes in fp32: 6 % of the b"),
        (compute(0.02), 5, 4096, 1.57e-3, "unfused: 2 % of the bf16 rate; with 5 kernels it move"),
        (memory(0.01), 40, 4, 9.6e-5, "latency-bound: 1 % of the copy rate; 40 kernels of 2.4 µs"),
        (memory(0.06), 1, 16, 9.3e-4, "latency-bound: 6 % of the copy rate; 16 blocks on 132 SMs"),
        (memory(0.04), 1, 9999, 6.3e-3, "moves or computes more than it must, or waits: 4 %"),
    ],
)  # fmt: skip
def test_only_kernels_that_leave_the_gpu_idle_are_latency_bound(
    limit, kernels, grid, seconds, advice
):
    each = {"counts": (1,) * kernels, "seconds": (seconds / kernels,) * kernels}
    traced = replace(trace(seconds, kernels, kernels), grids=(grid,), **each)
    line = diagnose(limit, traced, seconds, ceilings=CEILINGS, sms=132)
    assert line.startswith(advice)


def test_launches_of_one_kernel_may_be_unequal_and_are_not_called_unfused():
    # a reduction in three passes: the first takes almost all of the time
    passes = replace(trace(7e-4, 3, 3), counts=(3,), seconds=(7e-4,))
    line = diagnose(memory(0.18, "read"), passes, 7e-4, sms=132)
    assert line.startswith("moves or computes more than it must, or waits: 18 % of the read rate")


def test_small_kernels_beside_a_long_one_do_not_make_an_arm_unfused():
    each = {"counts": (1, 2), "grids": (16, 9999), "seconds": (6e-4, 0.6e-4)}
    traced = replace(trace(6.6e-4, 3, 3), **each)
    line = diagnose(memory(0.2), traced, 6.6e-4, sms=132)
    assert line.startswith("latency-bound: 20 % of the copy rate; 16 blocks on 132 SMs")


@pytest.mark.parametrize(
    "limit",
    [
        compute(0.3),  # 4 times the fp32 rate
        compute(0.01),  # far from the fp32 rate as well
        Limit("copy", 40e12, 400e12, "B/s", 0.1),  # bytes, not operations
    ],
)
def test_a_rate_that_fp32_does_not_explain_is_not_put_down_to_fp32(limit):
    assert "fp32" not in diagnose(limit, trace(95e-6), 100e-6, ceilings=CEILINGS, sms=132)


def test_traffic_beyond_the_bytes_of_work_is_avoidable():
    # the bytes of work= pass at 12 % of the copy rate; the counters show 8 times as many bytes
    counters = {"dram share": 0.91, "dram bytes": 8 * 0.12 * 4.28e12 * 1e-3}
    advice = diagnose(memory(0.12), None, 1e-3, counters)
    assert advice.startswith("memory-bound: device memory is 91 % busy with 8.0 times the bytes")
    assert advice.endswith("reuse or fuse")
    advice = diagnose(memory(0.12), None, 1e-3, counters | {"sectors per load": 32})
    assert "32 sectors per load or store where 4 to 16 suffice" in advice


@pytest.mark.parametrize(
    ("counters", "advice"),
    [
        ({"l1 share": 0.92, "bank conflicts": 4.2e6}, "4.2e+06 bank conflicts: pad or swizzle"),
        ({"l1 share": 0.92, "sectors per store": 20}, "20 sectors per load or store where"),
        ({"l1 share": 0.92}, "memory-bound: the L1 and shared memory 92 % busy; make fewer"),
        ({"sm share": 0.93, "dram share": 0.3}, "compute-bound: the SMs 93 % busy"),
    ],
)
def test_a_busy_unit_limits_an_arm_far_from_its_ceiling(counters, advice):
    assert advice in diagnose(memory(0.2), None, 1e-3, counters)


@pytest.mark.parametrize(
    ("counters", "advice"),
    [
        ({"sectors per load": 32.0}, "32 sectors per load or store where 4 to 16 suffice"),
        (
            {"occupancy": 0.9, "stall long scoreboard": 20.1, "stall wait": 2.0},
            "warps wait for device memory: more loads in flight",
        ),
        ({"stall branch resolving": 5.0}, "warps wait for branch resolving"),
    ],
)
def test_counters_name_the_cause_of_latency(counters, advice):
    line = diagnose(memory(0.12), None, 1e-3, counters)
    assert line.startswith("latency-bound: 12 % of the copy rate; ")
    assert advice in line


def test_counters_suffice_for_advice():
    assert diagnose(None, None, 1e-3, {"dram share": 0.9}).startswith("memory-bound: device memory")
    assert diagnose(None, None, 1e-3, {"dram share": 0.3}).startswith("latency-bound: no unit")


def test_the_advice_for_a_trace_alone_is_to_state_work():
    assert diagnose(None, trace(90e-6), 100e-6) == (
        "the GPU is busy 90 % of the time; state work= to learn its limit"
    )
    assert diagnose(None, None, 1e-3) == ""


@pytest.mark.parametrize(
    ("ceiling", "figure", "expected"),
    [
        ("copy", 4.28e12, "4.280 TB/s"),
        ("h2d", 55.31e9, "55.31 GB/s"),
        ("fp8", 1.4123e15, "1412 TFLOP/s"),
        ("int8", 1.2e15, "1200 TOP/s"),
        ("launch", 2.1e-6, "2.100 µs"),
        ("graph_launch", 0.51e-6, "510.0 ns"),
        ("copy", 3e3, "3.000 kB/s"),
    ],
)
def test_ceilings_have_a_unit_with_a_fitting_prefix(ceiling, figure, expected):
    assert si(figure, unit_of(ceiling)) == expected


def test_datasheets_contain_only_ceilings():
    from pytest_aiperf.limits.ceilings import DEVICE, HOST, LINKS

    for key, sheet in DATASHEET.items():
        assert set(sheet) <= {*DEVICE, *HOST, *LINKS}, key
        assert sheet["copy"] > 0.2e12
