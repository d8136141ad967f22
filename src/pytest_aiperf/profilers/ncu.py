"""Read an Nsight Compute report and aggregate its metrics over the kernels of one call."""

import importlib
import itertools
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.errors import CaptureFailed

NCU_METRICS: Final[Mapping[str, tuple[str, ...]]] = {
    "duration": ("gpu__time_duration.sum",),
    "dram share": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
    "l2 share": (
        "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
        "lts__t_tag_requests.avg.pct_of_peak_sustained_elapsed",
        "lts__lts2xbar_cycles_active.avg.pct_of_peak_sustained_elapsed",
    ),
    "l1 share": (
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active",
        "l1tex__lsuin_requests.avg.pct_of_peak_sustained_active",
    ),
    "sm share": (
        "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_fp64_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    ),
    "tensor share": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",),
    "dram bytes": ("dram__bytes.sum",),
    "dram bytes read": ("dram__bytes_read.sum",),
    "dram bytes written": ("dram__bytes_write.sum",),
    "l2 hit rate": ("lts__t_sector_hit_rate.pct",),
    "l1 hit rate": ("l1tex__t_sector_hit_rate.pct",),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
    # loads and stores only: the metric of all accesses also counts warp shuffles
    "bank conflicts": (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    ),
    "sectors per load": (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    ),
    "sectors per store": (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
        "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    ),
    "local bytes": (
        "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",
        "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",
    ),
    "threads per instruction": ("smsp__thread_inst_executed_per_inst_executed.ratio",),
    "fma share": ("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed",),
    "theoretical occupancy": ("sm__maximum_warps_per_active_cycle_pct",),
    "block limit registers": ("launch__occupancy_limit_registers",),
    "block limit shared memory": ("launch__occupancy_limit_shared_mem",),
    "block limit slots": ("launch__occupancy_limit_blocks",),
    "blocks": ("launch__grid_size",),
    "SMs": ("device__attribute_multiprocessor_count",),
}
"""Name of each figure, and the ncu metrics from which it is computed.

They need a few passes; metrics of launches and devices need none. ncu's own throughput of the L2,
the L1 or the SMs is the largest share among dozens of counters, and needs up to eight passes alone.
"""
MAX_LAUNCHES: Final = 10
"""Kernel launches per arm that the preset "minimal" profiles. Each takes some tenths of a second,
in which no other claim can use the GPU, and an arm may launch thousands, most of them alike."""
CUT: Final = f"only its first {MAX_LAUNCHES} kernels: --profile=ncu:deep_dive profiles all"
"""Note of a profile that may lack kernels: its sums are not those of the whole call."""
_TC_PIPE: Final = "sm__pipe_tc_cycles_active.avg.pct_of_peak_sustained_elapsed"
"""The second tensor pipe of sm100 and sm103, for tcgen05; no other chip has this metric."""
_MORE: Final = {
    "l2 share": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1 share": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "sm share": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor share": _TC_PIPE,
}
"""A further metric of a share, which not every preset or chip has; the largest metric counts."""

_RATIOS: Final = ("sectors per load", "sectors per store")
"""Figures that are the first metric divided by the second."""
_UNITS: Final = {"%": (0.01, "share"), "ns": (1e-9, "s"), "byte": (1.0, "B")}
"""ncu's unit of a metric, and the factor that converts it to this plugin's unit."""
_STALL_METRIC: Final = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_STALL: Final = re.compile(
    r"smsp__average_warps_issue_stalled_(?!selected_)(\w+)_per_issue_active\.ratio"
)
"""Pattern of the stall reasons' metrics, without "selected": such a warp did not stall."""
_STALLS: Final = (
    "barrier", "lg_throttle", "long_scoreboard", "math_pipe_throttle", "mio_throttle",
    "short_scoreboard", "wait",
)  # fmt: skip
"""Stall reasons to collect: those that say what to change. The others would need more passes."""
_OF_LONGEST: Final = ("launch__occupancy_limit", "launch__grid_size")
"""Metrics that are taken from the kernel with the longest time: they only make sense together."""
_OF_CHIP: Final = {
    "sm90": (_STALL_METRIC.format("gmma"),), "sm100": (_TC_PIPE,), "sm103": (_TC_PIPE,)
}  # fmt: skip
"""Metrics that only these chips have; ncu refuses to collect unknown metrics."""
_IN_EVERY_REPORT: Final = "device__attribute"
"""Prefix of metrics that every report has, even if no option requests them."""
_TOP_STALLS: Final = 3  #: Maximum number of stall reasons in a profile.


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel launch in a report."""

    name: str
    seconds: float
    values: Mapping[str, float]  #: Metric to value, in ncu's unit.


def ncu_metrics(arch: str, counters: Iterable[str] = ()) -> list[str]:
    """List the metrics to collect on a GPU: those of all figures, and ``counters``."""
    metrics = itertools.chain.from_iterable(NCU_METRICS.values())
    stalls = map(_STALL_METRIC.format, _STALLS)
    listed = dict.fromkeys([*metrics, *stalls, *_OF_CHIP.get(arch, ()), *counters])
    return [metric for metric in listed if not metric.startswith(_IN_EVERY_REPORT)]


def normalize_name(name: str) -> str:
    """Convert a kernel's name from ncu's ``turn<(int)4>`` to the compiler's ``turn<4>``."""
    return re.sub(
        r"\((?:unsigned |signed )?(?:bool|char|short|int|long|long long)\)(?=-?\d)", "", name
    )


def counter(metric: str, kernel: str) -> str:
    """Name the figure of a metric that is aggregated over kernels with ``kernel`` in their name."""
    return f"{metric} of {kernel}" if kernel else metric


def ncu(
    artifact: Path,
    counters: Collection[tuple[str, str]] = (),
    binary: str | None = None,
    *,
    limited: bool = False,
) -> tuple[dict[str, tuple[float, str]], list[str], list[str]]:
    """Read an ncu report and return its figures, kernels and notes.

    ``counters`` are pairs of a further metric and a part of a kernel's name. Their figures stay in
    ncu's units. ``limited`` is whether at most MAX_LAUNCHES kernels were to be profiled.
    """
    kernels = _kernels(artifact, [metric for metric, _ in counters], binary)
    if not kernels:
        raise CaptureFailed(
            f"{artifact} holds no kernels: the profiled range was not entered or launched "
            "nothing, or ncu_report is older than the ncu that wrote the report "
            "(pip install -U ncu-report)"
        )
    figures: dict[str, tuple[float, str]] = {"kernels": (len(kernels), "")}
    for name, metrics in NCU_METRICS.items():
        if (figure := _figure(name, metrics, kernels)) is not None:
            figures[name] = figure
    reasons = {m for kernel in kernels for m in kernel.values if _STALL.match(m)}
    stalls = [(aggregate(metric, kernels) or 0.0, metric) for metric in sorted(reasons)]
    for warps, metric in sorted(stalls, key=lambda stall: -stall[0])[:_TOP_STALLS]:
        reason = _STALL.sub(r"\1", metric).replace("_", " ")
        figures[f"stall {reason}"] = (warps, "warps per issue")
    for metric, part in counters:
        value = aggregate(metric, [kernel for kernel in kernels if part in kernel.name])
        if value is not None:
            figures[counter(metric, part)] = (value, _unit(metric))
    longest = sorted(kernels, key=lambda kernel: -kernel.seconds)
    notes = [CUT] if limited and len(kernels) >= MAX_LAUNCHES else []
    return figures, list(dict.fromkeys(kernel.name for kernel in longest)), notes


def lacking(metrics: Iterable[str], figures: Collection[str]) -> list[str]:
    """Return a note if a report has no figure of some metrics that the user asked for."""
    names = ", ".join(metric for metric in metrics if metric not in figures)
    return [f"no {names}: `ncu --query-metrics` lists this GPU's metrics"] if names else []


def aggregate(metric: str, kernels: Iterable[Kernel]) -> float | None:
    """Aggregate a metric over kernels: sum, maximum or time-weighted mean; None without values."""
    counted = [k for k in kernels if metric in k.values]
    if counted and metric.startswith(_OF_LONGEST):
        return max(counted, key=lambda kernel: kernel.seconds).values[metric]
    values = [k.values[metric] for k in counted]
    if not counted:
        return None
    if metric.endswith(".sum"):
        return math.fsum(values)
    if metric.startswith(("launch__", _IN_EVERY_REPORT)):
        return max(values)
    return statistics.fmean(values, weights=[k.seconds for k in counted])


def _figure(name: str, metrics: tuple[str, ...], kernels: list[Kernel]) -> tuple[float, str] | None:
    more = [_MORE[name]] if name in _MORE else []
    values = [v for m in (*metrics, *more) if (v := aggregate(m, kernels)) is not None]
    if name in _MORE and values:
        values, metrics = [max(values)], metrics[:1]
    if len(values) < len(metrics):
        return None  # a metric does not exist on this chip or was not collected
    if name in _RATIOS:
        # the divisor is 0 if there were no loads or no stores
        return (values[0] / values[1], "") if values[1] else None
    scale, unit = _UNITS.get(_unit(metrics[0]), (1.0, ""))
    return math.fsum(values) * scale, unit


def _unit(metric: str) -> str:
    """Return ncu's unit of a metric, derived from its name; "" if the name has no unit."""
    if "pct" in metric:  # also that of bytes, in percent of the peak rate
        return "%"
    unit = "ns" if "_duration" in metric else "byte" if "bytes" in metric else ""
    divisor = metric.partition(".per_")[2]
    return f"{unit}/{divisor}" if unit and divisor else unit


def _kernels(artifact: Path, counters: Collection[str], binary: str | None) -> list[Kernel]:
    """Read a report in a separate process, because NVIDIA's reader may crash the process."""
    if not artifact.is_file():
        raise CaptureFailed(f"ncu did not write {artifact}: see the log beside it")
    command = [sys.executable, "-m", __name__, str(artifact), binary or "", *counters]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return [Kernel(*row) for row in json.loads(done.stdout)]
    except ValueError:
        crash = f"its reader crashed with exit code {done.returncode}"
        error = (done.stderr.strip().splitlines() or [crash])[-1]
        raise CaptureFailed(f"{artifact} cannot be read: {error}") from None


def _rows(
    artifact: str, binary: str, *counters: str
) -> Iterator[tuple[str, float, dict[str, float]]]:
    report = _ncu_report(binary or None).load_report(artifact)
    metrics = {*_MORE.values(), *itertools.chain.from_iterable(NCU_METRICS.values()), *counters}
    ranges = [report.range_by_idx(k) for k in range(report.num_ranges())]
    for action in (r.action_by_idx(k) for r in ranges for k in range(r.num_actions())):
        present = set(action.metric_names())
        stalls = {metric for metric in present if _STALL.match(metric)}
        values = {}
        for metric in metrics & present | stalls:
            value = action.metric_by_name(metric).value()
            # ncu reports NaN for a metric that it could not collect; JSON cannot represent NaN
            if isinstance(value, (int, float)) and math.isfinite(value):
                values[metric] = float(value)
        [time] = NCU_METRICS["duration"]
        seconds = values.get(time, 0.0) * 1e-9
        if not seconds:
            sys.exit(f"it lacks the duration of {action.name()}: capture it with --metrics {time}")
        yield normalize_name(action.name(action.NameBase_DEMANGLED)), seconds, values


def _ncu_report(binary: str | None) -> Any:
    """Import ncu_report: from the pip package, else from an Nsight Compute installation."""
    try:
        return importlib.import_module("ncu_report")
    except ImportError:
        for folder in python_folders(binary or shutil.which("ncu")):
            sys.path.append(str(folder))
            try:
                return importlib.import_module("ncu_report")
            except ImportError:
                continue  # the module was built for another Python version
            finally:
                sys.path.remove(str(folder))
    sys.exit("there is no ncu_report: pip install ncu-report (part of 'pytest-aiperf[profile]')")


def python_folders(binary: str | None) -> Iterator[Path]:
    """Yield folders that may contain the module ncu_report of the ncu ``binary``.

    In a CUDA toolkit, bin/ncu may be a script. Nsight Compute itself, with the module, is then in
    another folder of the toolkit or below /opt/nvidia.
    """
    homes = [*Path(binary).resolve().parents[:3], Path("/opt/nvidia")] if binary else []
    for home in homes:
        for pattern in (".", "nsight-compute*", "nsight-compute/*"):
            for module in sorted(home.glob(f"{pattern}/extras/python/ncu_report.py"), reverse=True):
                yield module.parent


if __name__ == "__main__":
    json.dump(list(_rows(*sys.argv[1:])), sys.stdout)
