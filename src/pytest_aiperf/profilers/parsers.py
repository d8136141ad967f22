"""Read the figures of one arm from the file that a profiler wrote."""

import functools
import re
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.errors import CaptureFailed
from pytest_aiperf.model import Profile
from pytest_aiperf.text import si

from . import skew
from .ncu import CUT, ncu, normalize_name
from .ranges import sentence
from .timeline import RANGE, TOP, Figures, Reading, load_json, nsys, torch_trace

_TREE_LINES: Final = 20  #: Maximum number of lines of Proton's tree in the notes.
_RANGES: Final = 20  #: Maximum number of the program's own ranges in the notes.


def read(
    tool: str,
    artifact: Path,
    arm: str,
    required: Collection[str] = (),
    *,
    counters: Collection[tuple[str, str]] = (),
    binary: str | None = None,
    limited: bool = False,
) -> Profile:
    """Read the file that a tool wrote for one arm; raise CaptureFailed if it has no figures.

    ``required`` are parts of the names of kernels that must have run, if the tool reports names.
    ``counters`` are pairs of an ncu metric and a part of a kernel's name. ``binary`` is the ncu or
    nsys that wrote the file. ``limited`` is whether ncu was told to profile at most MAX_LAUNCHES
    kernels; if the limit was reached, ``required`` is not checked.
    """
    parsers: dict[str, Callable[[Path], tuple[Any, ...]]] = {
        "ncu": functools.partial(ncu, counters=counters, binary=binary, limited=limited),
        "nsys": functools.partial(nsys, binary=binary),
        "torch": torch_trace, "hta": hta, "proton": proton,
        "memory": memory, "sanitizer": sanitizer, "perf": perf,
    }  # fmt: skip
    reading = Reading(*parsers[tool](artifact))
    found = profile(tool, artifact, arm, reading)
    missing = [part for part in required if not any(part in kernel for kernel in found.kernels)]
    if missing and CUT not in found.notes and tool not in ("memory", "sanitizer", "perf"):
        raise CaptureFailed(
            f"{artifact} lacks the kernel {missing[0]}: the {arm} arm ran "
            f"{', '.join(found.kernels[:TOP]) or 'no kernels'}"
        )
    return replace(found, notes=(*found.notes, *map(sentence, reading.ranges[:_RANGES])))


def profile(tool: str, artifact: Path, arm: str, reading: Reading) -> Profile:
    """Return what a parser read as the profile of an arm, or of a process or GPU of a command."""
    values = {name: float(value) for name, (value, _) in reading.figures.items()}
    units = {name: unit for name, (_, unit) in reading.figures.items()}
    kernels = tuple(map(normalize_name, reading.kernels))
    return Profile(tool, arm, str(artifact), values, units, kernels, tuple(reading.notes))


def hta(folder: Path) -> Reading:
    """Analyze the traces of all ranks (``<rank>.json`` or ``.json.gz``) with HTA."""
    traces = sorted(p for p in folder.glob("*.json*") if p.name.partition(".")[0].isdecimal())
    if not traces:
        raise CaptureFailed(f"{folder} has no traces: each rank writes its own, <rank>.json")
    kernels = dict.fromkeys(kernel for trace in traces for kernel in torch_trace(trace)[1])
    if not kernels:
        raise CaptureFailed(f"{folder} has only traces without kernels: HTA analyzes kernels")
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError as error:
        raise CaptureFailed(
            f"HolisticTraceAnalysis cannot be imported ({error}): "
            "install the extra pytest-aiperf[hta]"
        ) from error
    try:
        files = {int(trace.name.partition(".")[0]): str(trace.absolute()) for trace in traces}
        analysis = TraceAnalysis(files)
        ranks = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
        kinds = analysis.get_gpu_kernel_breakdown(visualize=False)[0].to_dict("records")
        communicates = any("COMMUNICATION" in row["kernel_type"] for row in kinds)
        overlaps = analysis.get_comm_comp_overlap(visualize=False) if communicates else None
    except Exception as error:  # HTA may raise any exception; only this claim must fail
        raise CaptureFailed(f"HTA could not analyze {folder} ({error!r})") from error
    figures: Figures = {
        "ranks": (len(ranks), ""),
        "idle share": (_mean(ranks, "idle_time_pctg") / 100, "share"),
        "compute share": (_mean(ranks, "compute_time_pctg") / 100, "share"),
    }
    if mean := _mean(ranks, "compute_time(us)"):
        figures["imbalance"] = (max(rank["compute_time(us)"] for rank in ranks) / mean, "")
    for row in kinds:
        figures[f"{row['kernel_type'].lower()} time"] = (row["sum"] / 1e6, "s")
    if overlaps is not None:
        hidden = _mean(overlaps.to_dict("records"), "comp_comm_overlap_pctg")
        figures["hidden communication"] = (hidden / 100, "share")
    notes = [
        f"rank {r['rank']}: {r['compute_time_pctg']} % compute, {r['non_compute_time_pctg']} % "
        f"communication and copies, {r['idle_time_pctg']} % idle"
        for r in ranks
    ]
    if found := skew.of({f"rank {t.name.partition('.')[0]}": t for t in traces}):
        figures["skew"] = (found.mean, "s")
        notes.append(str(found))
    exposed = _mean(ranks, "non_compute_time_pctg") / 100 if communicates else 0.0
    notes += _advice(exposed, figures.get("imbalance", (1.0, ""))[0])
    return Reading(figures, list(kernels), notes)


def _advice(exposed: float, imbalance: float) -> Iterator[str]:
    if exposed > _MAX_EXPOSED:
        yield (
            f"communication-bound: in {exposed:.0%} of the time GPUs communicate or copy and do "
            "not compute: start communication earlier (see ch04/ddp_backward_overlap), in larger "
            "messages (see ch04/bucketed_all_reduce)"
        )
    if imbalance > _MAX_IMBALANCE:
        yield (
            f"imbalanced: the rank with the most work computes {imbalance:.2f} times the mean: "
            "give all ranks the same amount of work"
        )


_MAX_EXPOSED: Final = 0.2
"""If GPUs communicate without computing for more than this share of the time, advice is given. By
hiding a smaller share, a step becomes at most 1.25 times as fast."""
_MAX_IMBALANCE: Final = 1.15
"""If the work of the busiest rank is more than this many times the mean, advice is given: the other
ranks wait for the difference."""


def _mean(rows: list[dict[str, Any]], column: str) -> float:
    return statistics.fmean(row[column] for row in rows)


def proton(artifact: Path) -> Reading:
    """Read Proton's tree: below the scope "aiperf" if that exists, otherwise the whole tree."""
    tree = load_json(artifact, "Proton hatchet tree")
    roots = [node for node in tree if "frame" in node] if isinstance(tree, list) else []
    try:
        nodes = [(depth, node) for root in roots for depth, node in _walk(root)]
        scope = next((node for _, node in nodes if node["frame"]["name"] == RANGE), None)
        if scope is not None:
            nodes = list(_walk(scope))
        ran = [node for _, node in nodes if node["metrics"].get("count")]
        ran.sort(key=lambda node: -node["metrics"]["time (ns)"])
        lines = [
            f"{'  ' * depth}{si(_seconds(node), 's')} {node['frame']['name']}"
            for depth, node in nodes
        ]
        figures: Figures = {
            "duration": (sum(node["metrics"]["time (ns)"] for node in ran) / 1e9, "s"),
            "kernels": (sum(node["metrics"]["count"] for node in ran), ""),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CaptureFailed(f"{artifact} is not a Proton hatchet tree ({error!r})") from error
    if not ran:
        raise CaptureFailed(f"{artifact} holds no kernels: the captured call launched nothing")
    return Reading(figures, [node["frame"]["name"] for node in ran], lines[:_TREE_LINES])


def _walk(node: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[int, Mapping[str, Any]]]:
    yield depth, node
    for child in node["children"]:
        yield from _walk(child, depth + 1)


def _seconds(node: Mapping[str, Any]) -> float:
    return float(sum(n["metrics"].get("time (ns)", 0) for _, n in _walk(node))) / 1e9


_MAX_FRAGMENTED: Final = 0.2
"""If more than this share of the reserved memory is free in split blocks, advice is given. Blocks
of different sizes always leave some memory free, but a large share makes an allocation fail while
enough bytes are free."""
_MAX_TEMPORARY: Final = 0.5
"""If more than this share of the peak is free again after the call, advice is given. Weights,
gradients and the states of an optimizer stay, and usually take more than half."""
_LARGE_BYTES: Final = 2**30
"""Smallest peak for which this advice is given: less memory then makes room for a larger batch or
model."""
_MAX_ALLOCATIONS: Final = 1000
"""If a call makes more allocations than this, advice is given. Each takes the host about a
microsecond, if the allocator has the memory already, so that these cost about a millisecond."""


def memory(artifact: Path) -> Reading:
    """Read the figures of PyTorch's allocator, which the profiled process wrote as JSON.

    ``peak`` is the most bytes allocated at one time, ``allocated`` the bytes after the call,
    ``allocations`` the number of allocations during the call, ``reserved`` the most bytes that the
    allocator held, and ``inactive split`` the free bytes in blocks of which a part is in use.
    """
    content = load_json(artifact, "record of PyTorch's allocator")
    units = {
        "peak": "B", "allocated": "B", "allocations": "", "reserved": "B", "inactive split": "B"
    }  # fmt: skip
    try:
        figures: Figures = {name: (float(content[name]), unit) for name, unit in units.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureFailed(
            f"{artifact} is not a record of PyTorch's allocator ({error!r})"
        ) from error
    if not figures["peak"][0]:
        raise CaptureFailed(
            f"{artifact} has no allocation: PyTorch's allocator sees only tensors on the GPU"
        )
    peak, allocated = figures["peak"][0], figures["allocated"][0]
    notes = []
    if (fragmented := figures["inactive split"][0] / figures["reserved"][0]) > _MAX_FRAGMENTED:
        notes.append(
            f"fragmented: {fragmented:.0%} of the reserved memory is free, in blocks that are "
            "partly in use; try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if (temporary := 1 - allocated / peak) > _MAX_TEMPORARY and peak >= _LARGE_BYTES:
        notes.append(
            f"temporary: {temporary:.0%} of the peak is free again at the end: compute activations "
            "again instead of keeping them (see ch13/activation_checkpointing), or large "
            "intermediate results in chunks (see ch13/fused_linear_cross_entropy)"
        )
    calls = content.get("calls")  # None for a command, whose steps are not counted
    if calls and (count := figures["allocations"][0] / calls) > _MAX_ALLOCATIONS:
        notes.append(
            f"{count:.0f} allocations per call: fuse small operations, or allocate once and reuse "
            "the memory (see ch03/preallocated_batch_slots)"
        )
    return Reading(figures, [], notes)


def sanitizer(artifact: Path) -> Reading:
    """Read the XML of compute-sanitizer: one file, or a folder with one file per tool."""
    files = sorted(artifact.glob("*.xml")) if artifact.is_dir() else [artifact]
    if not files:
        raise CaptureFailed(f"{artifact} has no XML file of compute-sanitizer: see its log")
    by_tool = [(re.split(r"[._-]", file.stem)[-1], list(_records(file))) for file in files]
    figures: Figures = {"findings": (sum(len(records) for _, records in by_tool), "")}
    figures |= {f"{tool} findings": (len(records), "") for tool, records in by_tool}
    notes = [f"{tool}: {_sentence(records[0])}" for tool, records in by_tool if records]
    return Reading(figures, [], notes)


def _records(file: Path) -> Iterator[ET.Element]:
    try:
        # trusted: this run's compute-sanitizer wrote the file
        root = ET.fromstring(file.read_text(errors="replace"))  # noqa: S314
    except (OSError, ET.ParseError) as error:
        raise CaptureFailed(
            f"{file} is not compute-sanitizer XML ({error}): did the tool end early?"
        ) from error
    unknown = [child.tag for child in root if child.tag != "record"]
    if root.tag != "ComputeSanitizerOutput" or unknown:
        tag = unknown[0] if unknown else root.tag
        raise CaptureFailed(f"{file} has an unknown element <{tag}>: open the file to read it")
    for record in root:
        if (record.findtext("level") or "").strip().lower() != "info":
            yield record


def _sentence(record: ET.Element) -> str:
    """Return a sanitizer record's message with its kernel, file and line."""

    def text(path: str) -> str:
        return " ".join((record.findtext(path) or "").split())

    sentence = text("what/text") or text("what") or text("kind") or "a finding without a message"
    if text("what/error"):
        sentence += f" ({text('what/error')})"
    if text("where/func"):
        sentence += f" in {text('where/func')}"
    if text("where/path"):
        sentence += f" at {text('where/path')}:{text('where/line')}"
    return sentence


def perf(artifact: Path) -> Reading:
    """Read the text of ``perf report --stdio``: the fraction of host time in each symbol."""
    try:
        text = artifact.read_text(errors="replace")
    except OSError as error:
        raise CaptureFailed(f"perf did not write {artifact}: see the log beside it") from error
    rows = re.findall(r"^ *(?:[\d.]+% +)?([\d.]+)% .*?\[[.kguH]\] +(\S.*?) *$", text, re.MULTILINE)
    if not rows:
        raise CaptureFailed(
            f"{artifact} has no symbols: the call was too short to be sampled, or "
            "kernel.perf_event_paranoid forbids sampling"
        )
    figures: Figures = {
        "symbols": (len(rows), ""),
        "top symbol": (float(rows[0][0]) / 100, "share"),
    }
    if sampled := re.search(r"^# Samples: ([\d.]+)([KMG]?) ", text, re.MULTILINE):
        scale = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[sampled[2]]
        figures["samples"] = (float(sampled[1]) * scale, "")
    return Reading(figures, [], [f"{share} % {symbol}" for share, symbol in rows[:TOP]])
