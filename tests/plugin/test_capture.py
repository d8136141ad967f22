"""Each arm of a claim is captured; a tool that cannot work does not fail the claim."""

import csv
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aiperf.errors import CaptureFailed, ClaimNotMet, ToolMissing
from pytest_aiperf.machine import process_group
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.model import Evidence, EvidenceKind, Outcome, Profile, Work, prepared
from pytest_aiperf.profilers import capture as captures
from pytest_aiperf.profilers import parsers, target, tools
from pytest_aiperf.profilers.target import CaptureJob, CaptureReply
from pytest_aiperf.records import expectations
from pytest_aiperf.report import terminal
from pytest_aiperf.rules import evidence
from pytest_aiperf.schema import from_json
from tests.fake_gpu import FAKE_GPU, FakeDevice
from tests.plugin.claims import a_claim, doubling
from tests.plugin.conftest import PATIENCE_S
from tests.plugin.records import result

SAMPLES = Path(__file__).parent / "samples"
DURATION = "gpu__time_duration.sum"

TOOL = f"""\
#!{sys.executable}
# A profiler that runs what it is given and leaves a sample. $FAKE_TOOL selects its fault.
import gzip, os, pathlib, subprocess, sys
words, samples, mode = sys.argv[1:], pathlib.Path({str(SAMPLES)!r}), os.environ.get("FAKE_TOOL", "")
name = pathlib.Path(sys.argv[0]).name
if words == ["--version"]:
    print("Version " + ("2019.5" if mode == "old" else "2025.3"))
    sys.exit()
if words[0] == "export":
    [to] = [w.partition("=")[2] for w in words if w.startswith("--output=")]
    pathlib.Path(to).write_bytes((samples / "nsys.sqlite").read_bytes())
    sys.exit()
print("words:", *words)
if mode == "denied" or (mode == "no metrics" and any("gpu-metrics" in w for w in words)):
    print("==ERROR== ERR_NVGPUCTRPERM - no permission", flush=True)
    sys.exit(1)
rc = subprocess.call(words[words.index(sys.executable):])
def after(option):
    return words[words.index(option) + 1]
if mode == "empty":
    print("==WARNING== No kernels were profiled.")
elif name == "ncu":
    report = gzip.decompress((samples / "ncu.ncu-rep.gz").read_bytes())
    pathlib.Path(after("--export") + ".ncu-rep").write_bytes(report)
elif name == "nsys":
    [stem] = [w.partition("=")[2] for w in words if w.startswith("--output=")]
    pathlib.Path(stem + ".nsys-rep").write_text("a report")
else:
    record = "<record><kind>Invalid __global__ read</kind><level>Error</level></record>"
    found = record if mode == after("--tool") else ""
    text = f"<ComputeSanitizerOutput>{{found}}</ComputeSanitizerOutput>"
    pathlib.Path(after("--save")).write_text(text)
sys.exit(rc)
"""

CHILD = f"""\
import json, os, pathlib, sys
job = json.loads(os.environ[{target.VARIABLE!r}])
print("this is", job["arm"], "with", os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"))
if sys.argv[1:] == ["tuned"]:
    assert os.environ["TRITON_PRINT_AUTOTUNING"] == "1"
    print("Triton autotuning for function f,", "with key as (8,),", "finished after 0.08s,",
          "best config selected: BLOCK: 32;", sep="\\n", flush=True)
    sys.argv.pop()
if sys.argv[1:] == ["wait"]:
    import time
    waiting = pathlib.Path(job["scratch"], "waiting")
    waiting.touch()
    waits = pathlib.Path(job["stem"]).with_name("waits")
    waits.touch()
    while waits.exists():
        time.sleep(0.01)
    waiting.unlink()
    sys.argv.pop()
if sys.argv[1:] == ["hang"]:
    import subprocess, time
    sleeps = subprocess.Popen(["sleep", "1000"])
    pathlib.Path(job["stem"]).with_name("started").write_text(str(sleeps.pid))
    time.sleep(1000)
if sys.argv[1:] == ["full"]:
    pathlib.Path(job["scratch"], "reply").touch()
    sys.exit("No space left on device")
print("Error:", *sys.argv[1:])
reply = dict(error=" ".join(sys.argv[1:]), work=dict(read=50.0, written=50.0))
pathlib.Path(job["scratch"], "reply").write_text(json.dumps(reply))
"""

TURNS = """\
import json, os, pathlib, time
from pytest_aiperf.profilers import target
job = target.job_from(os.environ)
folder = pathlib.Path(job.stem).parent
pathlib.Path(f"{job.stem}.started").touch()
with target._turn(job), open(folder / "turns", "a") as turns:
    print("in", file=turns, flush=True)
    while len(list(folder.glob("*.started"))) < 3:
        time.sleep(0.05)
    print("out", file=turns, flush=True)
pathlib.Path(job.scratch, "reply").write_text("{}")
"""


@pytest.fixture(autouse=True)
def fakes(tmp_path, monkeypatch):
    """Put fake profilers before the real ones on PATH, and clear the caches of found programs."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name in ("ncu", "nsys", "compute-sanitizer"):
        (folder / name).write_text(TOOL)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    caches = (tools.require_tool, tools.find_program)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def make_request(tmp_path):
    """Return a function that requests the capture of a process which only writes its reply."""

    def make(spec, *words, deadline=30.0):
        tool, preset = tools.parse(spec)
        child = tmp_path / "child.py"
        child.write_text(CHILD)
        target = (sys.executable, str(child), *words)
        return captures.CaptureRequest(tool, preset, tmp_path / "artifacts", target, deadline)

    return make


def capture(make_request, arm="baseline", **kernels):
    return captures.capture(make_request, arm, captures.ExpectedKernels(**kernels))[0]


def run(make_request, **words):
    phases = []
    blank = result(verdict=None, speedup=None, timing=None)
    done, problem = captures.run(a_claim(**words), make_request, blank, ["copy_"], phases.append)
    return done, problem, phases


# tools and presets


def test_a_tool_and_its_preset_are_chosen_by_name():
    assert tools.parse("ncu") == (tools.TOOLS["ncu"], "minimal")
    assert tools.parse("nsys:deep_dive")[1] == "deep_dive"


@pytest.mark.parametrize("name", tools.TOOLS)
def test_every_command_names_its_artifact(name):
    tool = tools.TOOLS[name]
    assert "minimal" in tool.presets
    assert bool(tool.program) == bool(tool.command)
    if tool.command:
        assert "{stem}" in " ".join(tool.command)


def test_the_error_of_an_old_tool_tells_what_to_do(monkeypatch):
    monkeypatch.setenv("FAKE_TOOL", "old")
    with pytest.raises(ToolMissing, match=r"ncu 2019.5 is too old, 2022.3 is needed: install"):
        tools.require_tool("ncu")


def test_the_error_of_a_missing_tool_tells_what_to_do(monkeypatch):
    monkeypatch.setattr(tools, "find_program", lambda _: None)
    with pytest.raises(ToolMissing, match="nsys is not installed: install NVIDIA Nsight Systems"):
        tools.require_tool("nsys")


def test_a_program_is_looked_for_beside_ncu(tmp_path, monkeypatch):
    nsight = tmp_path / "toolkit" / "nsight-compute-2025.3"
    nsys = nsight / "host" / "target-linux-x64" / "nsys"
    for file in (tmp_path / "toolkit" / "bin" / "ncu", nsys):
        file.parent.mkdir(parents=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "toolkit" / "bin"))
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda _: None)
    assert tools.find_program("nsys") == str(nsys)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("nsys: error while loading shared libraries: libdw.so.1: cannot", "it needs libdw.so.1"),
        ("Profiling failed because a driver resource was unavailable.", "another tool holds"),
    ],
)
def test_a_refusal_becomes_one_sentence(output, why):
    with pytest.raises(ToolMissing, match=re.escape(why)):
        tools.raise_if_refused(tools.TOOLS["nsys"], output)
    tools.raise_if_refused(tools.TOOLS["nsys"], "all went well")


# the capture of one arm


def test_ncu_collects_the_metrics_of_figures_and_evidence(make_request, tmp_path):
    profile = capture(make_request("ncu"), counters=(("l1tex__x.sum", "copy"),), cache="warm")
    words = (tmp_path / "artifacts" / "baseline.log").read_text()
    for part in (
        "--clock-control none",
        "--nvtx --nvtx-include aiperf ",  # with a slash, autograd's threads would be left out
        f"--launch-count {captures.ncu.MAX_LAUNCHES}",
        "issue_stalled_long_scoreboard_per_issue_active.ratio",
        f"{DURATION},",
        "l1tex__x.sum ",
        "--cache-control none",
    ):
        assert part in words
    assert profile.figures["duration"] > 0
    assert (tmp_path / "artifacts" / "baseline.ncu-rep").stat().st_size
    assert Path(profile.artifact).samefile(tmp_path / "artifacts" / "baseline.ncu-rep")


@pytest.mark.parametrize(("arch", "asked"), [("sm90", False), ("sm100", True), ("sm103", True)])
def test_ncu_is_asked_for_the_tensor_pipes_of_its_gpu(
    make_request, tmp_path, monkeypatch, arch, asked
):
    monkeypatch.setattr(captures, "visible", lambda: [replace(FAKE_GPU, arch=arch), FAKE_GPU])
    capture(make_request("ncu"))
    words = (tmp_path / "artifacts" / "baseline.log").read_text()
    assert ("sm__pipe_tc_cycles_active" in words) is asked


def test_nsys_falls_back_where_gpu_metrics_are_not_permitted(make_request, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_TOOL", "no metrics")
    profile = capture(make_request("nsys:deep_dive"))
    assert profile.notes[-1] == "without GPU metrics: not permitted here"
    words = (tmp_path / "artifacts" / "baseline.log").read_text()
    assert "--python-backtrace=cuda" in words
    assert "--capture-range=cudaProfilerApi" in words


def test_a_tool_without_permission_does_not_fail_the_claim(make_request, monkeypatch):
    monkeypatch.setenv("FAKE_TOOL", "denied")
    with pytest.raises(ToolMissing, match=r"ncu cannot work here: .*ERR_NVGPUCTRPERM"):
        capture(make_request("ncu"))
    with pytest.raises(ToolMissing):
        run(make_request("ncu"))


def test_an_empty_capture_is_refused(make_request, monkeypatch):
    monkeypatch.setenv("FAKE_TOOL", "empty")
    with pytest.raises(CaptureFailed, match=r"captured nothing .*No kernels were profiled"):
        capture(make_request("nsys"))


def test_a_capture_of_other_kernels_is_refused(make_request):
    with pytest.raises(CaptureFailed, match="lacks the kernel transpose"):
        capture(make_request("ncu"), required=("transpose",))
    with pytest.raises(CaptureFailed, match="none of the kernels that the claim builds"):
        capture(make_request("ncu"), built=("transpose", "gather"))


def test_an_arm_that_only_copies_runs_no_kernel(make_request, monkeypatch):
    monkeypatch.setenv("FAKE_TOOL", "empty")
    profile = capture(make_request("ncu"))
    assert profile.figures == {"kernels": 0.0}
    assert "ran no kernel" in profile.notes[0]
    assert Path(profile.artifact).read_text()
    for kernels in ({"required": ("copy_vectors",)}, {"built": ("copy_",)}):
        with pytest.raises(CaptureFailed, match=r"ran no kernel; expected: copy_"):
            capture(make_request("ncu"), **kernels)


def test_an_error_of_the_target_is_reported(make_request):
    with pytest.raises(CaptureFailed, match="the baseline arm under ncu: out of memory"):
        capture(make_request("ncu", "out", "of", "memory"))


def test_an_error_of_the_target_is_no_refusal_of_the_tool(make_request):
    why = "fp8 is not supported on this GPU"
    with pytest.raises(CaptureFailed, match=rf"captured nothing of the baseline arm \({why}\)"):
        capture(make_request("torch", *why.split()))


def test_a_reply_that_no_disk_could_hold_is_the_end_of_the_process(make_request):
    with pytest.raises(CaptureFailed, match=r"the baseline arm under ncu: its process ended with"):
        capture(make_request("ncu", "full"))


def test_a_target_that_hangs_is_killed_with_its_children(make_request, tmp_path, monkeypatch):
    file = tmp_path / "artifacts" / "started"

    ticks = itertools.count()

    def monotonic():  # the deadline passes soon after the target has started its child
        return float(next(ticks)) if file.exists() and file.read_text() else 0.0

    monkeypatch.setattr(process_group, "time", SimpleNamespace(monotonic=monotonic))
    request = replace(make_request("ncu", "hang"), setting="--deadline")
    with pytest.raises(CaptureFailed, match=r"exceeded its deadline of 30 s \(--deadline\)"):
        capture(request)
    started = int(file.read_text())
    stat = Path(f"/proc/{started}/stat")
    patience = time.monotonic() + 60  # seconds that a killed process may take to end
    while alive := stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > patience:
            break
        time.sleep(0.05)
    assert not alive


def test_waiting_for_other_processes_does_not_count_towards_the_deadline(
    make_request, tmp_path, monkeypatch
):
    waits, looks = tmp_path / "artifacts" / "waits", 0

    def monotonic():  # 2,000 s pass while the target waits
        nonlocal looks
        looks += waits.exists()
        if looks == 3:
            waits.unlink(missing_ok=True)
        return 1000.0 * min(looks, 2)

    monkeypatch.setattr(process_group, "time", SimpleNamespace(monotonic=monotonic))
    assert capture(make_request("ncu", "wait")).figures["duration"] > 0
    assert looks == 3


def test_ids_of_claims_become_names_of_folders():
    assert captures.folder_name("ch07/copy[vector]") == "ch07.copy.vector"
    names = {
        captures.folder_name(f"ch07/copy[{p}]") for p in ("a/b", "a b", "a%b", "..", "x" * 300)
    }
    assert len(names) == 5
    assert all(re.fullmatch(r"[\w.-]{1,120}", name) for name in names)
    assert captures.folder_name("copy/vector") != captures.folder_name("copy[vector]")


# the captures of a claim


def test_each_arm_is_captured(make_request):
    done, problem, phases = run(make_request("nsys"), library=doubling(50))
    assert problem is None
    assert phases == ["nsys: baseline", "nsys: optimized", "nsys: library"]
    assert [p.arm for p in done.profiles] == ["baseline", "optimized", "library"]
    assert (done.outcome, done.verdict, done.work) == (
        Outcome.PASSED,
        None,
        Work(read=50, written=50),
    )
    assert "under a profiler" in expectations.acceptable(done, expectations.Expectation())


def test_what_triton_chose_for_an_arm_is_a_note(make_request):
    assert "autotuned f for (8,): BLOCK: 32" in capture(make_request("nsys", "tuned")).notes


def test_the_arms_start_together_under_ncu_but_hold_inputs_in_turn(make_request, tmp_path):
    """Each arm waits, in its turn, until all arms have started."""
    request = make_request("ncu")
    Path(request.target[1]).write_text(TURNS)
    done, problem, _ = run(request, library=doubling(50))
    assert problem is None, problem
    assert [p.arm for p in done.profiles] == ["baseline", "optimized", "library"]
    turns = (tmp_path / "artifacts" / "turns").read_text().split()
    assert turns == ["in", "out"] * 3


def test_a_call_of_many_kernels_is_profiled_in_part(make_request, tmp_path, monkeypatch):
    # the sample has five kernels
    monkeypatch.setattr(captures.ncu, "MAX_LAUNCHES", 5)
    share = evidence.counter(DURATION, "transpose", per="baseline", max=0.5)
    done, problem, _ = run(make_request("ncu"), evidence=[share])
    assert problem is None
    assert "--launch-count" in (tmp_path / "artifacts" / "baseline.log").read_text()
    assert [p.notes for p in done.profiles] == [(captures.ncu.CUT,)] * 2
    assert [(f.value, f.held) for f in done.evidence] == [(None, None)]
    assert captures.ncu.CUT in done.evidence[0].where
    assert done.diagnosis == {}
    assert captures.ncu.CUT not in capture(make_request("ncu:deep_dive")).notes


def test_counters_are_held_to_the_evidence(make_request):
    same = evidence.counter(DURATION, "copy_vectors", per="baseline", max=1.01)
    less = evidence.counter(DURATION, per="baseline", max=0.5)
    done, problem, _ = run(make_request("ncu"), evidence=[less])
    assert isinstance(problem, ClaimNotMet)
    assert done.outcome is Outcome.FAILED
    assert "the claim states at most 0.5" in done.message
    assert [(f.value, f.held) for f in done.evidence] == [(1.0, False)]
    assert [(f.baseline_value, f.baseline_held) for f in done.evidence] == [(1.0, False)]

    done, problem, _ = run(
        make_request("ncu"), evidence=[same, Evidence(EvidenceKind.SPILLS, max=0)]
    )
    assert problem is None
    assert [f.value for f in done.evidence] == [1.0, None]


def test_a_counter_that_ncu_does_not_give_is_no_proof(make_request):
    done, problem, _ = run(make_request("ncu"), evidence=[evidence.counter("no__such.sum", min=1)])
    assert isinstance(problem, CaptureFailed)
    assert (done.outcome, "has no no__such.sum" in done.message) == (Outcome.ERROR, True)


def test_the_kernel_that_evidence_names_must_run_in_the_optimized_arm(make_request):
    piece = evidence.counter(DURATION, kernel="transpose", min=1)
    _, problem, _ = run(make_request("nsys"), evidence=[piece])
    assert "lacks the kernel transpose: the optimized arm" in str(problem)


def test_evidence_in_compiled_code_may_name_a_kernel_of_another_rung(make_request):
    piece = evidence.opcode("BAR", kernel="sum_tree", min=9)
    _, problem, _ = run(make_request("nsys"), evidence=[piece])
    assert problem is None


@pytest.mark.parametrize("check", ["memcheck", "initcheck"])
def test_a_finding_of_the_sanitizer_fails_the_claim(make_request, monkeypatch, check, tmp_path):
    monkeypatch.setenv("FAKE_TOOL", check)
    done, problem, _ = run(make_request("sanitizer"))
    assert isinstance(problem, ClaimNotMet)
    assert done.outcome is Outcome.FAILED
    assert re.match(r"baseline: 1 findings .*first: \w+: Invalid __global__ read", done.message)
    assert "with 1" in (tmp_path / "artifacts/baseline.sanitizer" / f"{check}.log").read_text()


def test_a_claim_without_findings_passes(make_request):
    done, problem, _ = run(make_request("sanitizer"))
    assert (done.outcome, problem) == (Outcome.PASSED, None)
    assert done.profiles[0].figures["findings"] == 0


def test_an_arm_that_fails_because_of_a_finding_reports_the_finding(make_request, monkeypatch):
    monkeypatch.setenv("FAKE_TOOL", "memcheck")
    make_request = make_request("sanitizer", "illegal", "access")
    make_request = replace(make_request, tool=replace(make_request.tool, steps={"memcheck": ()}))
    assert "first: memcheck" in run(make_request)[0].message


# the profiled process


def perform(tmp_path, tool, make=None, calls=1, preset="minimal", **claim):
    job = CaptureJob(
        tool, preset, "optimized", calls, 7, str(tmp_path / "optimized"), str(tmp_path)
    )
    if make:
        target.perform(job, FakeDevice(), GpuLock([], tmp_path / "locks"), make)
    else:
        target.perform_arm(job, a_claim(**claim), FakeDevice(), GpuLock([], tmp_path / "locks"))
    return from_json(CaptureReply, json.loads((tmp_path / "reply").read_text()))


def test_an_arm_is_warmed_up_and_called_at_full_size(tmp_path):
    sizes = []
    answer = perform(
        tmp_path,
        "ncu",
        calls=2,
        optimized=prepared(lambda x: lambda y: sizes.append(y.size)),
        work=lambda x: Work(read=x.nbytes / 2, written=x.nbytes / 2),
    )
    assert sizes == [64] * (target.WARM_UP_CALLS + 2)
    assert (answer.work, answer.error) == (Work(read=256, written=256), "")


def test_a_wait_is_visible_to_the_parent(tmp_path):
    job = CaptureJob("ncu", "minimal", "optimized", 1, 7, "", str(tmp_path))
    send, waiting = target.sender(job), tmp_path / target.WAITING
    for kind, visible in (
        ("working", False),
        ("waiting", True),
        ("step", True),
        ("working", False),
    ):
        send(kind, phase="a wait")
        assert waiting.exists() is visible


def test_a_checker_sees_every_call(tmp_path):
    calls = []
    perform(tmp_path, "sanitizer", lambda: (lambda: calls.append(1), None))
    assert len(calls) == 1


def test_an_error_is_in_the_reply(tmp_path):
    with pytest.raises(ZeroDivisionError):
        perform(tmp_path, "ncu", lambda: (lambda: 1 / 0, None))
    assert "ZeroDivisionError: division by zero" in (tmp_path / "reply").read_text()


def test_a_torch_trace_holds_the_calls_of_the_range(tmp_path):
    torch = pytest.importorskip("torch")
    x = torch.ones(8)
    perform(tmp_path, "torch", lambda: (lambda: torch.add(x, x), None), calls=3)
    profile = parsers.read("torch", tmp_path / "optimized.pt.trace.json", "optimized")
    assert profile.figures["operators"] == 3
    assert profile.figures["graph breaks"] == 0


def operators(tmp_path, preset):
    torch = pytest.importorskip("torch")
    a, b = torch.ones(8, 4), torch.ones(4, 2)

    def call():
        torch.relu(a @ b)
        a @ b

    perform(tmp_path, "torch", lambda: (call, None), calls=3, preset=preset)
    with (tmp_path / "optimized.operators.csv").open(newline="") as file:
        return {row["operator"]: row for row in csv.DictReader(file)}


def test_all_operators_of_the_range_are_in_a_table(tmp_path):
    rows = operators(tmp_path, "operators")
    product = rows["aten::mm"]
    assert (product["calls"], product["input shapes"]) == ("6", "[[8, 4], [4, 2]]")
    assert product["operations"] == str(6 * 2 * 8 * 4 * 2)
    assert float(product["host total us"]) >= float(product["host self us"]) > 0
    assert int(product["host self bytes"]) == 6 * 8 * 2 * 4
    assert rows["aten::relu"]["calls"] == "3"
    assert target.RANGE not in rows
    # neither the step nor what runs before the range
    assert all("::" in name for name in rows), list(rows)


def test_the_cheap_preset_lists_operators_without_their_shapes(tmp_path):
    product = operators(tmp_path, "minimal")["aten::mm"]
    assert (product["calls"], product["input shapes"]) == ("6", "")


STACKS = """\
python \n\t    7f12 inner(int; int)
\t    7f00 outer
\t    6000 main

python
\t    7f13 inner(int; int)
\t    7f01 outer
\t    6000 main

pt_main_thread
\tffffffff8162dcb7 [unknown]

"""


def test_samples_are_folded_into_stacks_from_the_root_on():
    folded = "pt_main_thread;[unknown] 1\npython;main;outer;inner(int: int) 2\n"
    assert tools.fold(STACKS.splitlines()) == folded
    assert tools.fold([]) == ""


def test_samples_need_not_fit_into_memory(tmp_path):
    perf = tmp_path / "perf"
    perf.write_text(f"#!{sys.executable}\nprint({STACKS!r} * 40_000)\n")  # 4 MB
    perf.chmod(0o755)
    tracemalloc.start()
    try:
        tools.write_reports(tools.TOOLS["perf"], str(perf), tmp_path / "arm")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "python;main;outer;inner(int: int) 80000\n" in (tmp_path / "arm.folded").read_text()
    assert peak < 1 << 20


def test_a_perf_capture_has_stacks_for_a_flame_graph(make_request, tmp_path):
    perf = tmp_path / "fakes" / "perf"
    perf.write_text(f"""#!/bin/sh
case "$1" in
    --version) echo perf version 6.1;;
    record) while [ "$1" != {sys.executable} ]; do shift; done; exec "$@";;
    report) echo '    61.20%  python  python  [.] spin';;
    script) printf '%s' '{STACKS}';;
esac
""")
    perf.chmod(0o755)
    profile = capture(make_request("perf"))
    stacks = tmp_path / "artifacts" / "baseline.folded"
    assert stacks.read_text() == tools.fold(STACKS.splitlines())
    assert profile.notes == (
        "61.20 % spin", f"stacks for a flame graph: {os.path.relpath(stacks)}"
    )  # fmt: skip


def test_perf_samples_between_enable_and_disable_only(tmp_path, monkeypatch):
    for name in ("control", "ack"):
        os.mkfifo(tmp_path / name)
    commands = []

    def perf():
        with (
            os.fdopen(os.open(tmp_path / "control", os.O_RDWR)) as control,
            os.fdopen(os.open(tmp_path / "ack", os.O_RDWR), "w") as answered,
        ):
            for _ in range(2):
                commands.append((control.readline(), len(calls)))
                print("ack", file=answered, flush=True)

    calls = []
    call_s = target.SAMPLING_S / 4  # the fake clock advances with each call
    monkeypatch.setattr(target, "time", SimpleNamespace(monotonic=lambda: call_s * len(calls)))
    thread = threading.Thread(target=perf, daemon=True)
    thread.start()
    perform(tmp_path, "perf", lambda: (lambda: calls.append(None), None))
    thread.join(60)
    assert commands == [("enable\n", target.WARM_UP_CALLS), ("disable\n", len(calls))]
    assert len(calls) == target.WARM_UP_CALLS + 4


# the report of captures


def test_figures_of_both_arms_are_shown_with_their_ratio():
    def arm(name, seconds, rate):
        return Profile(
            "ncu",
            name,
            f"artifacts/{name}.ncu-rep",
            {"duration": seconds, "l2 hit rate": rate, "registers": 16.0},
            {"duration": "s", "l2 hit rate": "share", "registers": ""},
            notes=("a note",),
        )

    lines = terminal.profile(
        "ch07/copy", [arm("baseline", 2e-6, 0.5), arm("optimized", 1e-6, 0.75)]
    )
    text = "\n".join(re.sub(" +", " ", line) for line in lines)
    assert text.splitlines()[:5] == [
        "ch07/copy",
        "ncu baseline optimized ratio",
        " duration 2.000 µs 1.000 µs 0.5x",
        " l2 hit rate 50.0% 75.0% 1.5x",
        " registers 16 16 1x",
    ]
    assert "optimized: artifacts/optimized.ncu-rep" in text
    assert "baseline: a note" in text


# whole pytest runs


def command(*words):
    argv = [sys.executable, "-m", "pytest_aiperf", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


CLAIM = """
from pytest_aiperf import evidence

def test_it(compare):
    compare(**usual, evidence=[evidence.counter("gpu__time_duration.sum", min=1)])
"""


def test_files_of_a_profiled_run_go_to_the_folder_of_the_setting(project):
    project.tests(CLAIM)
    project.run("--profile=ncu", "-oaiperf_artifacts=kept/here").assert_outcomes(passed=1)
    assert not (project.path / "artifacts").exists()
    for arm in project.results()["ch07/it"]["profiles"]:
        assert arm["artifact"].startswith("kept/here/")
        assert (project.path / arm["artifact"]).stat().st_size


def test_a_profiled_run_shows_figures_and_writes_no_expectation(project):
    project.tests(CLAIM)
    done = project.run("--profile=ncu")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(
        [
            "*capturing with ncu:minimal on Fake H200*",
            "1 claim: 1 PASSED",
            "ch07/it",
            "ncu * baseline * optimized * ratio",
            "  duration * µs * µs * 1x",
            "  optimized: artifacts/*/ch07.it/optimized.ncu-rep",
            "  optimized: latency-bound: no unit is busy; warps wait for device memory: *",
        ]
    )
    record = project.results()["ch07/it"]
    assert [p["arm"] for p in record["profiles"]] == ["baseline", "optimized"]
    assert record["evidence"][0]["value"] > 1
    diagnosis = "latency-bound: no unit is busy; warps wait for device memory: *"
    assert fnmatch(record["diagnosis"]["optimized"], diagnosis)
    assert (record["timing"], record["speedup"]) == (None, None)
    for arm in record["profiles"]:
        assert (project.path / arm["artifact"]).stat().st_size
    log = next(project.path.glob("artifacts/*/ch07.it/optimized.log")).read_text()
    assert "-m pytest" in log
    accepted = command("accept", ".aiperf/latest/results.json")
    assert accepted.returncode == 1
    assert "it was captured under a profiler" in accepted.stdout
    assert not (project.path / "expectations.yaml").exists()
    assert not project.processes()


def test_counters_and_known_ceilings_say_what_binds(monkeypatch):
    figures = {"duration": 1e-3, "dram share": 0.91, "dram bytes": 4e9}
    profiles = {
        "baseline": Profile("ncu", "baseline", "", figures),
        "optimized": Profile("ncu", "optimized", "", {"kernels": 0.0}),  # it only copies
    }
    answer = CaptureReply(gpu=FAKE_GPU, work=Work(read=2.5e08, written=2.5e08))
    monkeypatch.setattr(captures.ceilings, "cached", lambda gpu: {"copy": 4.28e12})
    diagnosis = captures._diagnosis(profiles, answer, "cold")
    assert list(diagnosis) == ["baseline"]
    assert "busy with 8.0 times the bytes that work= counts" in diagnosis["baseline"]


def test_a_profiled_process_may_wait_for_the_gpu_longer_than_its_deadline(project, monkeypatch):
    """The test holds the GPU until the clock of two waiting arms has jumped beyond the deadline."""
    project.tests("def test_it(compare): compare(**usual)")
    project.write(
        "conftest.py",
        "import threading, time\n"
        "from pathlib import Path\n"
        "from types import SimpleNamespace\n"
        "from pytest_aiperf.machine import process_group\n"
        "def monotonic():\n"
        "    late = Path('late').exists()\n"
        "    if late:\n"
        "        seen = Path(f'seen-{threading.get_ident()}')\n"
        "        (seen.with_name(f'{seen}-twice') if seen.exists() else seen).touch()\n"
        "    return time.monotonic() + 1000 * late\n"
        "process_group.time = SimpleNamespace(monotonic=monotonic)\n",
    )
    scratch = project.path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    patience = time.monotonic() + PATIENCE_S
    with GpuLock([FAKE_GPU.uuid], project.path / "locks").exclusive_gpu():
        running = project.start("--profile=ncu", "--gpu", "-oaiperf_deadline=500")
        while len(list(scratch.glob(f"*/{target.WAITING}"))) < 2:
            assert time.monotonic() < patience
            time.sleep(0.02)
        (project.path / "late").touch()
        while len(list(project.path.glob("seen-*-twice"))) < 2:
            assert time.monotonic() < patience
            assert running.poll() is None
            time.sleep(0.02)
    assert running.wait(PATIENCE_S) == 0, (project.path / "out").read_text()
    assert project.results()["ch07/it"]["outcome"] == "PASSED"


def test_a_profiled_process_has_its_gpu_from_its_inputs_on_and_is_never_paused(project):
    project.tests(
        "import time\n"
        "from pathlib import Path\n"
        "def inputs(bench):\n"
        "    Path('preparing').touch()\n"
        "    while not Path('go').exists(): time.sleep(0.01)\n"
        "    return vectors(bench)\n"
        "def test_it(compare): compare(**usual | {'inputs': inputs})"
    )
    running = project.start("--profile=ncu", "--gpu", "-oaiperf_deadline=500")
    patience = time.monotonic() + PATIENCE_S
    while not (project.path / "preparing").exists():
        assert time.monotonic() < patience
        assert running.poll() is None, (project.path / "out").read_text()
        time.sleep(0.02)

    def refuse(_):
        raise BlockingIOError

    locks = project.path / "locks"
    with pytest.raises(BlockingIOError), GpuLock([FAKE_GPU.uuid], locks, refuse).shared():
        pass
    assert not list(locks.glob("*.preparing/*"))
    (project.path / "go").touch()
    assert running.wait(PATIENCE_S) == 0, (project.path / "out").read_text()
    assert project.results()["ch07/it"]["outcome"] == "PASSED"


@pytest.mark.parametrize("mode", ["old", "denied"])
def test_a_tool_that_cannot_work_is_a_skip(project, monkeypatch, mode):
    monkeypatch.setenv("FAKE_TOOL", mode)
    project.tests("def test_it(compare): compare(**usual)")
    done = project.run("--profile=ncu", "-rs")
    done.assert_outcomes(skipped=1)
    why = {"old": "too old", "denied": "ERR_NVGPUCTRPERM"}[mode]
    done.stdout.fnmatch_lines([f"SKIPPED * *{why}*"])
    assert why in project.results()["ch07/it"]["message"]


def test_host_claims_are_for_tools_that_see_the_host(project):
    project.tests("@pytest.mark.host\ndef test_it(compare): compare(**usual)")
    done = project.run("--profile=nsys", "-rs")
    done.assert_outcomes(skipped=1)
    done.stdout.fnmatch_lines(["*a host claim: nsys profiles the GPU, try perf"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--profile=ncu", "--update-expectations"], "*measures no times that could be accepted*"),
        (["--profile=nope"], "*unknown profiler 'nope': choose one of nsys, ncu, torch*"),
        (["--profile=ncu:deep"], "*no preset 'deep': choose one of minimal, deep_dive, roofline*"),
        (["--profile=ncu", "--profile-calls=0"], "*--profile-calls: '0' is not a whole number*"),
    ],
)
def test_invalid_profile_options_are_usage_errors(project, words, why):
    project.tests("def test_it(compare): compare(**usual)")
    done = project.run(*words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([why])


def test_profile_gives_way_to_pytest_profiling(project, monkeypatch):
    project.tests("def test_it(compare): compare(**usual)")
    project.write(
        "site/profiling.py",
        "def pytest_addoption(parser):\n"
        "    parser.getgroup('Profiling').addoption('--profile', action='store_true')\n",
    )
    project.write("site/p-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: p\nVersion: 1\n")
    project.write("site/p-1.dist-info/entry_points.txt", "[pytest11]\nprofiling = profiling\n")
    path = f"{project.path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    done = project.run("--profile=ncu")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*owns --profile: disable it with -p no:profiling*"])
    assert project.run("--profile", "--collect-only").ret == 0
    done = project.run("--aiperf-profile=ncu", "--collect-only")
    done.stdout.fnmatch_lines(["*capturing with ncu:minimal*"])


def test_a_test_captures_callables_of_its_own(project):
    project.tests(
        "def test_it(capture):\n"
        "    first = capture(slow, np.ones(3))\n"
        "    assert first.figures['duration'] > 0\n"
        "    second = capture(fast, np.ones(3), tool='nsys')\n"
        "    assert (second.tool, second.figures['kernels']) == ('nsys', 5)\n"
    )
    project.run("--gpu").assert_outcomes(passed=1)
    left = sorted(p.name for p in project.path.glob("artifacts/*/ch07.it/*.*"))
    assert left == [
        "call-0.log", "call-0.ncu-rep", "call-1.log", "call-1.nsys-rep", "call-1.sqlite",
    ]  # fmt: skip
    project.run().assert_outcomes(skipped=1)


def test_a_function_is_captured_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_AIPERF_LOCKS", str(tmp_path / "locks"))
    Path("mine.py").write_text("def told():\n    print('at work')\n")
    done = command("capture", "ncu", "mine.py::told")
    assert done.returncode == 0, done.stderr
    assert re.search(r"duration +\d", done.stdout)
    [log] = tmp_path.glob("artifacts/*/told/call.log")
    assert log.read_text().count("at work") == target.WARM_UP_CALLS + 1
    done = command("capture", "memory,nsys", "mine.py::told")
    assert done.returncode == 2
    assert re.search(r"gap share +\d", done.stdout)  # one tool's error leaves the others' figures
    assert "memory captured nothing of the call (it records only GPU memory, and " in done.stderr
    done = command("capture", "ncu", "mine.py::nothing")
    assert (done.returncode, "has no function 'nothing'" in done.stderr) == (2, True)
    done = command("capture", "ncu", "gone.py::busy")
    assert (done.returncode, "gone.py does not exist" in done.stderr) == (2, True)
