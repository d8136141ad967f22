"""A claim as its author states it: the arguments of ``compare``."""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast, get_args

from pytest_aiperf.errors import UsageError
from pytest_aiperf.model import (
    Against,
    AgainstName,
    Bench,
    CacheName,
    Evidence,
    Metric,
    MetricName,
    PrecisionName,
    Prepared,
    Work,
)
from pytest_aiperf.rules.evidence import ON_HOST

Arm = Callable[..., object] | Prepared
MEANINGS: Final = {
    "baseline": "the callable to beat",
    "optimized": "the callable that should be faster",
    "library": "the callable that a user would otherwise choose",
    "inputs": "a function of the Bench that returns the arguments of one call",
    "reference": "a function of the same arguments that returns the correct result, in fp64",
    "work": "a function of the same arguments, such as lambda a: Work(read=a.nbytes)",
}
"""The callables that ``compare`` takes, for error messages."""
Progress = Callable[..., None]  #: Reports a phase by name, with its figures as keywords.


def _given(name: str, value: object) -> str:
    """Describe a value that is no callable, and which one to give instead of a .cu file."""
    from pytest_aiperf.build.launcher import Kernels  # imported late: it loads ctypes

    if not isinstance(value, Kernels):
        return " ".join(reprlib.repr(value).split())  # an array's text has several lines
    no_function = 'it has no extern "C" function'
    functions = list(value) or ["NAME"]
    example = functions[0 if name == "baseline" else -1]
    return (
        f'a .cu file: name one of its functions, nvcc("{value.name}")["{example}"] '
        f"({', '.join(value) or no_function})"
    )


def _metrics(metric: MetricName | Sequence[MetricName]) -> tuple[MetricName, ...]:
    """Return one or more metrics as a tuple; raise UsageError if there is none, or one twice."""
    metrics = (metric,) if isinstance(metric, str) else tuple(metric)
    if not metrics:
        raise UsageError("compare(metric=()): name at least one metric; the first is judged")
    if repeated := [word for word in metrics if metrics.count(word) > 1]:
        raise UsageError(
            f"compare(metric={metrics!r}): {repeated[0]!r} is named twice; name each metric once"
        )
    return metrics


def no_progress(*_phase: object, **_figures: object) -> None:
    """Ignore progress reports."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The checked arguments of one call of the ``compare`` fixture."""

    arms: Mapping[str, Arm]  #: "baseline", "optimized" and, if there is one, "library".
    inputs: Callable[[Bench], object]  #: Builds one set of inputs.
    reference: Callable[..., object]  #: Oracle: computes the result in fp64 or exactly.
    work: Callable[..., Work] | None = None  #: Computes the work of one call from its inputs.
    metrics: tuple[Metric, ...] = (Metric.DEVICE,)  #: Metrics to measure; the first is judged.
    against: Against = Against.IDIOMATIC  #: Kind of baseline, for reports.
    cache: CacheName = "cold"  #: "warm" if the working set may stay in the L2 between calls.
    precision: PrecisionName | None = None  #: Lower precision that the optimized arm declares.
    evidence: tuple[Evidence, ...] = ()  #: Figures that prove the optimized arm's mechanism.


def refuse_gpu_figures(claim: Claim) -> None:
    """Raise UsageError if a claim that runs on the host names a figure of a GPU."""
    if Metric.DEVICE in claim.metrics:
        raise UsageError('a claim on the host has no time on the GPU: write metric="wall"')
    for piece in claim.evidence:
        if piece.kind not in ON_HOST:
            kinds = ", ".join(kind.name.lower() for kind in ON_HOST)
            raise UsageError(
                f"evidence.{piece.kind.name.lower()}() is about a GPU, and this claim runs on the "
                f"host: use one of {kinds}"
            )


def claim_of(
    *,
    baseline: Arm,
    optimized: Arm,
    inputs: Callable[[Bench], object],
    reference: Callable[..., object],
    work: Callable[..., Work] | None = None,
    library: Arm | None = None,
    metric: MetricName | Sequence[MetricName] = "device",
    against: AgainstName = "idiomatic",
    cache: CacheName = "cold",
    precision: PrecisionName | None = None,
    evidence: Evidence | Sequence[Evidence] = (),
) -> Claim:
    """Make a claim from the arguments of ``compare``; raise UsageError if one is not allowed."""
    arms = {"baseline": baseline, "optimized": optimized}
    arms |= {} if library is None else {"library": library}
    called = {**arms, "inputs": inputs, "reference": reference}
    for name, value in (called if work is None else {**called, "work": work}).items():
        if not callable(value) and not isinstance(value, Prepared):
            raise UsageError(f"{name}= must be {MEANINGS[name]}, not {_given(name, value)}")
    with suppress(ValueError):  # some builtins have no readable signature
        parameters = inspect.signature(inputs)
        try:
            parameters.bind(None)
        except TypeError:
            raise UsageError(f"inputs{parameters} must take one argument, the Bench") from None
    metrics = _metrics(metric)
    for name, word, allowed in (
        *(("metric", word, get_args(MetricName)) for word in metrics),
        ("against", against, get_args(AgainstName)),
        ("cache", cache, get_args(CacheName)),
        ("precision", precision, (None, *get_args(PrecisionName))),
    ):
        if word not in allowed:
            words = ", ".join(filter(None, allowed))
            raise UsageError(f"compare({name}={word!r}): use one of {words}")
    many = isinstance(evidence, Iterable) and not isinstance(evidence, str)
    pieces = tuple(cast("Iterable[Evidence]", evidence if many else [evidence]))
    for piece in pieces:
        if not isinstance(piece, Evidence):
            example = f': evidence.opcode("{piece}")' if isinstance(piece, str) else ""
            raise UsageError(
                "evidence= must be made with functions of pytest_aiperf.evidence, not "
                f"{reprlib.repr(piece)}{example}"
            )
        if piece.per == "work" and work is None:
            raise UsageError(f"evidence about {piece.of or piece.kind} per byte needs work=")
    return Claim(
        arms=cast("Mapping[str, Arm]", arms),
        inputs=inputs,
        reference=reference,
        work=work,
        metrics=tuple(Metric(word) for word in metrics),
        against=Against(against),
        cache=cache,
        precision=precision,
        evidence=pieces,
    )
