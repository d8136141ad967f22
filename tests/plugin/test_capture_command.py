"""`capture TOOL -- COMMAND` profiles a command as it is, and keeps what it has if that fails."""

import csv
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_aiperf import cli
from pytest_aiperf.model import Profile
from pytest_aiperf.profilers import command, injected, ncu, parsers, summary, timeline, tools
from pytest_aiperf.profilers.command import CommandRecord, Part, ToolCapture
from pytest_aiperf.profilers.ranges import RangeTime
from tests.plugin.conftest import PATIENCE_S
from tests.plugin.nsys_export import Export

SAMPLES = Path(__file__).parent / "samples"
MICRO = 1_000  # nanoseconds

TOOL = f"""\
#!{sys.executable}
# A profiler that runs what it is given and leaves a sample. $FAKE_TOOL selects its fault.
import os, pathlib, subprocess, sys
words, mode = sys.argv[1:], os.environ.get("FAKE_TOOL", "")
name = pathlib.Path(sys.argv[0]).name
here = pathlib.Path(sys.argv[0]).parent
if "--version" in words:
    print("Version 2025.3")
    sys.exit()
def after(option):
    return words[words.index(option) + 1]
def assigned(option):
    return next(w.partition("=")[2] for w in words if w.startswith(option + "="))
if words[0] == "export":
    pathlib.Path(assigned("--output")).write_bytes((here / "export.sqlite").read_bytes())
    sys.exit()
if words[0] == "report":
    print("# Samples: 2K of event 'cycles'")
    print("    61.20%  python   libc.so  [.] sum_of_squares")
    sys.exit()
print("words:", *words[:words.index("/bin/sh")], flush=True)
if mode == "denied " + name or (mode == "no metrics" and any("gpu-metrics" in w for w in words)):
    print("==ERROR== ERR_NVGPUCTRPERM - no permission", flush=True)
    sys.exit(1)
if mode == "crashes":
    kept = "nothing" if any("gpu-metrics" in w for w in words) else "whole"
    (here / "export.sqlite").write_bytes((here / (kept + ".sqlite")).read_bytes())
rc = subprocess.call(words[words.index("/bin/sh"):])
if mode == "empty " + name:
    print("==WARNING== No kernels were profiled.")
elif name == "ncu":
    pathlib.Path(after("--export") + ".ncu-rep").write_bytes((here / "ncu.ncu-rep").read_bytes())
elif name == "nsys":
    pathlib.Path(assigned("--output") + ".nsys-rep").write_text("a report")
elif name == "perf":
    pathlib.Path(after("--output")).write_text("samples")
else:
    record = "<record><kind>Invalid __global__ read</kind><level>Error</level></record>"
    found = record if mode == after("--tool") else ""
    text = f"<ComputeSanitizerOutput>{{found}}</ComputeSanitizerOutput>"
    pathlib.Path(after("--save")).write_text(text)
# a tool may end well although its command failed
"""

TUNED = """\
import torch, triton
import triton.language as tl

times = iter([3.0, 1.0])

def bench(call, quantiles):
    call()
    return [next(times)] * 3

configs = [triton.Config({"BLOCK": n}) for n in (16, 32)]

@triton.autotune(configs, key=["n"], do_bench=bench)
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

x = torch.ones(64)
double[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](x, 64)
"""

PHASES = """\
import sys, torch
from torch.profiler import record_function
with record_function("forward"):
    x = torch.ones(8) + 1
with record_function("update"):
    x.mul_(2)
print("phases done")
sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
"""


@pytest.fixture(autouse=True)
def fakes(tmp_path, monkeypatch):
    """Put fake profilers before the real ones on PATH, and work in an empty folder."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name in ("ncu", "nsys", "compute-sanitizer", "perf"):
        (folder / name).write_text(TOOL)
        (folder / name).chmod(0o755)
    report = gzip.decompress((SAMPLES / "ncu.ncu-rep.gz").read_bytes())
    (folder / "ncu.ncu-rep").write_bytes(report)
    export = Export()
    export.range("forward", 0, 100 * MICRO)
    export.launch(5 * MICRO, ("void gemm<4>(int)", 10 * MICRO, 60 * MICRO))
    export.launch(8 * MICRO, ("relu(int)", 60 * MICRO, 70 * MICRO))
    export.write(folder / "export.sqlite")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for cache in (tools.require_tool, tools.find_program):
        cache.cache_clear()
    yield folder
    for cache in (tools.require_tool, tools.find_program):
        cache.cache_clear()


def capture(*words):
    return cli.main(["capture", *words])


def folder():
    [found] = Path("artifacts").glob("*/*/capture.json")
    return found.parent


def record():
    return command.load(folder())


def words_of(tool):
    return next(line for line in (folder() / f"{tool}.log").read_text().splitlines()
                if line.startswith("words: "))  # fmt: skip


# what runs, and with which arguments


def test_any_command_is_profiled_from_start_to_end(capfd):
    assert capture("nsys", "--", "sh", "-c", "echo at work") == 0
    out, err = capfd.readouterr()
    assert "at work" in err  # while it runs
    assert "nsys: sh -c 'echo at work'" in err
    for part in ("kernels", "gap share", "time per range", "forward", "written: artifacts/"):
        assert part in out
    words = words_of("nsys")
    assert "--capture-range" not in words
    assert "--trace=cuda,nvtx" in words
    assert "--cuda-graph-trace=node" in words
    [part] = record().captures[0].parts
    assert part.profile.figures["kernels"] == 2
    assert [row.name for row in part.ranges] == ["forward"]
    assert Path(part.profile.artifact).is_file()


def test_files_go_to_the_folder_of_artifacts(tmp_path):
    assert capture("nsys", "--artifacts", "../kept", "--", "true") == 0
    assert not Path("artifacts").exists()
    [found] = (tmp_path / "kept").glob("*/true/capture.json")
    [part] = command.load(found.parent).captures[0].parts
    assert Path(part.profile.artifact).resolve().is_relative_to(tmp_path / "kept")
    assert (found.parents[1] / "CACHEDIR.TAG").exists()


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path, capfd):
    (tmp_path / "file").touch()
    assert capture("nsys", "--artifacts", str(tmp_path / "file"), "--", "true") == 2
    assert "capture: cannot write " in capfd.readouterr().err


def test_tools_run_one_after_another(capfd):
    assert capture("nsys,ncu:deep_dive", "--", "true") == 0
    captured = record()
    assert [(each.tool, each.preset, each.status) for each in captured.captures] == [
        ("nsys", "minimal", 0), ("ncu", "deep_dive", 0),
    ]  # fmt: skip
    text = (folder() / "summary.md").read_text()
    assert text.startswith("# `true`\n")
    assert "| `forward` | 1 |" in text
    assert "## ncu (deep\\_dive)" in text or "## ncu (deep_dive)" in text
    assert "latency-bound: no unit is busy" in capfd.readouterr().out


def test_ncu_profiles_the_selected_kernels():
    words = ["--nvtx", "forward", "--kernel", "gemm|relu", "--launch-skip", "4"]
    words += ["--launch-count", "3", "--metrics", "l1tex__a.sum,sm__b.sum"]
    assert capture("ncu", *words, "--", "true") == 0
    given = words_of("ncu")
    for part in (
        "--nvtx --nvtx-include forward --nvtx-include forward/ ",
        "--kernel-name-base demangled --kernel-name regex:gemm|relu ",
        "--launch-skip 4",
        "--launch-count 3",
        "--target-processes all",
        ",l1tex__a.sum,sm__b.sum",
    ):
        assert part in given
    assert given.count("--launch-count") == 1
    [part] = record().captures[0].parts
    assert any("no l1tex__a.sum, sm__b.sum: `ncu --query-metrics`" in n for n in part.profile.notes)


def test_a_metric_of_ones_own_is_a_figure():
    assert capture("ncu", "--metrics", "gpu__time_duration.sum", "--", "true") == 0
    assert record().captures[0].parts[0].profile.figures["gpu__time_duration.sum"] > 0


def test_a_metric_of_ones_own_of_a_function(monkeypatch, capsys):
    asked = []

    def captured(request, arm, kernels):
        asked.extend(kernels.counters)
        return Profile("ncu", arm, "a.ncu-rep", {"a.sum": 3.0}, {"a.sum": ""}), None

    monkeypatch.setattr(cli.profiler, "capture", captured)
    assert capture("ncu", "--metrics", "a.sum,b.sum", "file.py::function") == 0
    assert asked == [("a.sum", ""), ("b.sum", "")]
    printed = capsys.readouterr().out
    assert "a.sum     3" in printed
    assert "no b.sum: `ncu --query-metrics` lists this GPU's metrics" in printed


def test_a_file_without_a_function_and_a_command_without_dashes_say_what_to_write(capsys):
    assert capture("torch", "step.py") == 2
    assert "write FILE.py::FUNCTION, or a command after --" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        capture("torch", "python", "step.py")
    assert "a command to profile follows --: capture TOOL -- " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        capture("--help")
    assert "[-- COMMAND ...]" in capsys.readouterr().out


def test_the_usage_is_readable_where_argparse_colors_it(monkeypatch, capsys):
    colored = "\x1b[1;34musage: \x1b[0m\x1b[1;35mcapture\x1b[0m [-h]\n"
    monkeypatch.setattr(cli._Command, "format_usage", lambda _: colored)  # as Python 3.14 does
    with pytest.raises(SystemExit):
        capture("--help")
    assert capsys.readouterr().out.startswith("usage: capture [-h] [-- COMMAND ...]\n")


def test_the_limit_of_the_minimal_preset_is_told(monkeypatch):
    monkeypatch.setattr(ncu, "MAX_LAUNCHES", 5)  # the sample has five kernels
    assert capture("ncu", "--", "true") == 0
    [part] = record().captures[0].parts
    assert "only the first 5 kernels: select others with --kernel" in part.profile.notes[-1]


def test_nsys_reads_the_selected_range_and_kernels():
    assert capture("nsys", "--nvtx", "forward", "--kernel", "^relu", "--", "true") == 0
    [part] = record().captures[0].parts
    assert part.profile.kernels == ("relu(int)",)
    assert "--nvtx" not in words_of("nsys")  # nsys records everything: only reading is limited


def test_what_triton_chose_is_a_note(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    Path("tuned.py").write_text(TUNED)
    assert capture("nsys", "--", sys.executable, "tuned.py") == 0
    [part] = record().captures[0].parts
    [note] = [note for note in part.profile.notes if note.startswith("autotuned")]
    assert note.startswith("autotuned double for (64, 'torch.float32'): BLOCK: 32, num_warps: 4")


def test_the_same_choice_of_several_ranks_is_one_note():
    lines = ["Triton autotuning for function f,", "with key as (8,),", "finished after 0.08s,",
             "best config selected: BLOCK: 32;"]  # fmt: skip
    output = "".join(f"[default{rank}]:{line}\n" for rank in (0, 1) for line in lines)
    assert tools.autotuned(output) == ["autotuned f for (8,): BLOCK: 32"]
    many = "".join(output.replace("(8,)", f"({n},)") for n in range(100))
    assert len(tools.autotuned(many)) < 100


def test_further_arguments_of_a_tool_come_last():
    assert capture("nsys", "--tool-args=--delay=3 --trace=cuda", "--", "true") == 0
    assert words_of("nsys").endswith(" --delay=3 --trace=cuda")


def test_the_sanitizer_runs_the_command_once_per_check(capfd):
    assert capture("sanitizer", "--", "sh", "-c", "echo again") == 0
    assert capfd.readouterr().err.count("again\n") == 4
    [part] = record().captures[0].parts
    assert part.profile.figures["findings"] == 0


def test_a_finding_of_the_sanitizer_is_a_failure(monkeypatch, capfd):
    monkeypatch.setenv("FAKE_TOOL", "racecheck")
    assert capture("sanitizer", "--", "true") == 1
    assert "racecheck: Invalid __global__ read" in capfd.readouterr().out
    assert capture("sanitizer", "--", "sh", "-c", "exit 4") == 4


def test_perf_samples_the_whole_command():
    assert capture("perf", "--", "true") == 0
    [part] = record().captures[0].parts
    assert part.profile.notes[0] == "61.20 % sum_of_squares"


# failures


@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_is_that_of_the_command(status, capfd):
    assert capture("nsys", "--", "sh", "-c", f"exit {status}") == status
    assert f"exit status {status} after" in capfd.readouterr().out
    assert record().captures[0].parts  # what was recorded until then


def test_a_command_that_a_signal_kills_has_its_figures_too():
    assert capture("nsys", "--", "sh", "-c", "kill -9 $$") == 128 + signal.SIGKILL
    assert record().captures[0].parts


def test_a_tool_that_cannot_work_does_not_stop_the_others(monkeypatch, capfd):
    monkeypatch.setenv("FAKE_TOOL", "denied ncu")
    assert capture("ncu,nsys", "--", "true") == 2
    first, second = record().captures
    assert "ERR_NVGPUCTRPERM" in first.error
    assert "NVreg_RestrictProfilingToAdminUsers=0" in first.error
    assert first.status is None
    assert second.parts
    out = capfd.readouterr().out
    assert "no figures: ncu cannot work here" in out
    assert "the command did not start" in out


def test_nsys_falls_back_where_gpu_metrics_are_not_permitted(monkeypatch, capfd):
    monkeypatch.setenv("FAKE_TOOL", "no metrics")
    assert capture("nsys:deep_dive", "--", "sh", "-c", "echo once") == 0
    assert capfd.readouterr().err.count("once\n") == 1
    [part] = record().captures[0].parts
    assert "without GPU metrics: not permitted here" in part.profile.notes


def test_a_command_that_a_preset_crashes_runs_with_fewer_options(fakes, monkeypatch, capfd):
    monkeypatch.setenv("FAKE_TOOL", "crashes")
    (fakes / "export.sqlite").rename(fakes / "whole.sqlite")
    Export().write(fakes / "nothing.sqlite")
    crash = "grep -q gpu.metrics artifacts/*/*/nsys.log && kill -SEGV $$; echo fine"
    assert capture("nsys:deep_dive", "--", "sh", "-c", crash) == 0
    [part] = record().captures[0].parts
    assert (
        "with fewer options of deep_dive: the command crashed (SIGSEGV) with all of them"
        in part.profile.notes
    )
    assert not any("not permitted here" in note for note in part.profile.notes)
    assert (
        "nsys: the command crashed (SIGSEGV) with these options; trying" in capfd.readouterr().err
    )


def test_a_command_that_crashes_in_any_case_is_told_so(fakes, capfd):
    (fakes / "export.sqlite").unlink()
    Export().write(fakes / "export.sqlite")
    crash = "echo run; kill -SEGV $$"
    assert capture("nsys:deep_dive", "--", "sh", "-c", crash) == 128 + signal.SIGSEGV
    error = record().captures[0].error
    assert error.startswith("the command crashed (SIGSEGV) under nsys, which recorded nothing: see")
    captured = capfd.readouterr()
    assert captured.err.count("run\n") == 3
    assert "exit status 139 (SIGSEGV) after" in captured.out


def test_a_command_without_kernels_is_a_sentence(monkeypatch):
    monkeypatch.setenv("FAKE_TOOL", "empty ncu")
    assert capture("ncu", "--", "true") == 2
    assert record().captures[0].error.startswith("ncu profiled no kernel: the command runs none")


def test_a_report_that_is_missing_names_the_log(monkeypatch):
    monkeypatch.setenv("FAKE_TOOL", "empty nsys")
    assert capture("nsys", "--", "sh", "-c", "echo an error: out of memory; exit 7") == 7
    error = record().captures[0].error
    assert "nsys captured nothing (an error: out of memory); see artifacts/" in error


def test_output_that_nobody_reads_does_not_end_the_command():
    words = ("sh", "-c", "echo a; sleep 0.2; echo b; sleep 0.2; echo c")
    argv = [sys.executable, "-m", "pytest_aiperf", "capture", "nsys", "--", *words]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stderr.close()
        assert b"written: " in process.stdout.read()
    assert record().captures[0].status == 0
    assert (folder() / "nsys.log").read_text().endswith("a\nb\nc\n")


def test_a_deadline_interrupts_the_command_and_keeps_what_there_is():
    started = time.monotonic()
    code = "import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('ended')"
    interruptible = "trap : INT; " + f'{sys.executable} -c "{code}"'
    assert capture("torch", "--deadline", "2", "--", "sh", "-c", interruptible) == command.EXPIRED
    assert time.monotonic() - started < PATIENCE_S
    assert "ended" in (folder() / "torch.log").read_text()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_the_command_and_write_the_record(signum):
    argv = [sys.executable, "-m", "pytest_aiperf", "capture", "nsys,ncu", "--", "sleep", "600"]
    running = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # the tests may be a background job, which ignores Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    patience = time.monotonic() + PATIENCE_S
    while not list(Path("artifacts").glob("*/*/nsys.log")):
        assert time.monotonic() < patience
        assert running.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    running.send_signal(signum)
    out, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == command.INTERRUPTED
    assert "nsys.log: interrupted after" in out
    assert [each.tool for each in record().captures] == ["nsys"]  # no further tool starts


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nsys"], "name what to profile: capture TOOL -- COMMAND"),
        (["--", "true"], "name what to profile"),
        (["nsys", "a.py::f", "--", "true"], "name what to profile"),
        (["nsys", "--"], "name what to profile"),
        (["nsys", "--", "no-such-program"], "no-such-program is not a program on PATH"),
        (["nope", "--", "true"], "unknown profiler 'nope': choose one of nsys, ncu"),
        (["nsys,nsys:deep_dive", "--", "true"], "names a tool twice"),
        (["nsys", "--launch-skip", "2", "--", "true"], "--launch-skip is for ncu, not for nsys"),
        (["nsys", "--metrics", "a", "a.py::f"], "--metrics is for ncu, not for nsys"),
        (["nsys", "--metrics", "a", "--", "true"], "--metrics is for ncu, not for nsys"),
        (["ncu", "--launch-count", "0", "--", "true"], "--launch-count one from 1 on"),
        (["nsys", "--kernel", "(", "--", "true"], "--kernel: '(' is not a regular expression"),
        (["memory", "--nvtx", "a", "--", "true"], "--nvtx and --kernel are for nsys, ncu and tor"),
        (["nsys", "--steps", "3:6", "--", "true"], "--steps is for torch, not for nsys"),
        (["torch", "--steps", "3:6", "a.py::f"], "--steps is for a command: capture torch -- pyt"),
        (["proton", "--", "true"], "proton profiles functions only"),
        (["nsys,ncu", "--tool-args=-x", "--", "true"], "--tool-args is for one tool"),
        (["nsys", "--calls", "3", "--", "true"], "--calls is for a function"),
        (["nsys", "a.py::f", "--kernel", "gemm"], "--kernel is for a command: capture nsys -- pyt"),
        (["nsys", "--kernel", "at::mm", "a.py::f"], "--kernel is for a command: capture nsys -- p"),
        (["--compare", "a", "b", "--", "true"], "--compare shows what was captured and runs"),
        (["nsys", "--read", "a"], "--read shows what was captured and runs nothing"),
        (["--read", "a", "--compare", "a", "b"], "--read shows one capture, --compare two"),
        (["--compare", "a", "b"], "a is neither a folder of a capture nor a profiler's file"),
    ],
)  # fmt: skip
def test_wrong_arguments_say_what_to_do(words, why, capfd):
    assert capture(*words) == 2
    assert why in capfd.readouterr().err
    assert not Path("artifacts").exists()


@pytest.mark.parametrize("words", [["--calls", "0"], ["--deadline", "-1"], ["--deadline", "nan"]])
def test_a_number_without_a_meaning_is_refused(words, capfd):
    with pytest.raises(SystemExit, match="2"):
        capture("torch", "a.py::f", *words)
    assert f"{words[1]} is not a " in capfd.readouterr().err


# PyTorch, recorded from inside


def trace_of(*words, env=(), options=("torch",)):
    """Run `capture torch` in a process: under pytest-cov and others, imports differ."""
    argv = [sys.executable, "-m", "pytest_aiperf", "capture", *options, "--", *words]
    done = subprocess.run(
        argv, env=os.environ | dict(env), capture_output=True, text=True, check=False
    )
    return done, record().captures[0]


@pytest.mark.parametrize("status", [0, 5])
def test_a_script_is_recorded_without_a_change(status):
    Path("phases.py").write_text(PHASES)
    done, found = trace_of(sys.executable, "phases.py", str(status))
    assert done.returncode == status
    assert "phases done" in done.stderr
    [part] = found.parts
    assert part.profile.figures["operators"] >= 3
    assert [row.name for row in part.ranges] == ["forward", "update"]
    assert all(row.seconds > 0 for row in part.ranges)
    assert part.profile.artifact.endswith(".pt.trace.json")  # as TensorBoard expects it


PRODUCT = """\
import torch
a, b = torch.ones(8, 4), torch.ones(4, 2)
a + a
with torch.profiler.record_function("forward"):
    for _ in range(3):
        a @ b
"""


@pytest.mark.parametrize("selected", [(), ("--nvtx", "forward")])
def test_a_script_has_a_table_of_all_operators(selected):
    Path("product.py").write_text(PRODUCT)
    options = ("torch:operators", *selected)
    done, found = trace_of(sys.executable, "product.py", options=options)
    assert done.returncode == 0, done.stderr
    [part] = found.parts
    [file] = Path("artifacts").glob("*/product/torch/*.operators.csv")
    assert f"all operators: {file}" in part.profile.notes
    with file.open(newline="") as table:
        rows = {row["operator"]: row for row in csv.DictReader(table)}
    product = rows["aten::mm"]
    assert (product["calls"], product["input shapes"]) == ("3", "[[8, 4], [4, 2]]")
    assert product["operations"] == str(3 * 2 * 8 * 4 * 2)
    assert ("aten::add" in rows) == (not selected)
    assert "forward" not in rows


TRAINS = """\
import torch
weight = torch.nn.Parameter(torch.ones(4))
first, second = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
for step in range(8):
    with torch.profiler.record_function(f"step {step}"):
        (weight * 2).sum().backward()
        first.step()
    second.step()
"""


@pytest.mark.parametrize(
    ("steps", "recorded"), [("3:6", [3, 4, 5]), ("0:2", [0, 1]), ("6:99", [6, 7])]
)
def test_only_some_steps_of_a_training_script_are_recorded(steps, recorded):
    Path("trains.py").write_text(TRAINS)
    done, found = trace_of(sys.executable, "trains.py", options=("torch", "--steps", steps))
    assert done.returncode == 0, done.stderr
    [part] = found.parts
    [file] = Path("artifacts").glob("*/trains/torch/*.json")
    events = json.loads(file.read_text())["traceEvents"]
    names = [each.get("name", "") for each in events]
    assert names.count("aten::ones_like") == len(recorded)  # the start of a backward pass
    assert f"step {recorded[-1] + 1}" not in names
    assert f"step {recorded[0] - 2}" not in names
    assert part.profile.figures["operators"] > 0


def test_a_training_that_ends_before_the_first_step_is_a_sentence():
    Path("trains.py").write_text(TRAINS)
    done, found = trace_of(sys.executable, "trains.py", options=("torch", "--steps", "20:21"))
    assert done.returncode == 2
    assert "no Python process of the command used PyTorch for more than 20 steps" in found.error


RECOMPILES = """\
import torch
double = torch.compile(lambda x: x + x, dynamic=False, backend="eager")
for size in range(3, 7):
    double(torch.ones(size))
"""


def test_recompilations_of_a_script_are_counted_and_explained():
    Path("recompiles.py").write_text(RECOMPILES)
    _, found = trace_of(sys.executable, "recompiles.py")
    [part] = found.parts
    assert (part.profile.figures["recompilations"], part.profile.figures["graph breaks"]) == (3, 0)
    assert not part.ranges  # torch.compile's own ranges are left out
    assert part.diagnosis.startswith("3 recompilations: TORCH_LOGS=recompiles names the guards")


def test_the_ranks_of_torchrun_are_recorded_one_by_one():
    Path("phases.py").write_text(PHASES)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done, found = trace_of(*launcher, "phases.py")
    assert done.returncode == 0, done.stderr
    assert [part.profile.arm for part in found.parts] == ["rank 0", "rank 1"]
    assert [len(part.ranges) for part in found.parts] == [2, 2]


def test_a_rank_without_a_readable_trace_is_named():
    trace = gzip.decompress((SAMPLES / "torch_host.json.gz").read_bytes())
    Path("0.pt.trace.json").write_bytes(trace)
    Path("1.pt.trace.json").write_bytes(trace[: len(trace) // 2])  # the disk was full
    [(name, file, reading)] = command._by_process(Path(), timeline.torch_trace)
    assert (name, file.name) == ("rank 0", "0.pt.trace.json")
    [note] = [note for note in reading.notes if "left out" in note]
    assert note.startswith("rank 1 is left out: 1.pt.trace.json is not a torch.profiler trace")


def test_two_nodes_are_captured_one_by_one():
    Path("phases.py").write_text(PHASES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = []
    for node in "01":
        Path(node).mkdir()
        torchrun = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2")
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=7")
        is_host = "--rdzv-conf=is_host=" + str(node == "0").lower()
        words = (*torchrun, *rendezvous, is_host, "--local-addr=127.0.0.1", "../phases.py")
        capture = ("-m", "pytest_aiperf", "capture", "torch", "--", sys.executable, *words)
        argv = [sys.executable, *capture]
        nodes.append(subprocess.Popen(argv, cwd=node, stdout=subprocess.PIPE, text=True))
    printed = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    names = []
    for node in "01":
        [file] = Path(node, "artifacts").glob("*/*/capture.json")
        names.append([part.profile.arm for part in command.load(file.parent).captures[0].parts])
    # the rendezvous, not the test, chooses which node comes first
    assert sorted(names) == [["rank 0", "rank 1"], ["rank 2", "rank 3"]]


def test_a_command_without_pytorch_is_a_sentence():
    done, found = trace_of("true")
    assert done.returncode == 2
    assert "no Python process of the command used PyTorch" in found.error


def test_what_a_command_says_of_its_gpu_is_no_refusal_of_the_recorder():
    _, found = trace_of("echo", "fp8 is not supported on this GPU")
    assert "no Python process of the command used PyTorch" in found.error


def test_a_script_may_look_for_pytorch_before_it_imports_it():
    looking = "import importlib.util\nassert importlib.util.find_spec('torch')\n"
    Path("phases.py").write_text(looking + PHASES)
    _, found = trace_of(sys.executable, "phases.py")
    assert [row.name for row in found.parts[0].ranges] == ["forward", "update"]


THREAD = """\
import threading
def work():
    import torch
    w = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([w])
    for _ in range(3):
        w.sum().backward()
        optimizer.step()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(("options", "count"), [((), 3), (("--steps", "2:9"), 1)])
def test_a_thread_that_uses_pytorch_first_is_recorded_until_it_ends(options, count):
    Path("thread.py").write_text(THREAD)
    done, found = trace_of(sys.executable, "thread.py", options=("torch", *options))
    assert done.returncode == 0  # a profiler that runs on would crash the process
    [row] = [row for row in found.parts[0].ranges if row.name == "Optimizer.step#SGD.step"]
    assert row.count == count


def test_an_error_of_the_script_keeps_its_trace():
    Path("phases.py").write_text(PHASES + "\n")
    Path("fails.py").write_text(PHASES.replace("sys.exit(", "raise ValueError("))
    done, found = trace_of(sys.executable, "fails.py")
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert found.parts[0].profile.figures["operators"] >= 3


def test_another_sitecustomize_still_runs(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = True\n")
    Path("phases.py").write_text("print('theirs', theirs)\n" + PHASES)
    done, found = trace_of(sys.executable, "phases.py", env={"PYTHONPATH": str(other)}.items())
    assert "theirs True" in done.stderr
    assert found.parts


def test_an_error_of_another_sitecustomize_is_shown_and_does_not_prevent_the_recording(
    tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text("import a_module_that_is_missing\n")
    Path("phases.py").write_text(PHASES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done, found = trace_of(sys.executable, "phases.py")
    assert done.stderr.count("No module named 'a_module_that_is_missing'") == 2  # both processes
    assert found.parts


def test_the_recorder_imports_nothing_that_a_foreign_interpreter_lacks():
    code = "import sys; sys.modules['pytest_aiperf'] = None; import runpy; runpy.run_path({!r})"
    subprocess.run([sys.executable, "-c", code.format(injected.__file__)], check=True)


def test_files_have_the_names_of_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert injected._file_name() == "3"
    monkeypatch.delenv("RANK")
    assert injected._file_name() == f"pid{os.getpid()}"


class FakeTorch:
    """Stands in for torch on a machine with a GPU, without one."""

    def __init__(self):
        self.initialised, self.initialising, self.stats, self.dumped = False, False, {}, []
        self.cuda = self
        self.memory = self

    def _lazy_init(self):
        if not self.initialised and not self.initialising:
            self.initialising = True
            self.cuda._lazy_init()  # as torch does when it reads the GPUs' properties
            self.initialised = True

    def is_initialized(self):
        return self.initialised

    def _record_memory_history(self, stacks):
        self.stacks = stacks

    def memory_stats(self):
        return self.stats

    def _dump_snapshot(self, file):
        self.dumped.append(file)


def test_recording_starts_once_and_with_cuda(monkeypatch):
    monkeypatch.setattr(injected, "has_gpu", lambda: True)
    torch, started = FakeTorch(), []
    injected._when_used(torch, lambda: started.append(torch.initialised))
    assert started == []
    torch.cuda._lazy_init()
    torch.cuda._lazy_init()
    assert started == [True]


@pytest.mark.parametrize(("visible", "gpu"), [("", False), ("-1", False), ("0", True)])
def test_hidden_gpus_are_no_gpus(monkeypatch, visible, gpu):
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert injected.has_gpu() is gpu


def test_the_allocator_of_a_process_is_recorded(monkeypatch):
    finish = []
    monkeypatch.setattr(injected.atexit, "register", finish.append)
    monkeypatch.setenv("RANK", "1")
    torch = FakeTorch()
    settings = {"folder": ".", "preset": "minimal"}
    injected._record_memory(settings, torch)
    assert finish == []  # without a GPU there is nothing to record
    torch._lazy_init()
    injected._record_memory(settings, torch)
    torch.stats = {
        "allocated_bytes.all.peak": 4096, "allocated_bytes.all.current": 0,
        "allocation.all.allocated": 3, "reserved_bytes.all.peak": 2**21,
        "inactive_split_bytes.all.current": 0,
    }  # fmt: skip
    [function] = finish
    function()
    assert torch.dumped == ["1.pickle"]
    figures = parsers.memory(Path("1.json")).figures
    assert figures["peak"] == (4096, "B")


def test_an_error_of_the_recorder_does_not_end_the_program(capsys):
    injected._guarded(lambda: 1 / 0)()
    assert "pytest-aiperf could not record process" in capsys.readouterr().err


# before and after


def profiled(arm="command", tool="nsys", busy=50e-6, kernels=("gemm(int)",), ranged=True):
    figures = {"kernels": float(len(kernels)), "busy": busy}
    profile = Profile(tool, arm, "a", figures, {"kernels": "", "busy": "s"}, tuple(kernels))
    row = RangeTime("forward", 0, 1, 1e-4, busy, 0.0, len(kernels), len(kernels))
    return Part(profile, (row,) if ranged else (), "a diagnosis")


def recorded(*parts, tool="nsys", error=""):
    captures = (ToolCapture(tool, "minimal", "log", 1.0, 0, parts, error),)
    return CommandRecord(("python", "train.py"), "2026", ("Fake H200",), captures)


def compared(before, after):
    return "\n".join(summary.text(summary.comparison(before, after)))


def test_two_captures_are_compared_figure_by_figure():
    after = profiled(busy=25e-6, kernels=("fused(int)",))
    lines = compared(recorded(profiled()), recorded(after)).splitlines()
    assert lines[0] == "nsys: command"
    table = [line.split() for line in lines]
    assert ["busy", "50.00", "µs", "25.00", "µs", "0.5x"] in table
    assert ["forward:", "GPU", "time", "50.00", "µs", "25.00", "µs", "0.5x"] in table
    assert ["kernels", "1", "1", "1x"] in table
    assert "  only before: gemm(int)" in lines
    assert "  only after: fused(int)" in lines


def test_ranks_are_paired_by_name_and_what_is_missing_is_named():
    text = compared(recorded(profiled("rank 0"), profiled("rank 1")), recorded(profiled("rank 0")))
    assert "nsys: rank 0" in text
    assert "nsys: rank 1\n  only before" in text
    assert "ncu: only before" in compared(recorded(tool="ncu"), recorded())
    assert "why not" in compared(recorded(profiled()), recorded(error="why not"))


def test_equally_many_processes_are_paired_whatever_their_names():
    before = recorded(profiled("GPU 0 (pid 7)"), profiled("GPU 0 (pid 8)", busy=1e-3))
    after = recorded(profiled("GPU 0 (pid 9)"), profiled("GPU 0 (pid 10)", busy=2e-3))
    text = compared(before, after)
    assert [line.split()[-1] for line in text.splitlines() if "  busy" in line] == ["1x", "2x"]
    assert "only" not in text


def test_captures_are_compared_on_the_command_line(capfd, fakes):
    assert capture("nsys", "--", "true") == 0
    before = folder()
    assert capture("--compare", str(before), str(before.parent), "-o", "change.md") == 0
    out = capfd.readouterr().out
    assert f"before: {before} (true)" in out
    assert "forward: GPU time" in out
    assert "| `kernels` | 2 | 2 | 1x |" in Path("change.md").read_text()


@pytest.mark.parametrize("name", ["export.sqlite", "ncu.ncu-rep"])
def test_files_of_profilers_are_compared_as_well(capfd, fakes, name):
    assert capture("--compare", str(fakes / name), str(fakes / name)) == 0
    assert "kernels" in capfd.readouterr().out


def test_a_capture_that_is_there_already_is_shown(capfd, fakes):
    assert capture("nsys", "--", "true") == 0
    shown = capfd.readouterr().out.partition("nsys (minimal)")[2].partition("written: ")[0]
    assert capture("--read", str(folder()), "-o", "read.md") == 0
    out = capfd.readouterr().out
    assert out.startswith(f"capture: {folder()} (true)\n")
    assert out.partition("nsys (minimal)")[2].partition("written: ")[0] == shown
    assert "| `kernels` | 2 |" in Path("read.md").read_text()
    assert capture("--read", str(fakes / "ncu.ncu-rep")) == 0
    assert "dram share" in capfd.readouterr().out


def test_a_record_survives_a_round_trip():
    before = recorded(profiled(), error="an error")
    Path("run").mkdir()
    file = command.save(before, Path("run"))
    assert command.load(file) == before
    assert json.loads(file.read_text())["command"] == ["python", "train.py"]
    file.write_text("{}")
    with pytest.raises(command.UsageError, match="not a record of `capture`"):
        command.load(Path("run"))


def test_markdown_cannot_be_broken_by_names():
    part = profiled(kernels=("f<a|b>(`x`)\x1b",))
    text = summary.markdown("t|`", summary.capture(recorded(part)))
    assert "\x1b" not in text
    assert "# `t\\|'`" in text
