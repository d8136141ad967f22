"""Figures of serving and training, against numpy and values computed by hand."""

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aiperf import UsageError, scores

TIMES = st.floats(0, 1e4, allow_nan=False)
GAPS = st.lists(TIMES, min_size=1, max_size=20)
TRACES = st.lists(st.tuples(TIMES, GAPS), min_size=1, max_size=20)
"""For each request the time of sending, and the time from each event to the next token."""

SENT = [0.0, 1.0, 2.0]
TOKENS = [[0.5, 0.6, 0.8], [1.25], [4.0, 4.5]]


def arrivals(trace):
    sent = [start for start, _ in trace]
    return sent, [np.cumsum([start, *gaps])[1:] for start, gaps in trace]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values, percent):
    figure = scores.percentile(values, percent)
    assert figure == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)
    assert min(values) <= figure <= max(values)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_the_50th_percentile_is_the_median(values):
    assert scores.percentile(values, 50) == pytest.approx(statistics.median(values))


def test_a_latency_is_a_score_with_its_percentile():
    score = scores.latency([0.1, 0.2, 0.3], 50)
    assert (score.value, score.unit, score.better) == (0.2, "s (p50)", "lower")
    assert str(scores.latency([1, 2])) == "1.99 s (p99)"


def test_figures_of_three_requests_by_hand():
    assert scores.ttft(SENT, TOKENS) == [0.5, 0.25, 2.0]
    assert scores.e2e(SENT, TOKENS) == pytest.approx([0.8, 0.25, 2.5])
    one, none, two = scores.tpot(TOKENS)
    assert (one, none, two) == (pytest.approx(0.15), None, 0.5)
    assert scores.itl(TOKENS) == pytest.approx([0.1, 0.2, 0.5])
    assert scores.percentile(scores.tpot(TOKENS), 50) == pytest.approx(0.325)


@given(TRACES)
def test_tpot_is_the_rest_of_the_latency_per_further_token(trace):
    """The formula of vLLM's and SGLang's benchmarks: (E2E - TTFT) / (tokens - 1)."""
    sent, tokens = arrivals(trace)
    figures = zip(
        tokens, scores.e2e(sent, tokens), scores.ttft(sent, tokens), scores.tpot(tokens),
        strict=True,
    )  # fmt: skip
    for times, e2e, ttft, tpot in figures:
        if len(times) == 1:
            assert tpot is None
        else:
            assert tpot == pytest.approx((e2e - ttft) / (len(times) - 1), abs=1e-9)
    assert len(scores.itl(tokens)) == sum(map(len, tokens)) - len(tokens)
    assert sum(scores.itl(tokens)) == pytest.approx(sum(t[-1] - t[0] for t in tokens))


def test_a_throughput_names_what_it_counts():
    assert str(scores.throughput(512, 2.0)) == "256 tokens/s"
    score = scores.throughput(3, 0.5, of="requests")
    assert (score.value, score.unit, score.better) == (6, "requests/s", "higher")


def test_goodput_counts_requests_that_meet_all_limits():
    ttft, tpot = scores.ttft(SENT, TOKENS), scores.tpot(TOKENS)
    assert scores.goodput(2.0, (ttft, 0.5)).value == 1.0
    assert scores.goodput(2.0, (ttft, 0.5), (tpot, 0.1)).value == 0.5  # one token: no TPOT
    assert scores.goodput(2.0, (ttft, 9), (tpot, 0.5)).value == 1.5
    assert scores.attainment((ttft, 0.5), (tpot, 0.1)) == pytest.approx(1 / 3)
    assert scores.attainment(([0.1, math.inf], 0.5)) == 0.5  # the second one failed
    assert scores.goodput(2.0, (ttft, 0)).value == 0
    assert scores.goodput(2.0, (ttft, 0)).unit == "requests/s in time"


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0, 10), st.floats(0.1, 100))
def test_goodput_against_numpy(latencies, limit, seconds):
    met = np.array(latencies) <= limit
    assert scores.attainment((np.array(latencies), limit)) == pytest.approx(met.mean())
    assert scores.goodput(seconds, (latencies, limit)).value == pytest.approx(met.sum() / seconds)
    everything = scores.throughput(len(latencies), seconds, of="requests").value
    assert scores.goodput(seconds, (latencies, 10)).value == pytest.approx(everything)


def test_goodput_and_the_percentile_agree():
    latencies = list(range(101))
    assert scores.attainment((latencies, scores.percentile(latencies, 90))) >= 0.9


def test_training_flops_are_those_of_each_multiplication():
    """Count the multiplications of a decoder one by one, forward, and twice that backward."""
    layers, width, length, vocabulary, sequences = 3, 64, 32, 100, 5
    tokens = sequences * length
    weights = layers * (4 * width * width + 8 * width * width) + vocabulary * width
    forward = 2 * tokens * weights
    forward += layers * sequences * 2 * (2 * length * length * width)  # scores and their sums
    shape = {"layers": layers, "width": width, "length": length}
    assert scores.training_flops(weights, tokens, **shape) == 3 * forward
    halved = scores.training_flops(weights, tokens, **shape, causal=True)
    assert halved == 3 * (forward + 2 * tokens * weights) / 2
    assert scores.training_flops(7e9, 1000) == 6 * 7e12


def test_mfu_of_palm():
    """PaLM, section 4.1: 238.3 thousand tokens/s on 6144 TPU v4 of 275 TFLOP/s are 46.2 %."""
    flops = scores.training_flops(540.35e9, 238.3e3, layers=118, width=48 * 256, length=2048)
    score = scores.mfu(flops, 1.0, 6144 * 275e12)
    assert score.value == pytest.approx(46.2, abs=0.05)
    assert (score.unit, score.better) == ("% MFU", "higher")
    without_attention = scores.training_flops(540.35e9, 238.3e3)
    assert scores.mfu(without_attention, 1.0, 6144 * 275e12).value == pytest.approx(45.7, abs=0.05)


def test_scaling_efficiency_is_per_gpu():
    assert scores.scaling_efficiency({1: 100.0, 2: 190.0, 8: 640.0}) == {1: 1.0, 2: 0.95, 8: 0.8}
    assert scores.scaling_efficiency({4: 300.0, 2: 200.0}) == {2: 1.0, 4: 0.75}


@given(st.integers(1, 64), st.floats(0.01, 100), st.floats(0.01, 100))
def test_strong_and_weak_scaling(gpus, alone, together):
    strong = scores.scaling_efficiency({1: 1 / alone, gpus: 1 / together})
    weak = scores.scaling_efficiency({1: 1 / alone, gpus: gpus / together})
    if gpus > 1:
        assert strong[gpus] == pytest.approx(alone / (gpus * together))
        assert weak[gpus] == pytest.approx(alone / together)
    assert weak[1] == strong[1] == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: scores.percentile([], 50), "values is empty"),
        (lambda: scores.percentile([None], 50), "values is empty"),
        (lambda: scores.percentile([1.0], 101), "from 0 to 100, not 101"),
        (lambda: scores.percentile([1.0, math.nan], 50), "has nan"),
        (lambda: scores.percentile([math.inf], 50), "has inf"),
        (lambda: scores.latency([-1.0]), "has -1.0: all are finite and not negative"),
        (lambda: scores.ttft([0.0], [[1.0], [2.0]]), "sent has 1 requests, tokens has 2"),
        (lambda: scores.ttft([2.0], [[1.0]]), "before the request is sent"),
        (lambda: scores.ttft([0.0], [[]]), r"tokens\[0\] is empty"),
        (lambda: scores.tpot([]), "tokens is empty"),
        (lambda: scores.itl([[1.0, 0.5]]), "before the one that it follows"),
        (lambda: scores.throughput(1, 0), "seconds is 0"),
        (lambda: scores.throughput(-1, 1), "count of tokens is at least 0"),
        (lambda: scores.goodput(1.0), "no criterion"),
        (lambda: scores.goodput(-1.0, ([1.0], 1)), "seconds is -1.0"),
        (lambda: scores.goodput(1.0, ([], 1)), "one figure per request, not 0"),
        (lambda: scores.goodput(1.0, ([1.0], 1), ([1.0, 2.0], 1)), "not 1 and 2"),
        (lambda: scores.goodput(1.0, ([1.0], math.nan)), "a limit is a number"),
        (lambda: scores.attainment(([math.nan], 1)), "a figure is nan"),
        (lambda: scores.mfu(2e15, 1.0, 1e15), "exceed the peak"),
        (lambda: scores.mfu(0, 1.0, 1e15), "flops is 0"),
        (lambda: scores.mfu(1, math.inf, 1e15), "seconds is inf"),
        (lambda: scores.training_flops(0, 1), "weights is 0"),
        (lambda: scores.training_flops(1, 1, layers=-1), "at least 0"),
        (lambda: scores.scaling_efficiency({}), "rates is empty"),
        (lambda: scores.scaling_efficiency({0: 1.0}), "GPUs is 0"),
        (lambda: scores.scaling_efficiency({1: 0.0}), r"rates\[1\] is 0"),
    ],
)
def test_nonsense_is_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_a_script_needs_neither_torch_nor_numpy():
    code = "import sys; from pytest_aiperf import scores; scores.latency([1.0])"
    code += "; assert not {'torch', 'numpy', 'scipy', 'pytest'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
