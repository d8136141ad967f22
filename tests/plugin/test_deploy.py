"""The files of deploy/ do what docs/runner.md says, and every command in them exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from pytest_aiperf import cli
from pytest_aiperf.session.session import RUNS

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
SLURM = ROOT / "deploy" / "slurm-array.sh"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOB = yaml.safe_load((ROOT / "deploy" / "job.yaml").read_text(encoding="utf-8"))
POD = JOB["spec"]["template"]["spec"]
SHARDS = JOB["spec"]["completions"]
CI = yaml.safe_load((ROOT / ".github" / "workflows" / "cpu.yml").read_text(encoding="utf-8"))


def instructions():
    """Return the instructions of the Containerfile, without comments, as lists of words."""
    lines = CONTAINERFILE.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    return [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


# commands


def commands():
    """Find the commands of pytest and pytest_aiperf, as (kind, arguments)."""
    for path in (
        *WORKFLOWS,
        CONTAINERFILE,
        SLURM,
        ROOT / "deploy/job.yaml",
        ROOT / "docs/runner.md",
    ):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        text = re.sub(r"\$\(\(.+?\)\)", "1", text)  # arithmetic
        text = text.replace('"$@"', "").replace('$SHARD"', '1/2"')
        for kind, pattern in (
            (
                "pytest",
                r"(?:-m pytest|docker run .* pytest-aiperf|slurm-array\.sh \d) (--?\w.*|tests.*)",
            ),
            ("pytest_aiperf", r"-m pytest_aiperf ([a-z].*)"),
        ):
            for match in re.finditer(pattern, text):
                words = re.split(r" (?:\||>|;|&)|\)$|`", match[1])[0]
                words = re.sub(r"\$\{?\w+\}?", "1", words)
                yield pytest.param(kind, words, id=f"{path.stem}: {words[:60]}")


def test_commands_are_found_in_each_file():
    found = {p.id.partition(":")[0] for p in commands()}
    workflows = {"cpu", "gpu-nightly", "gpu-weekly", "release"}
    assert found == {*workflows, "Containerfile", "slurm-array", "job", "runner"}


@pytest.mark.parametrize(("kind", "words"), list(commands()))
def test_each_command_exists(kind, words, pytester):
    arguments = shlex.split(words)
    if kind == "pytest_aiperf":
        if arguments[:2] == ["merge", "-o"]:
            arguments.append("results.json")  # appended by xargs
        parser, problems = cli._parser(arguments[0])
        assert arguments[0] not in problems
        assert parser.parse_args(arguments).run
    else:
        (pytester.path / "night").mkdir()
        (pytester.path / "night" / "flagged.txt").touch()
        config = pytester.parseconfig(*arguments)
        workflows = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
        for path in config.args:
            is_written = f"cat > {path} <<" in workflows
            assert is_written or Path(ROOT, path).exists() or path == str(pytester.path)


def test_a_command_that_does_not_exist_is_refused(pytester):
    with pytest.raises(pytest.UsageError, match="--shards"):
        pytester.parseconfig("--gpu", "--shards=1/2")


# tools


def checks():
    """Return the lines of the CI step that runs tools on workflows and deploy/, and its tools."""
    (step,) = (s for s in CI["jobs"]["lint"]["steps"] if "deploy/" in s.get("name", ""))
    install, *lines = step["run"].splitlines()
    return install.split("--quiet ")[1].split(), [line.removeprefix(".venv/bin/") for line in lines]


def test_ci_runs_a_pinned_tool_on_each_file():
    pinned, lines = checks()
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", tool) for tool in pinned)
    files = {line.split()[-1] for line in lines}
    assert files == {"actionlint", ".github"} | {
        str(p.relative_to(ROOT)) for p in (ROOT / "deploy").iterdir()
    }
    assert len(lines) == len(pinned)


@pytest.mark.parametrize("line", checks()[1])
def test_the_tools_of_ci_accept_the_files(line):
    if shutil.which(line.split()[0]) is None:
        pytest.skip(f"{line.split()[0]} is not installed")
    done = subprocess.run(line.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# container


def test_the_image_copies_what_exists_and_does_not_run_as_root():
    words = instructions()
    assert words[0][0] == "FROM"
    assert re.fullmatch(r"docker\.io/nvidia/cuda:[\d.]+-base-ubuntu[\d.]+", words[0][1])
    copied = [w[1:] for w in words if w[0] == "COPY"]
    for *sources, target in copied:
        for source in (s for s in sources if not s.startswith("--")):
            assert (ROOT / source).exists(), source
        assert target == "./" or target == sources[-1]
    (uid,) = (w[1] for w in words if w[0] == "USER")
    assert int(uid) > 0
    assert copied[-1] == [f"--chown={uid}:{uid}", ".", "."]
    assert POD["securityContext"]["fsGroup"] == int(uid)


def test_the_image_installs_extras_that_exist():
    (install,) = (w for w in instructions() if w[:3] == ["RUN", "pip", "install"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.search(r"\.\[(.+)\]", " ".join(install))[1].split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    assert install[-2:] == ["./selfcheck", "./nightly"]


# Kubernetes


def container():
    (container,) = POD["containers"]
    return container


@pytest.fixture
def fake(tmp_path):
    """Put a program on the path that writes its arguments into a log, one line per call."""

    def install(name, then=""):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/{file.name}.log\n{then}\n')
        file.chmod(0o755)
        return {"PATH": f"{file.parent}{os.pathsep}{os.environ['PATH']}"}

    return install


def test_the_pods_of_a_job_measure_all_shards(tmp_path, fake):
    environment = {e["name"]: e.get("value") for e in container()["env"]}
    variables = fake("python") | {"SHARDS": environment["SHARDS"]}
    for index in range(SHARDS):
        subprocess.run(
            [*container()["command"], *container()["args"]],
            env=variables | {"JOB_COMPLETION_INDEX": str(index)}, check=True,
        )  # fmt: skip
    assert (tmp_path / "python.log").read_text().splitlines() == [
        f"-m pytest --gpu --cpu --shard={i}/{SHARDS}" for i in range(1, SHARDS + 1)
    ]
    assert JOB["spec"]["parallelism"] <= SHARDS


@pytest.mark.parametrize(("status", "seen"), [(0, 0), (1, 0), (2, 1), (4, 1)])
def test_a_pod_fails_if_pytest_could_not_measure_but_not_for_a_failed_claim(status, seen, fake):
    command = [*container()["command"], *container()["args"]]
    variables = fake("python", f"exit {status}") | {"SHARDS": "2", "JOB_COMPLETION_INDEX": "0"}
    assert subprocess.run(command, env=variables, check=False).returncode == seen


def test_a_pod_has_one_gpu_no_privileges_and_a_folder_for_its_run():
    spec = JOB["spec"]
    assert (JOB["apiVersion"], JOB["kind"]) == ("batch/v1", "Job")
    assert spec["completionMode"] == "Indexed"
    assert POD["restartPolicy"] == "Never"  # backoffLimitPerIndex requires it
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    (workdir,) = (w[1] for w in instructions() if w[0] == "WORKDIR")
    runs, shared = container()["volumeMounts"]
    assert runs["mountPath"] == f"{workdir}/{RUNS}"
    assert runs["subPathExpr"] == "$(JOB_COMPLETION_INDEX)"
    assert shared["mountPath"] == "/dev/shm"
    assert {v["name"] for v in POD["volumes"]} == {runs["name"], shared["name"]}


# Slurm

SBATCH = """
for word in "$@"; do
    case $word in
        --array=*) last=${word##*-} ;;
        --dependency=afterany:7) last= ;;
    esac
done
while [[ $1 == --* ]]; do shift; done
if [[ $last ]]; then
    echo "7;cluster"
    for ((i = 1; i <= last; i++)); do
        [[ $i == "$LOST" ]] ||
            SLURM_JOB_ID=$((7 + i)) SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$i \\
                SLURM_ARRAY_TASK_COUNT=$last "$@" >&2
    done
else
    SLURM_JOB_ID=99 "$@"
fi
"""
"""Runs the jobs at once; the variable LOST names a task that ends without results."""
PYTHON = """
[[ $2 == pytest ]] || exit 0
if [[ $SLURM_ARRAY_TASK_ID == "$KILLED" ]]; then
    { read -rd ''; read -rd '' script; } < "/proc/$PPID/cmdline"
    [[ $script != */slurm-array.sh ]] || { kill "$PPID"; sleep 0.5; }
fi
for word in "$@"; do [[ $word != aiperf_runs=* ]] || runs=${word#*=}; done
mkdir -p "$runs/latest"
touch "$runs/latest/results.json"
"""
"""Writes what pytest does; in the task that KILLED names, after its shell got SIGTERM."""


@pytest.fixture
def submit(tmp_path, fake):
    """Run slurm-array.sh with a fake sbatch; return its process and the commands of Python."""
    variables = fake("sbatch", SBATCH) | {"LOST": "", "KILLED": ""}
    fake("python", PYTHON)
    clone = tmp_path / "clone"
    (clone / "deploy").mkdir(parents=True)
    shutil.copy(SLURM, clone / "deploy")
    (clone / ".venv").mkdir()
    (clone / ".venv" / "bin").symlink_to(tmp_path / "bin")

    def run(*arguments, **more):
        process = subprocess.run(
            [clone / "deploy" / SLURM.name, *arguments],
            cwd=tmp_path, env=variables | more, capture_output=True, text=True, check=False,
        )  # fmt: skip
        log = tmp_path / "python.log"
        return process, log.read_text().splitlines() if log.exists() else []

    return run


@pytest.mark.parametrize("allocation", [{}, {"SLURM_JOB_ID": "5"}], ids=["login node", "salloc"])
def test_a_job_array_measures_all_shards_and_merges_them(submit, allocation):
    process, python = submit("3", "--quick", **allocation)
    assert process.returncode == 0, process.stderr
    *shards, merge, complete = python
    assert shards == [
        f"-m pytest --gpu --cpu --shard={i}/3 -o aiperf_runs=slurm/7/{i} --quick" for i in (1, 2, 3)
    ]
    files = " ".join(f"slurm/7/{i}/latest/results.json" for i in (1, 2, 3))
    assert merge == f"-m pytest_aiperf merge {files} -o slurm/7/results.json"
    assert complete == "-m pytest_aiperf complete slurm/7/1/ slurm/7/2/ slurm/7/3/"


def test_a_lost_shard_does_not_keep_the_others_from_being_merged(submit):
    _, python = submit("3", LOST="2")
    assert "merge slurm/7/1/latest/results.json slurm/7/3/latest/results.json -o" in python[-2]
    assert python[-1].endswith("complete slurm/7/1/ slurm/7/3/")


def test_a_shard_that_its_time_limit_ends_keeps_its_results(submit):
    _, python = submit("3", KILLED="2")
    assert "slurm/7/2/latest/results.json" in python[-2]


def test_a_job_array_needs_the_number_of_shards(submit):
    process, python = submit()
    assert process.returncode != 0
    assert "usage: deploy/slurm-array.sh SHARDS" in process.stderr
    assert python == []
