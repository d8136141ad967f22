"""Command-line options and ini settings."""

import argparse
from collections.abc import Sequence

import pytest

from .errors import UsageError

PROFILE_TAKEN = (
    "another plugin, such as pytest-profiling, owns --profile: disable it with -p no:profiling, or "
    "use --aiperf-profile"
)
"""Error message if another plugin would parse --profile=TOOL."""


def add(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the ini settings, and all options except --profile (see :func:`add_profile`)."""
    _refuse_taken_profile(pluginmanager)
    option = parser.getgroup("aiperf", "GPU optimizations as benchmark tests").addoption
    option("--gpu", action="store_true", help="measure the selected claims on the GPU")
    option("--cpu", action="store_true", help="measure the host claims on this machine")
    text = "fewer replicates, wider intervals, no second attempt after a failure"
    option("--quick", action="store_true", help=text)
    text = "measure, then write the results into expectations.yaml and the results folder"
    option("--update-expectations", action="store_true", help=text)
    text = "start no further claim after this time (90, 90s, 20m, 2h) and list the rest"
    option("--budget", type=_seconds, metavar="TIME", help=text)
    text = "measure only the I-th of N shards of about equal duration"
    option("--shard", type=_shard, metavar="I/N", help=text)
    text = "also write the results into DIR, as an HTML page and as Markdown"
    option("--aiperf-report", metavar="DIR", help=text)
    text = "use fixed seeds and deterministic algorithms: the same inputs in every run"
    option("--reproducible", action="store_true", help=text)
    text = "number of calls that --profile captures (default: %(default)s)"
    calls = "aiperf_profile_calls"
    option("--profile-calls", dest=calls, type=_count, default=1, metavar="N", help=text)

    ini = parser.addini
    ini("aiperf_expectations", "the expectations file", default="expectations.yaml")
    ini("aiperf_results", "the folder of accepted results", default="results")
    text = "folders in which nvcc() looks for sources, besides the folder of the test"
    ini("aiperf_kernels", text, type="args", default=["kernels"])
    text = "folders whose name becomes a marker of the tests below them"
    ini("aiperf_folder_markers", text, type="args", default=[])
    text = "check Triton kernels in Triton's interpreter even on machines with a GPU"
    ini("aiperf_interpret", text, type="bool", default=False)
    ini("aiperf_deadline", "time limit per claim in seconds; waiting does not count", default="300")


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


def add_profile(parser: pytest.Parser, args: Sequence[str]) -> None:
    """Add --aiperf-profile, with the short name --profile unless another plugin owns it.

    Call this when all plugins have added their options.
    """
    try:
        _, unknown = parser.parse_known_and_unknown_args(["--profile"])
        free = "--profile" in unknown
    except pytest.UsageError:  # --profile belongs to another plugin and needs a value
        free = False
    if not free and any(word.startswith("--profile=") for word in args):
        raise pytest.UsageError(PROFILE_TAKEN)
    parser.getgroup("aiperf").addoption(
        *(["--profile"] if free else []),
        "--aiperf-profile",
        dest="aiperf_profile",
        type=_tool,
        metavar="TOOL[:PRESET]",
        help="profile each arm instead of timing it, with nsys, ncu, torch, proton, memory, "
        "sanitizer, hta or perf; presets minimal, deep_dive, roofline",
    )


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


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
    seconds = float(number) * units.get(text[-1:], 1.0)
    if not seconds > 0:
        raise ValueError(text)
    return seconds
