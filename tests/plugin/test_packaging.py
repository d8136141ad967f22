"""The Makefile sets up and measures as it announces; the distributions are complete."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = "pytest-aiperf needs Python 3.11 or newer: install it, then name it, for example "


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def make(folder, *arguments):
    """Run the Makefile in a folder; scripts in its subfolder `path` hide installed programs."""
    path = f"{folder / 'path'}{os.pathsep}{os.environ['PATH']}"
    # `make test` must not pass its variables on to the make that is tested
    outer = {"PYTHON", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    environment = {k: v for k, v in os.environ.items() if k not in outer}
    return subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), *arguments],
        cwd=folder,
        env=environment | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def pythons(tmp_path):
    """Add Pythons of some versions, which log their arguments and run only code given by -c."""

    def add(**versions):
        (tmp_path / "pyproject.toml").touch()
        for name, version in versions.items():
            code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
            script(
                tmp_path / "path" / name.replace("_", "."),
                f'echo "$(basename "$0") $*" >> log\n[ "$1" != -c ] || '
                f"exec {sys.executable} -c '{code}' \"$2\"",
            )

    return add


def log(folder):
    return (folder / "log").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("version", [(3, 10, 13), (2, 7, 18)])
def test_a_python_that_is_too_old_is_refused_in_one_sentence(tmp_path, pythons, version):
    pythons(python3_10=version)
    run = make(tmp_path, ".venv/ready", "PYTHON=python3.10")
    assert run.returncode
    assert run.stdout == ""
    assert run.stderr.splitlines()[0] == f"{OLD}make PYTHON=python3.12"
    assert len(log(tmp_path)) == 1  # neither venv nor pip ran


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"python3": (3, 11, 0), "python3_13": (3, 13, 0)}, "python3"),
        ({"python3": (3, 10, 9), "python3_13": (3, 13, 0)}, "python3.13"),
        ({"python3": (3, 9, 2), "python3_13": (3, 9, 2), "python3_12": (3, 12, 1)}, "python3.12"),
    ],
    ids=["python3", "newest", "working"],
)
def test_a_python_that_is_new_enough_is_chosen(tmp_path, pythons, versions, chosen):
    pythons(**versions)
    make(tmp_path, ".venv/ready")
    assert log(tmp_path)[-1] == f"{chosen} -m venv .venv"


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("reachable", [False, True], ids=["offline", "online"])
def test_without_a_gpu_torch_comes_without_cuda(tmp_path, pythons, gpu, reachable):
    pythons(python3=(3, 11, 0))
    script(tmp_path / "path" / "nvidia-smi", "echo GPU 0: Fake" if gpu else "exit 9")
    script(
        tmp_path / ".venv/bin/python",  # opens the index with -c, or is pip
        f'[ "$1" != -c ] || exit {int(not reachable)}\necho "$*" > pip\n'
        'echo "  Downloading big.whl (9.5 MB)"\necho "  Downloading small.whl (9 kB)"\n',
    )
    run = make(tmp_path, ".venv/ready")
    assert run.returncode == 0, run.stderr
    announced, *rest = run.stdout.splitlines()
    assert re.fullmatch(r"Setting up \.venv with python3 .* GB .*, 2 to 5 minutes", announced)
    assert rest[-1] == "  Downloading big.whl (9.5 MB)"
    assert ("cannot be reached" in rest[0]) == (not gpu and not reachable)
    pip = (tmp_path / "pip").read_text(encoding="utf-8")
    index = "--extra-index-url https://download.pytorch.org/whl/cpu "
    assert (index in pip) == (not gpu and reachable)
    assert (" torch==" in pip, " torch" in pip) == (not gpu, not gpu)
    assert (".[dev,gpu" in pip, ".[dev,cpu" in pip) == (gpu, not gpu)


def test_a_failed_installation_is_tried_again(tmp_path, pythons):
    pythons(python3=(3, 11, 0))
    script(tmp_path / ".venv/bin/python", "exit 1")
    assert make(tmp_path, ".venv/ready").returncode
    assert not (tmp_path / ".venv/ready").exists()


CLAIMS = """
def test_noise(compare):
    compare(**usual | {"optimized": doubling(200)})

def test_wrong(compare):
    compare(**usual | {"optimized": lambda x: x * 3})
"""


def bench(folder, python, arguments=""):
    script(folder / ".venv/bin/python", python)
    (folder / "pyproject.toml").touch()
    (folder / ".venv/ready").touch()
    return make(folder, "bench", f"ARGS={arguments}")


@pytest.mark.parametrize("selected", ["noise", "noise or wrong"])
def test_bench_forgives_noise_and_no_wrong_result(project, selected):
    project.tests(CLAIMS)
    project.fake(noise={"white": 0.15})
    script(project.path / "path" / "nvidia-smi", "echo GPU 0: Fake")
    arguments = f"--quick --reproducible -k '{selected}'"
    python = f'exec {sys.executable} "$@" {" ".join(project.command())}'
    run = bench(project.path, python, arguments)
    assert "undecided: INCONCLUSIVE where FASTER is claimed" in run.stdout
    assert (run.returncode == 0) == (selected == "noise")
    summary = "No claim is wrong; this machine is too noisy to decide 1."
    assert (summary in run.stdout.splitlines()) == (selected == "noise")
    report = project.path / ".aiperf/report/index.html"
    assert report.exists()
    assert f"Report: {report}" in run.stdout.splitlines()


def test_bench_forgives_a_requirement_that_only_the_intervals_end_misses(project):
    project.tests("def test_half(compare):\n    compare(**usual)\n")
    project.write(
        "expectations.yaml", "schema: 1\nclaims:\n  ch07/half:\n    require:\n      speedup: 2\n"
    )
    project.fake(noise={"white": 0.01})
    script(project.path / "path" / "nvidia-smi", "echo GPU 0: Fake")
    command = " ".join(project.command("--quick", "--reproducible"))
    run = bench(project.path, f'exec {sys.executable} "$@" {command}')
    assert "below the 2x that expectations.yaml requires, but the interval reaches it" in run.stdout
    assert "1 claim, 1 failed: 1 FASTER (undecided)" in run.stdout
    assert "No claim is wrong; this machine is too noisy to decide 1." in run.stdout
    assert run.returncode == 0


@pytest.mark.parametrize(
    ("status", "failures"),
    [
        (1, []),  # pytest wrote no file
        (1, ["undecided: INCONCLUSIVE", "SLOWER where FASTER is claimed; undecided: INCONCLUSIVE"]),
        (1, ["undecided: INCONCLUSIVE", "spills: 3 where at most 0; undecided: INCONCLUSIVE"]),
        (2, ["undecided: INCONCLUSIVE where FASTER"]),  # interrupted
    ],
    ids=["no file", "slower", "evidence", "interrupted"],
)
def test_bench_fails_for_any_other_reason(tmp_path, status, failures):
    cases = "".join(f'<failure message="{f}">x</failure>' for f in failures)
    junit = tmp_path / ".aiperf/report/junit.xml"
    junit.parent.mkdir(parents=True)
    junit.write_text('<failure message="undecided: speedup">')  # of the run before
    run = bench(tmp_path, f"[ -z '{cases}' ] || echo '{cases}' > {junit}\nexit {status}")
    assert run.returncode
    assert f"Error {status}" in run.stderr


def test_bench_shows_no_report_of_an_earlier_run(tmp_path):
    report = tmp_path / ".aiperf/report/index.html"
    report.parent.mkdir(parents=True)
    report.write_text("old")
    assert "Report: " not in bench(tmp_path, "exit 0", "--version").stdout
    assert f"Report: {report}" in bench(tmp_path, f"echo new > {report}").stdout.splitlines()


def test_make_alone_lists_the_targets_and_runs_nothing(tmp_path):
    run = make(tmp_path)
    assert run.returncode == 0, run.stderr
    assert [line.split()[:2] for line in run.stdout.splitlines()[:2]] == [
        ["make", "bench"],
        ["make", "test"],
    ]
    assert "PYTHON=..." in run.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("version", "works"), [((3, 11, 4), True), ((3, 12, 1), False)])
def test_another_python_than_that_of_the_environment_is_refused(tmp_path, pythons, version, works):
    pythons(python3_12=version)
    script(tmp_path / ".venv/bin/python", "echo 3.11.4")
    (tmp_path / ".venv/ready").touch()
    run = make(tmp_path, ".venv/ready", "PYTHON=python3.12")
    assert (run.returncode == 0) == works
    refused = ".venv has Python 3.11.4, PYTHON=python3.12 is 3.12.1: run make clean first, or name "
    assert run.stderr.startswith(refused) != works


def test_a_silent_installation_says_that_it_goes_on(tmp_path, pythons):
    pythons(python3=(3, 11, 0))
    pip = 'echo "Installing collected packages: big"; sleep 2.5'
    script(tmp_path / ".venv/bin/python", f'[ "$2" != pip ] || {{ {pip}; }}')
    run = make(tmp_path, ".venv/ready", "SILENCE_S=1")
    assert run.returncode == 0, run.stderr
    installing, *waiting = run.stdout.splitlines()[1:]
    assert installing == "  Installing"
    assert re.fullmatch(r"(  still at it after \d s\n?)+", "\n".join(waiting))


def test_the_extras_leave_torch_to_the_user():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert not [r for r in extras["cpu"] + extras["gpu"] if "==" in r]
    assert not [r for r in extras["cpu"] if "cupy" in r]


def test_the_source_distribution_has_license_tests_and_course(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("the tracked files are listed by git")
    git = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    tracked = [f for f in listed.split("\0") if (ROOT / f).is_file()]
    for file in tracked:  # a copy: the build writes into its folder
        target = tmp_path / "copy" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, target)
    code = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    build = [sys.executable, "-c", code]
    subprocess.run(build, cwd=tmp_path / "copy", capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        packed = {name.partition("/")[2] for name in content.getnames()}
    left_out = {file for file in tracked if file not in packed}
    assert {file for file in left_out if not file.startswith(".")} == set()
    assert {"LICENSE", "tests/ch01/test_batched_gemm.py", "CHANGELOG.md"} <= packed
