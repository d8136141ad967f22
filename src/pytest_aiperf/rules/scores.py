"""Figures of serving and training: latencies, rates, goodput, MFU and scaling efficiency.

These functions take plain sequences of numbers: lists, tuples or arrays. Use them in claims with
``metric="score"`` and in your own scripts. Times are in seconds on one clock, counted from any
moment. Empty or impossible input raises UsageError.

``tokens`` has, for each request, the times at which its output tokens arrived. If a request failed,
leave it out of ``sent`` and ``tokens``. In :func:`attainment` or :func:`goodput`, let it count as
not in time: append ``math.inf`` to the figures of each criterion.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import Score
from pytest_aiperf.text import no_attribute

Numbers = Iterable[float]
Criterion = tuple[Iterable[float | None], float]


def percentile(values: Iterable[float | None], percent: float) -> float:
    """Return a percentile of the values, in their unit; ``percent`` is from 0 to 100.

    Between two values it interpolates linearly, as numpy does by default: the 50th percentile is
    the median. None stands for a request without such a figure, and is left out.
    """
    ordered = sorted(_figures("values", values))
    if not 0 <= percent <= 100:
        raise UsageError(f"a percentile is from 0 to 100, not {percent}")
    position = (len(ordered) - 1) * percent / 100
    index = math.floor(position)
    low, high = ordered[index], ordered[min(index + 1, len(ordered) - 1)]
    return low + (high - low) * (position - index)


def latency(seconds: Iterable[float | None], percent: float = 99) -> Score:
    """Return a percentile of latencies in seconds as a score; lower is better.

    ``seconds`` is a list of latencies, such as :func:`ttft`, :func:`tpot` or :func:`itl` returns.
    """
    value = percentile(_figures("seconds", seconds, least=0), percent)
    return Score(value, f"s (p{percent:g})", "lower")


def ttft(sent: Numbers, tokens: Iterable[Numbers]) -> list[float]:
    """Return the time to first token (TTFT) of each request, in seconds.

    It is the time from sending the request to the arrival of its first token, so it includes
    waiting in queues. ``sent`` has the time at which each request was sent.
    """
    return [times[0] - start for start, times in _requests(sent, tokens)]


def e2e(sent: Numbers, tokens: Iterable[Numbers]) -> list[float]:
    """Return the end-to-end latency of each request, in seconds: from sending to the last token."""
    return [times[-1] - start for start, times in _requests(sent, tokens)]


def tpot(tokens: Iterable[Numbers]) -> list[float | None]:
    """Return the time per output token (TPOT) of each request, in seconds per token.

    It is the time from the first to the last token, divided by the number of tokens after the
    first. It is None for a request of one token. AIPerf calls this figure inter-token latency.
    """
    return [
        (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        for times in _token_times(tokens)
    ]


def itl(tokens: Iterable[Numbers]) -> list[float]:
    """Return the inter-token latencies (ITL), the gaps between tokens of all requests, in seconds.

    A mean of TPOT gives each request the same weight; a mean of ITL gives it to each token.
    """
    return [b - a for times in _token_times(tokens) for a, b in pairwise(times)]


def throughput(count: float, seconds: float, of: str = "tokens") -> Score:
    """Return a rate as a score: ``throughput(512, 2.0, of="requests")`` is 256 requests/s.

    ``seconds`` is the time in which the work was done. To include ramp-up and drain, measure it
    from sending the first request to the last token.
    """
    if not 0 <= count < math.inf:
        raise UsageError(f"the count of {of} is at least 0 and finite, not {count}")
    return Score(float(count) / _positive("seconds", seconds), f"{of}/s")


def energy(joules: float, count: float, of: str = "token") -> Score:
    """Return the energy per unit of work as a score; lower is better.

    ``energy(412.0, 512)`` is 0.805 J/token. :class:`~pytest_aiperf.EnergyMeter` measures joules.
    ``of`` names another unit of work: ``of="request"`` or ``of="call"``.
    """
    return Score(_positive("joules", joules) / _positive("count", count), f"J/{of}", "lower")


def attainment(*criteria: Criterion) -> float:
    """Return the share of requests that meet every limit, from 0 to 1.

    Each criterion is a pair ``(figures, limit)``: one figure per request, and the limit in the same
    unit. A figure equal to the limit meets it. None, such as the TPOT of a request of one token,
    meets every limit, as in vLLM's benchmark.
    """
    met = _met(criteria)
    return sum(met) / len(met)


def goodput(seconds: float, *criteria: Criterion) -> Score:
    """Return the requests per second that meet every limit, as a score.

    ``goodput(60.0, (ttft(sent, tokens), 0.5), (tpot(tokens), 0.05))`` counts the requests of one
    minute with a TTFT of at most 0.5 s and a TPOT of at most 50 ms. Criteria are those of
    :func:`attainment`. This is the definition of vLLM's and AIPerf's benchmarks. In DistServe,
    goodput is the highest request rate per GPU at which 90 % of the requests meet the limits:
    search for it with :func:`attainment`.
    """
    return Score(sum(_met(criteria)) / _positive("seconds", seconds), "requests/s in time")


def training_flops(
    weights: float,
    tokens: float,
    *,
    layers: int = 0,
    width: int = 0,
    length: int = 0,
    causal: bool = False,
) -> float:
    """Return the operations (FLOP) of a transformer's forward and backward passes over ``tokens``.

    ``weights`` is the number of weights in matrix multiplications: all but the embedding table.
    Each needs 6 operations per token: one multiply-add forward, and two backward. Attention adds
    ``12 * layers * width * length`` per token: ``width`` is heads times head size, and ``length``
    is the number of tokens per sequence. ``causal=True`` counts half of that, for kernels that skip
    the masked half. This is the count of PaLM, appendix B (arXiv 2204.02311), which ignores the
    mask. Operations that activation checkpointing repeats do not count.
    """
    for name, value in (("weights", weights), ("tokens", tokens)):
        _positive(name, value)
    if min(layers, width, length) < 0:
        raise UsageError("layers, width and length are at least 0")
    attention = (6 if causal else 12) * layers * width * length
    return float(tokens) * (6 * weights + attention)


def mfu(flops: float, seconds: float, peak: float) -> Score:
    """Return the model FLOPs utilization (MFU) as a score, in percent of the peak.

    ``flops`` are the operations that the model needs, such as :func:`training_flops` of a step.
    ``seconds`` is the time of the step. ``peak`` is the peak rate of all GPUs together, in FLOP/s;
    PaLM (arXiv 2204.02311) takes it from the datasheet. A utilization above 100 % raises
    UsageError: the operations or the peak are those of another dtype, or of too few GPUs.
    """
    share = _positive("flops", flops) / _positive("seconds", seconds) / _positive("peak", peak)
    if share > 1:
        raise UsageError(
            f"{flops / seconds:.3g} FLOP/s exceed the peak of {peak:.3g}: check that both count "
            "the same dtype and the same GPUs, and no sparsity"
        )
    return Score(100 * share, "% MFU")


def scaling_efficiency(rates: Mapping[int, float]) -> dict[int, float]:
    """Return the scaling efficiency by number of GPUs, from the rates by number of GPUs.

    The efficiency is the rate per GPU, divided by the rate per GPU on the smallest number of GPUs:
    1 is linear scaling. Rates are work per second, such as tokens/s. This holds for strong scaling
    (the work stays the same) and for weak scaling (the work grows with the number of GPUs).
    """
    if not rates:
        raise UsageError("rates is empty")
    per_gpu = {n: _positive(f"rates[{n}]", rates[n]) / _positive("GPUs", n) for n in sorted(rates)}
    first = next(iter(per_gpu.values()))
    return {n: rate / first for n, rate in per_gpu.items()}


def _figures(name: str, values: Iterable[float | None], least: float = -math.inf) -> list[float]:
    """Return the values that are not None; raise UsageError if there is none, or one is invalid."""
    figures = [float(value) for value in values if value is not None]
    if not figures:
        raise UsageError(f"{name} is empty")
    for figure in figures:
        if not math.isfinite(figure) or figure < least:
            need = "finite" if least < 0 else "finite and not negative"
            raise UsageError(f"{name} has {figure}: all are {need}")
    return figures


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise UsageError(f"{name} is {value}: it is more than 0 and finite")
    return float(value)


def _token_times(tokens: Iterable[Numbers]) -> list[list[float]]:
    """Return the times of each request's tokens; raise UsageError if they decrease."""
    requests = []
    for i, times in enumerate(tokens):
        figures = _figures(f"tokens[{i}]", times)
        if any(b < a for a, b in pairwise(figures)):
            raise UsageError(f"tokens[{i}]: a token arrives before the one that it follows")
        requests.append(figures)
    if not requests:
        raise UsageError("tokens is empty")
    return requests


def _requests(sent: Numbers, tokens: Iterable[Numbers]) -> list[tuple[float, list[float]]]:
    """Return the time of sending and the times of the tokens of each request."""
    starts, times = _figures("sent", sent), _token_times(tokens)
    if len(starts) != len(times):
        raise UsageError(f"sent has {len(starts)} requests, tokens has {len(times)}")
    for i, (start, of_request) in enumerate(zip(starts, times, strict=True)):
        if of_request[0] < start:
            raise UsageError(f"tokens[{i}]: the first token arrives before the request is sent")
    return list(zip(starts, times, strict=True))


def _met(criteria: Sequence[Criterion]) -> list[bool]:
    """Return whether each request meets all limits."""
    if not criteria:
        raise UsageError("no criterion: pass pairs of figures and their limit")
    columns = []
    for figures, limit in criteria:
        if math.isnan(limit):
            raise UsageError("a limit is a number, not nan")
        column = [None if figure is None else float(figure) for figure in figures]
        if any(figure is not None and math.isnan(figure) for figure in column):
            raise UsageError("a figure is nan: it has no place above or below a limit")
        columns.append([figure is None or figure <= limit for figure in column])
    lengths = {len(column) for column in columns}
    if lengths == {0} or len(lengths) > 1:
        counts = " and ".join(map(str, sorted(lengths)))
        raise UsageError(f"each criterion has one figure per request, not {counts}")
    return [all(row) for row in zip(*columns, strict=True)]


if not TYPE_CHECKING:  # a type checker would take every name for an attribute

    def __getattr__(name: str) -> NoReturn:
        raise no_attribute("pytest_aiperf.scores", name, globals())
