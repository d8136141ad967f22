"""`doctor` checks the machine and names remedies; `clean` removes this plugin's folders only."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from pytest_aiperf.build import sass
from pytest_aiperf.cli import main
from pytest_aiperf.doctor import bundle, clean, doctor
from pytest_aiperf.doctor.doctor import State, checks
from pytest_aiperf.errors import BuildError, ToolMissing, UsageError
from pytest_aiperf.machine.cache_folder import create_tagged
from pytest_aiperf.model import Gpu
from pytest_aiperf.profilers.capture import run_folder
from pytest_aiperf.records.journal import open_run

UUID = "GPU-0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f"
ONE = Gpu("NVIDIA H200", "h200", UUID, "sm90", 132, 60 << 20, 150 << 30, "580.159")
OTHER = Gpu("NVIDIA H200", "h200", UUID[:-1] + "0", "sm90", 132, 60 << 20, 150 << 30, "580.159")
BOARD = ["00000000:19:00.0", "P0", "1980", "1980", "700.00", "700.00", "Enabled", "Default"]
BOARD += ["Disabled", "0x0000000000000004", "1024", "147456"]
PCI = "/sys/bus/pci/devices/0000:19:00.0"


TOPOLOGY = """\
\t\x1b[4mGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPIX\t0-7,16\t0\t\tN/A
NIC0\tPIX\t X \ts3cret

Legend:

  X    = Self

NIC Legend:

  NIC0: mlx5_of_someone
"""


class Machine(doctor.Host):
    """A healthy machine with one H200; each test changes a few facts about it."""

    def __init__(self, **changes):
        self.environ = {"HOME": "/home/someone"}
        self.has = [ONE]
        self.board = dict(zip(doctor._BOARD, BOARD, strict=True))
        self.cuda = 13000
        self.processes = ""
        self.links = "\t Link 0: 26.5 GB/s\n" * 18 * 2
        self.topology = TOPOLOGY
        self.torch_test = {
            "built": "13.0", "cuda": True, "peers": [True, True], "nccl": "2.28.3",
            "archs": ["sm_90"], "right": True,
        }  # fmt: skip
        self.files = {
            doctor.DRIVER_PARAMETERS: "RmProfilingAdminOnly: 0\n",
            doctor.PERF_PARANOID: "2\n",
            doctor.GOVERNOR: "performance\n",
            doctor.HUGE_PAGES: "always [madvise] never\n",
            doctor.LIMITS: "Max locked memory         unlimited            unlimited    bytes\n",
            f"{PCI}/numa_node": "0\n",
            f"{PCI}/local_cpulist": "0-7,16\n",
        }
        self.packages = {
            "torch": "2.11.0", "triton": "3.6.0", "numpy": "2.3.5", "cupy-cuda13x": "14.0"
        }  # fmt: skip
        self.missing = {}
        self.compiler = self.disassembler = self.locked = self.gpu_error = None
        self.compiled = "Cuda compilation tools, release 13.0, V13.0.48"
        self.space = 100 << 30
        self.collective = ""
        self.root = False
        self.device = True
        self.__dict__ |= changes

    def gpus(self):
        if self.gpu_error:
            raise self.gpu_error
        return self.has

    def absence(self):
        return "the NVIDIA driver does not answer"

    def has_device(self):
        return self.device

    def driver_cuda(self):
        return self.cuda

    def run(self, *command, folder=None):
        line = " ".join(command)
        if "--query-gpu" in line:
            return "".join(f"{g.uuid}, {', '.join(self.board.values())}\n" for g in self.has)
        if "--query-compute-apps" in line:
            return self.processes
        if "nvlink" in line:
            return self.links
        if "topo" in line:
            return self.topology
        if "capture" in line:
            return f"captured in {folder}\n"
        return None

    def torch(self):
        return self.torch_test

    def read(self, path):
        return self.files.get(path, "")

    def version(self, package):
        return self.packages.get(package, "")

    def tool(self, name):
        if name in self.missing:
            raise ToolMissing(self.missing[name])
        return f"/usr/bin/{name}"

    def nvcc(self):
        if not self.compiled:
            raise BuildError("no nvcc: install one")
        return "/usr/bin/nvcc", self.compiled

    def compile(self, arch, folder):
        if self.compiler:
            raise BuildError(self.compiler)

    def disassemble(self, built):
        if self.disassembler:
            raise BuildError(self.disassembler)

    def cores(self):
        return {0, 1}

    def is_privileged(self):
        return self.root

    def free_bytes(self, folder):
        return self.space

    def all_reduce(self, ranks):
        return self.collective

    def lock_folder(self):
        if self.locked:
            raise UsageError(self.locked)
        return "/tmp/locks"


def board(**changes):
    return {"board": Machine().board | changes}


def torch(**changes):
    return {"torch_test": Machine().torch_test | changes}


def run_checks(**changes):
    return {check.name: check for check in checks(Machine(**changes))}


def test_a_healthy_machine_is_ok():
    lines = run_checks()
    assert {check.state for check in lines.values()} == {State.OK}
    assert lines["GPU 0"].found == "NVIDIA H200 (h200, sm90, 132 SMs, 150 GiB)"
    assert lines["features 0"].found == "fp8, tma, clusters, dsmem, pdl, wgmma; not tcgen05, fp4"
    assert lines["driver"].found == "580.159, CUDA up to 13.0"
    assert lines["memory 0"].found == "1.0 of 144.0 GiB in use"
    assert str(lines["clocks 0"]) == "OK      clocks 0          1980 of 1980 MHz, P0"
    assert "P2P" not in lines


def test_two_gpus_have_links():
    lines = run_checks(has=[ONE, OTHER])
    assert lines["NVLink"].found == "18 links per GPU"
    assert lines["P2P"].found == "between all 2 GPUs"


def test_without_a_gpu_there_are_fewer_lines():
    lines = run_checks(has=[], device=False, **torch(cuda=False, built=""))
    assert lines["GPU"].state == State.ADVICE
    assert "pytest --cpu measures here" in lines["GPU"].todo
    assert {"clocks 0", "driver", "NCCL", "GPU counters", "locked memory"}.isdisjoint(lines)
    assert {"profile torch", "profile perf", "profile ncu"} <= set(lines)
    assert "profiles only GPUs" in lines["profile ncu"].found
    assert "profiles only GPUs" not in lines["profile torch"].found
    assert not [check for check in lines.values() if check.state == State.BROKEN]
    missing = {"ncu": "ncu is not installed: install it"}
    lines = run_checks(has=[], device=False, missing=missing, **torch(cuda=False, built=""))
    assert lines["profile ncu"].found == "not needed, profiles only GPUs"
    assert not lines["profile ncu"].detail  # nothing is to be installed


SICK = {
    "GPU": ({"has": []}, "can be used", State.BROKEN),
    "GPU ": ({"gpu_error": UsageError("CUDA_VISIBLE_DEVICES=7: no")}, "VISIBLE", State.BROKEN),
    "clocks 0": (board(**{"clocks_event_reasons.active": "0x40"}), "cooling", State.ADVICE),
    "power 0": (board(persistence_mode="Disabled"), "nvidia-smi -pm 1", State.ADVICE),
    "power 0 ": (board(**{"power.limit": "500.00"}), "-pl 700.00", State.ADVICE),
    "mode 0": (board(**{"mig.mode.current": "Enabled"}), "-mig 0", State.ADVICE),
    "mode 0 ": (board(compute_mode="Prohibited"), "-c DEFAULT", State.BROKEN),
    "mode 0  ": (board(compute_mode="Exclusive_Process"), "-c DEFAULT", State.ADVICE),
    "memory 0": (board(**{"memory.used": "20480"}), "20.0 of 144.0 GiB in use", State.ADVICE),
    "CPU governor": ({"files": {doctor.GOVERNOR: "powersave"}}, "cpupower", State.ADVICE),
    "huge pages": (
        {"files": {doctor.HUGE_PAGES: "always madvise [never]"}}, "echo madvise", State.ADVICE
    ),
    "locked memory": (
        {"files": {doctor.LIMITS: "Max locked memory  8388608  8388608  bytes"}},
        "8 MiB per process: ulimit -l unlimited",
        State.ADVICE,
    ),
    "NUMA 0": (
        {"files": {f"{PCI}/local_cpulist": "8-15", f"{PCI}/numa_node": "1"}},
        "--cpunodebind=1",
        State.ADVICE,
    ),
    "other processes": ({"processes": f"{UUID}, 41\n"}, "1 on these GPUs", State.ADVICE),
    "NVLink": ({"has": [ONE, OTHER], "links": ""}, "PCIe", State.ADVICE),
    "P2P": (
        {"has": [ONE, OTHER], **torch(peers=[True, False])},
        "IOMMU",
        State.ADVICE,
    ),
    "nvcc": ({"compiled": ""}, "no nvcc", State.ADVICE),
    "nvcc ": ({"cuda": 12080}, "newer driver", State.BROKEN),
    "host compiler": ({"compiler": "no g++"}, "NVCC_CCBIN", State.BROKEN),
    "cuobjdump": ({"disassembler": "none; advice"}, "none: install the extra", State.ADVICE),
    "torch": ({"packages": {}}, "[gpu]", State.ADVICE),
    "torch ": ({"torch_test": None}, "does not work", State.BROKEN),
    "torch  ": (torch(built=""), "without CUDA", State.BROKEN),
    "torch   ": (torch(cuda=False), "finds no GPU", State.BROKEN),
    "torch    ": (torch(right=False), "wrong sum", State.BROKEN),
    "torch     ": (torch(archs=["sm_80"]), "sm_90", State.ADVICE),
    "triton": ({"packages": {"torch": "2"}}, "not installed", State.ADVICE),
    "triton ": (
        {"packages": {"triton": "3.6.0", "numpy": "2.4.6"}}, "'numpy<2.4'", State.ADVICE
    ),
    "cupy": ({"packages": {"torch": "2"}}, "pip install cupy-cuda13x", State.ADVICE),
    "profile ncu": ({"missing": {"ncu": "install Nsight"}}, "install Nsight", State.ADVICE),
    "GPU counters": (
        {"files": {doctor.DRIVER_PARAMETERS: "RmProfilingAdminOnly: 1"}},
        "NVreg_RestrictProfilingToAdminUsers=0",
        State.ADVICE,
    ),
    "perf events": ({"files": {doctor.PERF_PARANOID: "4"}}, "paranoid=2", State.ADVICE),
    "environment": (
        {"environ": {"CUDA_LAUNCH_BLOCKING": "1"}}, "CUDA_LAUNCH_BLOCKING", State.BROKEN
    ),
    "cache": ({"space": None}, "PYTEST_AIPERF_CACHE", State.BROKEN),
    "records": ({"space": 1 << 20}, "clean", State.ADVICE),
    "locks": ({"locked": "remove it"}, "remove it", State.BROKEN),
}  # fmt: skip


@pytest.mark.parametrize("kind", SICK)
def test_each_problem_has_a_line(kind):
    changes, words, state = SICK[kind]
    check = run_checks(**changes)[kind.strip()]
    assert check.state == state
    assert words in str(check)
    assert "\n" not in str(check)


def test_an_administrator_may_read_counters():
    files = {doctor.DRIVER_PARAMETERS: "RmProfilingAdminOnly: 1", doctor.PERF_PARANOID: "4"}
    lines = run_checks(files=files, root=True)
    assert lines["GPU counters"].state == State.OK
    assert "perf events" not in lines


def test_links_are_tried_on_request():
    machine = Machine(has=[ONE, OTHER])
    assert "all-reduce" not in {check.name for check in checks(machine)}
    [check] = [c for c in checks(machine, links=True) if c.name == "all-reduce"]
    assert str(check) == "OK      all-reduce        over 2 GPUs: right"
    [check] = [c for c in checks(Machine(has=[ONE]), links=True) if c.name == "all-reduce"]
    assert str(check).endswith("over 1 GPU: right")
    machine.collective = "NCCL WARN Bootstrap: no socket interface found"
    [check] = [c for c in checks(machine, links=True) if c.name == "all-reduce"]
    assert check.state == State.BROKEN
    assert "no socket interface found: NCCL_DEBUG=INFO" in str(check)
    assert "no socket" not in check.found + check.todo  # bundles hold no messages
    [check] = [c for c in checks(Machine(has=[]), links=True) if c.name == "all-reduce"]
    assert check.state == State.ADVICE


def test_a_collective_is_right_fails_or_hangs(monkeypatch):
    host = doctor.Host()
    assert host.all_reduce(2, "gloo") == ""
    assert "no-such-backend" in host.all_reduce(2, "no-such-backend").lower()
    wrong = doctor._ALL_REDUCE.replace("torch.ones(1 << 20", "torch.full((8,), 2.0")
    monkeypatch.setattr(doctor, "_ALL_REDUCE", wrong)
    assert "the sum of 2 ones is [4.0]" in host.all_reduce(2, "gloo")
    monkeypatch.setattr(doctor, "_ALL_REDUCE", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "DEADLINE_S", 8)
    assert host.all_reduce(2, "gloo") == "not done after 8 s"


def test_no_compiler_no_disassembly():
    assert "cuobjdump" not in run_checks(compiler="no g++")


def test_unknown_values_of_virtual_machines_are_ok():
    unknown = dict.fromkeys(doctor._BOARD, "[N/A]")
    lines = run_checks(board=unknown)
    assert lines["power 0"].state == lines["clocks 0"].state == State.OK
    assert lines["memory 0"].found == "use unknown"


def test_a_failing_nvidia_smi_is_one_line(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(machine, "run", lambda *_a, **_k: None)
    names = [check.name for check in checks(machine)]
    assert "nvidia-smi" in names
    assert "clocks 0" not in names


def test_what_a_library_prints_does_not_hide_the_report_of_torch(monkeypatch):
    machine = doctor.Host()
    monkeypatch.setattr(machine, "run", lambda *_: 'hello\n{"right": true}\ngood bye\n')
    assert machine.torch() == {"right": True}


@pytest.mark.parametrize("name", ["file", "file/cache"])
def test_a_cache_whose_place_a_file_has_is_broken(name, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(tmp_path / name))
    found = next(check for check in doctor._disk(doctor.Host()) if check.name == "cache")
    assert (found.state, found.found) == (State.BROKEN, "cannot be written")


def test_the_real_machine_answers(tmp_path, monkeypatch):
    machine = doctor.Host()
    monkeypatch.chdir(tmp_path)
    assert machine.run("this-is-no-program") is None
    assert machine.run("true") == ""
    assert machine.run("false") is None
    assert machine.run("printf", r"a\377") == "a\ufffd"
    assert machine.read(str(tmp_path / "no")) == ""
    assert machine.version("pytest")
    assert machine.version("no-such-package") == ""
    assert machine.free_bytes(tmp_path / "not" / "yet") > 0
    assert machine.cores()
    assert machine.is_privileged() in {True, False}
    compile(doctor._TORCH, "torch", "exec")


# the bundle

SECRETS = ("1654321", UUID[4:], "someone", "s3cret", "10.1.2.3", socket.gethostname())
SECRET_TEXT = f"""\
    Product Name                          : NVIDIA H200
    Serial Number                         : 1654321
    GPU UUID                              : {UUID}
    Process ID                            : 41
        Name                              : /home/someone/secret.py
    at {socket.gethostname()}, {UUID.lower()} https://me:s3cret@index/ 10.1.2.3:80
"""


def packed(machine, tmp_path):
    """Write a bundle and read its files; no file holds a secret."""
    path = tmp_path / "all.tar.gz"
    bundle.write(path, bundle.contents(machine, checks(machine), capture=True))
    with tarfile.open(path) as archive:
        entries = archive.getmembers()
        files = {e.name: archive.extractfile(e).read().decode() for e in entries}
    assert {e.mtime for e in entries} == {0}
    assert {e.uname for e in entries} == {""}
    for secret in SECRETS:
        assert secret not in "".join(files.values())
    return files


FACTS = [
    {},
    {"gpu_error": UsageError(SECRET_TEXT)},
    {"compiled": "", "compiler": SECRET_TEXT, "locked": SECRET_TEXT, "space": None},
    {"disassembler": SECRET_TEXT, "missing": {"ncu": SECRET_TEXT}},
    {"has": [], "links": SECRET_TEXT, "processes": SECRET_TEXT, "topology": SECRET_TEXT},
    {"topology": "GPU0\t" + SECRET_TEXT.replace("\n", "\nGPU1\t")},
]


@pytest.mark.parametrize("facts", FACTS, ids=range(len(FACTS)))
def test_no_secret_gets_into_a_bundle(facts, tmp_path, monkeypatch):
    machine = Machine(**facts)
    machine.environ = {
        "HOME": "/home/someone", "CUDA_VISIBLE_DEVICES": UUID, "NVCC_CCBIN": "/home/someone/g++",
        "LD_PRELOAD": "/home/someone/libnvtx-s3cret.so", "PYTORCH_CUDA_ALLOC_CONF": "s3cret",
        "CUDA_LAUNCH_BLOCKING": "s3cret", "PYTEST_AIPERF_CACHE": "/home/someone/cache",
    }  # fmt: skip
    monkeypatch.setattr(machine, "absence", lambda: SECRET_TEXT)
    monkeypatch.setattr(machine, "lock_folder", lambda: "/home/someone/locks")
    monkeypatch.setattr(machine, "tool", lambda name: f"/home/someone/{name}")
    monkeypatch.setattr(machine, "nvcc", lambda: ("/home/someone/nvcc", SECRET_TEXT))
    real = machine.run
    monkeypatch.setattr(
        machine, "run", lambda *c, **k: SECRET_TEXT if "capture" in c else real(*c, **k)
    )
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(tmp_path / "someone"))
    files = packed(machine, tmp_path)
    assert "aiperf-doctor/doctor.json" in files


def test_a_bundle_holds_checks_versions_and_chosen_variables(tmp_path):
    machine = Machine(environ={
        "CUDA_VISIBLE_DEVICES": UUID, "NCCL_DEBUG": "INFO", "AWS_SECRET": "s3cret",
        "TRITON_API_KEY": "s3cret", "PYTEST_AIPERF_TOKEN": "s3cret", "PATH": "s3cret",
    })  # fmt: skip
    files = packed(machine, tmp_path)
    versions = json.loads(files["aiperf-doctor/versions.json"])
    assert versions["environment"] == {"CUDA_VISIBLE_DEVICES": "<set>", "NCCL_DEBUG": "INFO"}
    packages = versions["packages"]
    assert {"pytest", "pyyaml", "jinja2"} < {*packages}  # PyPI spells the last two in another way
    listed = json.loads(files["aiperf-doctor/doctor.json"])
    assert {"name": "driver", "state": "OK", "found": "580.159, CUDA up to 13.0", "todo": ""} in (
        listed
    )
    assert "OK      driver" in files["aiperf-doctor/doctor.txt"]
    assert files["aiperf-doctor/topology.txt"].splitlines() == [
        "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID",
        "GPU0\t X \tPIX\t0-7,16\t0\t\tN/A",
        "NIC0\tPIX\t X \t?",
    ]
    assert "captured" in files["aiperf-doctor/capture-ncu.txt"]


def test_a_bundle_can_be_packed_without_installation(monkeypatch):
    """A clone that runs with PYTHONPATH=src has no metadata that lists its requirements."""

    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    files = bundle.contents(Machine(), [], capture=False)
    assert "pytest" in json.loads(files["versions.json"])["packages"]


def test_a_missing_profiler_is_left_out():
    machine = Machine(missing={"ncu": "install it"})
    files = bundle.contents(machine, [], capture=True)
    assert {n for n in files if "capture" in n} == {"capture-torch.txt", "capture-nsys.txt"}
    assert not [n for n in bundle.contents(machine, [], capture=False) if "capture" in n]


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "Host", Machine)
    assert main(["doctor", "--bundle", "b.tar.gz"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("OK      python")
    assert out.endswith("written: b.tar.gz\n")
    assert tarfile.is_tarfile(io.BytesIO(Path("b.tar.gz").read_bytes()))
    monkeypatch.setattr(doctor, "Host", lambda: Machine(torch_test=None))
    assert main(["doctor"]) == 1
    assert "BROKEN  torch" in capsys.readouterr().out
    assert main(["doctor", "--capture"]) == 2
    assert main(["doctor", "--bundle", "no/where/b.tar.gz"]) == 2


# clean

RUN = "20250304T050607.000000-1"
BUILD = "0123456789abcdef" * 2


def lay(root, *paths):
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"*\n")


def lay_tagged(root, *paths):
    """Write each file into a folder that this plugin created."""
    for path in paths:
        create_tagged((root / path).parent)
        lay(root, path)


@pytest.fixture
def littered(tmp_path, monkeypatch):
    """A folder and a cache with files that this plugin wrote."""
    here, cache = tmp_path / "here", tmp_path / "cache"
    lay_tagged(here, ".aiperf/.gitignore", f"artifacts/{RUN}/profile.log",
               "sub/.aiperf/expectations.yaml.lock")  # fmt: skip
    lay(here, f".aiperf/{RUN}/results.json", f"artifacts/{RUN}/a/x.ncu-rep")
    (here / ".aiperf" / "latest").symlink_to(RUN)
    lay_tagged(cache, f"{BUILD}/library.so", f"{BUILD}.new/log", f"locks/{BUILD}")
    lay(cache, "ceilings/GPU-1.json")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(cache))
    return here, cache


FOREIGN = (
    "here/artifacts/model.bin", "here/results/h200.json", "here/.git/.aiperf/keep",
    f"here/sub/{RUN}/results.json", "cache/other/library.so", f"here/.venv/.aiperf/{RUN}/x",
    "cache/ceilings/notes.txt", f"cache/{BUILD[:-1]}/library.so", "here/artifacts/mine/x.ncu-rep",
    "here/other/.aiperf/notes.txt", f"here/artifacts/{RUN[:-1]}2/x", "cache/notes.txt",
    "here/sub/CACHEDIR.TAG", "cache/theirs/CACHEDIR.TAG",
)  # fmt: skip


def test_clean_removes_what_this_plugin_wrote(littered):
    here, cache = littered
    assert main(["clean"]) == 0
    assert sorted(p.name for p in here.rglob("*")) == ["sub"]
    assert not cache.exists()


def test_clean_removes_a_cache_in_a_folder_of_runs_once(littered, monkeypatch, capsys):
    here, _ = littered
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(here / ".aiperf" / "cache"))
    lay_tagged(here, f".aiperf/cache/{BUILD}/library.so")
    lay(here, ".aiperf/cache/ceilings/GPU-1.json")
    assert main(["clean"]) == 0
    assert sorted(p.name for p in here.rglob("*")) == ["sub"]
    assert ".aiperf/cache" not in capsys.readouterr().out


def test_clean_leaves_an_empty_folder_that_cannot_be_removed(littered, monkeypatch):
    _, cache = littered
    rmdir = Path.rmdir

    def is_a_volume(path):
        if path == cache:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", is_a_volume)
    assert main(["clean"]) == 0
    assert [*cache.iterdir()] == []


def test_clean_removes_nothing_else(littered, tmp_path, capsys):
    lay(tmp_path, *FOREIGN)
    assert main(["clean"]) == 0
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == set(FOREIGN)
    assert capsys.readouterr().out.splitlines()[-1].startswith("removed: ")


def test_every_folder_of_a_run_is_found(tmp_path):
    cache = tmp_path / "cache"
    open_run(tmp_path / ".aiperf", RUN)
    run_folder(tmp_path / "artifacts", RUN)
    sass.cached(cache / BUILD, dict)
    found = clean.find_artifacts(tmp_path, cache, ".aiperf", "artifacts")
    assert found == [tmp_path / ".aiperf", tmp_path / "artifacts" / RUN, cache / BUILD]


def test_an_existing_folder_is_not_taken_over(tmp_path, monkeypatch):
    lay(tmp_path, ".aiperf/notes.txt", "cache/locks/notes.txt")
    for folder in (tmp_path / ".aiperf", tmp_path / "cache" / "locks"):
        create_tagged(folder)
    assert clean.find_artifacts(tmp_path, tmp_path / "cache", ".aiperf", "artifacts") == []


def test_clean_can_only_list(littered, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert main(["clean", "--dry-run"]) == 0
    assert sorted(tmp_path.rglob("*")) == before
    out = capsys.readouterr().out.splitlines()
    cleaned = ("here/.aiperf", "here/artifacts", "here/sub/.aiperf", "cache", "cache/ceilings")
    folders = [str(tmp_path / folder) for folder in cleaned]
    assert [line.split(maxsplit=2)[2] for line in out[:-1]] == folders
    assert out[-1].startswith("would be removed: ")
    assert "accepted results" in out[-1]


def test_clean_names_what_it_leaves_in_a_folder(littered, tmp_path, capsys):
    lay(tmp_path, *(f"cache/{name}" for name in "abcde"))
    main(["clean"])
    assert f"{tmp_path}/cache, where a, b, c and 2 more stay\n" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [*"abcde"]


def test_clean_follows_no_link(tmp_path):
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    lay_tagged(elsewhere, "run/results.json", f"{RUN}/results.json", f"{BUILD}/library.so")
    lay(elsewhere, "ceilings/GPU-1.json")
    (here / "artifacts").mkdir(parents=True)
    (here / ".aiperf").symlink_to(elsewhere / "run")
    (here / "artifacts" / RUN).symlink_to(elsewhere / RUN)
    (here / "folder").symlink_to(elsewhere)
    (tmp_path / "cache").symlink_to(elsewhere)
    assert clean.find_artifacts(here, tmp_path / "cache", ".aiperf", "artifacts") == []


def test_clean_leaves_the_folders_of_other_users(littered, monkeypatch):
    here, cache = littered
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    listed = clean.find_artifacts(here, cache, ".aiperf", "artifacts")
    assert [p.name for p in listed] == ["GPU-1.json"]
