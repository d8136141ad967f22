"""Command-line options and ini settings."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest

from .errors import UsageError

PROFILE_TAKEN = (
    "another plugin, such as pytest-profiling, owns --profile: disable it with -p no:profiling, or "
    "use --aiperf-profile"
)
"""Error message if another plugin would parse --profile=TOOL."""


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(number) for number in text.split(",")}))


def _tool(text: str) -> str:
    from .profilers.tools import parse

    try:
        tool, preset = parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return f"{tool.name}:{preset}"


def _shard(text: str) -> tuple[int, int]:
    from .records.shards import parse

    try:
        return parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number = text[:-1] if text[-1:] in units else text
    try:
        seconds = float(number) * units.get(text[-1:], 1.0)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 90, 90s, 20m or 2h")
    return seconds


_FLAG: Final = {"action": "store_true"}
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gpu": {**_FLAG, "help": "measure the GPU claims"},
    "cpu": {**_FLAG, "help": "measure the host claims; with --gpu, measure all claims"},
    "quick": {
        **_FLAG,
        "help": "fewer replicates, wider intervals, no second attempt after a failure",
    },
    "telemetry": {
        **_FLAG,
        "help": "sample utilization, clocks, power and memory of the GPUs ten times a second",
    },
    "update-expectations": {
        **_FLAG,
        "help": "measure the GPU claims and the host claims (without a GPU, the host claims), then "
        "write the results into expectations.yaml and the results folder",
    },
    "budget": {
        "type": _seconds,
        "metavar": "TIME",
        "help": "start no further claim after this time (90, 90s, 20m, 2h) and list the rest",
    },
    "shard": {
        "type": _shard,
        "metavar": "I/N",
        "help": "measure only the I-th of N shards of about equal duration; with --profile, a hash "
        "of its id puts a claim into a shard",
    },
    "ranks": {
        "type": _ranks,
        "default": (),
        "metavar": "N[,N...]",
        "help": "run each claim for several GPUs once per N, on N GPUs, with one "
        "process (rank) per GPU",
    },
    "reproducible": {
        **_FLAG,
        "help": "use fixed seeds and deterministic algorithms: the same inputs in every run",
    },
    "cold-start": {
        **_FLAG,
        "help": "begin with empty build caches, in a folder that is removed after the run",
    },
    "profile": {
        "type": _tool,
        "metavar": "TOOL[:PRESET]",
        "help": "profile each arm instead of timing it, with nsys, ncu, torch, proton, memory, "
        "sanitizer, hta or perf; presets minimal, deep_dive, operators (torch), "
        "roofline (ncu); the default is minimal",
    },
    "profile-calls": {
        "type": _count,
        "default": 1,
        "metavar": "N",
        "help": "number of calls that --profile captures (default: %(default)s)",
    },
}
"""Options by name, with the arguments of ``addoption``."""
_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "aiperf_expectations": {"help": "the expectations file", "default": "expectations.yaml"},
    "aiperf_results": {"help": "the folder of accepted results", "default": "results"},
    "aiperf_runs": {"help": "the folder of runs", "default": ".aiperf"},
    "aiperf_artifacts": {
        "help": "the folder of profilers' output files",
        "default": "artifacts",
    },
    "aiperf_kernels": {
        "help": "folders in which nvcc() looks for sources, besides the folder of the test",
        "type": "args",
        "default": ["kernels"],
    },
    "aiperf_folder_markers": {
        "help": "folders whose name becomes a marker of the tests below them",
        "type": "args",
        "default": [],
    },
    "aiperf_interpret": {
        "help": "without --gpu, run Triton kernels in Triton's interpreter, even if there is a GPU",
        "type": "bool",
        "default": True,
    },
    "aiperf_deadline": {
        "help": "time limit per claim in seconds; waiting does not count",
        "default": "300",
    },
}
"""Ini settings by name, with the arguments of ``addini``."""
MEASURING: Final = ("gpu", "cpu", "update-expectations", "profile")
"""Options that make a session measure or profile; any one of them does."""


def add(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the ini settings and the options, as --aiperf-NAME (see :func:`add_short_names`)."""
    _refuse_taken_profile(pluginmanager)
    group = parser.getgroup(
        "aiperf",
        "GPU optimizations as benchmark tests (where another plugin or a conftest.py has an option "
        "of the same name, write --aiperf-gpu instead of --gpu, and so on)",
    )
    for name, attributes in _OPTIONS.items():
        group.addoption(f"--aiperf-{name}", **{**attributes, "help": argparse.SUPPRESS})
    text = "also write the results into DIR, as an HTML page and as Markdown"
    group.addoption("--aiperf-report", metavar="DIR", help=text)

    for name, attributes in _SETTINGS.items():
        parser.addini(name, **attributes)


def settings(config: pytest.Config) -> dict[str, str]:
    """Return the value of each ini setting as text; items of a list are joined by spaces."""
    values = {name: config.getini(name) for name in _SETTINGS}
    return {
        name: " ".join(value) if isinstance(value, list) else str(value)
        for name, value in values.items()
    }


def _refuse_taken_profile(pluginmanager: pytest.PytestPluginManager) -> None:
    """Refuse --profile=TOOL with a clear message before pytest-profiling fails on the value."""
    config: pytest.Config | None = pluginmanager.get_plugin("pytestconfig")
    given = config is not None and any(
        str(word).startswith("--profile=") for word in config.invocation_params.args
    )
    if given and not pluginmanager.is_blocked("profiling"):
        from importlib import metadata

        if metadata.entry_points(group="pytest11", name="profiling"):
            raise pytest.UsageError(PROFILE_TAKEN)


def add_short_names(parser: pytest.Parser, args: Sequence[str]) -> set[str]:
    """Add --NAME for each option --aiperf-NAME, unless a plugin or a conftest owns that name.

    Return the added names. Call this when all plugins and conftests have added their options.
    """
    free = _free(parser, [f"--{name}" for name in _OPTIONS])
    if "--profile" not in free and any(word.startswith("--profile=") for word in args):
        raise pytest.UsageError(PROFILE_TAKEN)
    for name, attributes in _OPTIONS.items():
        if f"--{name}" in free:
            dest = f"aiperf_{name}".replace("-", "_")
            parser.getgroup("aiperf").addoption(f"--{name}", dest=dest, **attributes)
    return free


def _free(parser: pytest.Parser, names: Sequence[str]) -> set[str]:
    """Return the options in ``names`` that no plugin or conftest has added."""
    try:
        _, unknown = parser.parse_known_and_unknown_args(names)
    except pytest.UsageError:  # an option in ``names`` exists already and needs a value
        unknown = []
    if len(unknown) == len(names) or len(names) == 1:
        return set(unknown)
    return {free for name in names for free in _free(parser, [name])}
