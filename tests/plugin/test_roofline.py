"""The ceiling that binds, and the line that says what to do: each rule with figures."""

import pytest

from pytest_aiperf.model import Limit, Trace, Work
from pytest_aiperf.rules.datasheet import DATASHEET
from pytest_aiperf.rules.roofline import diagnose, limit_of, too_fast, unit_of
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


def test_a_copy_is_bound_by_the_copy_rate():
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
        (1.0, "read", 4.5e12),  # the bus turns as seldom as when all is read
    ],
)
def test_the_memory_ceiling_lies_between_read_and_copy(written, ceiling, rate):
    limit = limit_of(1e-3, Work(read=(1 - written) * 1e9, written=written * 1e9), "cold", CEILINGS)
    assert limit.ceiling == ceiling
    assert limit.limit == pytest.approx(rate)


def test_a_warm_cache_is_bound_by_the_l2():
    limit = limit_of(1e-6, Work(read=1.75e6, written=1.75e6), "warm", CEILINGS)
    assert (limit.ceiling, limit.share) == ("l2", pytest.approx(0.5))


def test_a_product_is_bound_by_its_dtype_and_a_thin_one_by_memory():
    limit = limit_of(1.6e-3, GEMM, "cold", CEILINGS)
    assert (limit.ceiling, limit.unit) == ("bf16", "FLOP/s")
    assert limit.share == pytest.approx(0.87, abs=0.005)
    thin = Work(read=5e8, written=5e8, flops=1e9, dtype="bf16")
    assert limit_of(1e-3, thin, "cold", CEILINGS).ceiling == "copy"


@pytest.mark.parametrize(
    ("work", "cache", "known"),
    [
        (Work(), "cold", CEILINGS),
        (Work(flops=1e12), "cold", CEILINGS),  # of which dtype?
        (Work(flops=1e12, dtype="fp4"), "cold", CEILINGS),
        (COPY, "cold", {"bf16": 1e15}),
        (COPY, "warm", {"copy": 4e12}),
        (Work(read=1e9, written=0.0), "cold", {"copy": 4e12}),  # reads may be faster
    ],
)
def test_what_no_ceiling_applies_to_has_no_limit(work, cache, known):
    assert limit_of(1e-3, work, cache, known) is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_no_time_has_no_limit(seconds):
    assert limit_of(seconds, COPY, "cold", CEILINGS) is None


def test_only_what_is_more_than_a_twentieth_faster_than_its_limit_is_too_fast():
    assert too_fast(memory(1.04)) is None
    said = too_fast(memory(1.10))
    assert "4.708 TB/s exceed the 4.280 TB/s that this GPU reaches (copy, measured)" in said
    assert "skips work" in said
    assert "--fresh" in said
    assert "--fresh" not in too_fast(memory(1.10), "datasheet")


@pytest.mark.parametrize(
    ("seconds", "work", "cache", "broken"),
    [
        (1.87e-3, Work(read=4e9, written=4e9), "cold", False),  # measured
        (1e-3, Work(read=4e9, written=4e9), "cold", True),
        (1e-3, Work(read=4e9, written=4e9), "warm", False),
        (1.6e-3, GEMM, "cold", False),  # measured
        (1.0e-3, GEMM, "cold", True),
        (0.6e-3, Work(flops=GEMM.flops, dtype="fp8"), "cold", False),
        (0.4e-3, Work(flops=GEMM.flops, dtype="fp8"), "cold", True),
        (1e-9, Work(flops=1e15), "cold", False),  # dtype unsaid
    ],
)
def test_a_time_below_the_datasheet_is_impossible(seconds, work, cache, broken):
    limit = limit_of(seconds, work, cache, DATASHEET["h200"])
    assert bool(limit and too_fast(limit, "datasheet")) is broken


def test_gaps_between_kernels_are_overhead():
    said = diagnose(None, trace(38e-6, kernels=40, launches=40), 100e-6)
    assert said == "overhead-bound: 62 % of the time between 40 kernels; capture a graph or fuse"


def test_a_graph_with_gaps_is_to_be_fused():
    said = diagnose(memory(0.1), trace(50e-6, kernels=40, copies=2), 100e-6)
    assert "between 42 kernels and copies; fuse" in said


def test_one_kernel_that_waits_for_the_host_is_overhead():
    said = diagnose(None, trace(1e-6), 10e-6)
    assert said == "overhead-bound: 90 % of the time outside kernels; do more per launch"


@pytest.mark.parametrize(
    ("limit", "busy"),
    [
        (None, 75e-6),  # less than 30 % idle
        (memory(0.9), 40e-6),  # traced in the cache, timed out of it
    ],
)
def test_what_keeps_the_gpu_busy_is_not_overhead(limit, busy):
    assert "overhead" not in diagnose(limit, trace(busy, kernels=4, launches=4), 100e-6)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (memory(0.89), "memory-bound: 89 % of the copy rate; only fewer bytes help"),
        (memory(0.55), "memory-bound: 55 % of the copy rate; more bytes in flight"),
        (compute(0.92), "compute-bound: 92 % of the bf16 rate; only fewer operations or a narrow"),
        (compute(0.85, "fp32"), "compute-bound: 85 % of the fp32 rate; only fewer operations or t"),
        (compute(0.5), "compute-bound: 50 % of the bf16 rate; feed the units better"),
        (memory(0.12), "latency-bound: 12 % of the copy rate; more independent work in flight"),
    ],
)
def test_the_share_of_the_limit_says_what_binds(limit, said):
    assert diagnose(limit, trace(95e-6), 100e-6).startswith(said)


def test_traffic_that_work_does_not_count_is_waste():
    # 12 % of the copy rate by what must move, 8 times that by what does
    counters = {"dram share": 0.91, "dram bytes": 8 * 0.12 * 4.28e12 * 1e-3}
    said = diagnose(memory(0.12), None, 1e-3, counters)
    assert said.startswith("memory-bound: device memory is 91 % busy with 8.0 times the bytes")
    assert said.endswith("reuse or fuse")
    said = diagnose(memory(0.12), None, 1e-3, counters | {"sectors per load": 32})
    assert "32 sectors per load where 4 to 16 suffice" in said


@pytest.mark.parametrize(
    ("counters", "said"),
    [
        ({"l1 share": 0.92, "bank conflicts": 4.2e6}, "4.2e+06 bank conflicts: pad or swizzle"),
        ({"l1 share": 0.92, "sectors per store": 20}, "20 sectors per store where"),
        ({"l1 share": 0.92}, "memory-bound: the L1 and shared memory 92 % busy; make fewer"),
        ({"sm share": 0.93, "dram share": 0.3}, "compute-bound: the SMs 93 % busy"),
    ],
)
def test_a_busy_unit_binds_though_the_share_is_small(counters, said):
    assert said in diagnose(memory(0.2), None, 1e-3, counters)


@pytest.mark.parametrize(
    ("counters", "said"),
    [
        ({"sectors per load": 32.0, "occupancy": 0.1}, "32 sectors per load where 4 to 16 suffice"),
        ({"occupancy": 0.12, "stall barrier": 9.0}, "occupancy is 12 %"),
        (
            {"occupancy": 0.9, "stall long scoreboard": 20.1, "stall wait": 2.0},
            "warps wait for device memory: more loads in flight",
        ),
        ({"stall branch resolving": 5.0}, "warps wait for branch resolving"),
    ],
)
def test_counters_say_what_latency_it_is(counters, said):
    line = diagnose(memory(0.12), None, 1e-3, counters)
    assert line.startswith("latency-bound: 12 % of the copy rate; ")
    assert said in line


def test_counters_alone_say_something():
    assert diagnose(None, None, 1e-3, {"dram share": 0.9}).startswith("memory-bound: device memory")
    assert diagnose(None, None, 1e-3, {"dram share": 0.3}).startswith("latency-bound: no unit")


def test_a_trace_alone_asks_for_work():
    assert diagnose(None, trace(90e-6), 100e-6) == (
        "the GPU is busy 90 % of the time; state work= to learn its limit"
    )
    assert diagnose(None, None, 1e-3) == ""


@pytest.mark.parametrize(
    ("name", "figure", "text"),
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
def test_figures_take_the_prefix_that_suits_them(name, figure, text):
    assert si(figure, unit_of(name)) == text


def test_datasheets_name_ceilings_only():
    from pytest_aiperf.limits.ceilings import DEVICE, HOST, LINKS

    for key, sheet in DATASHEET.items():
        assert set(sheet) <= {*DEVICE, *HOST, *LINKS}, key
        assert sheet["copy"] > 0.2e12
