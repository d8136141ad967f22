"""Workflows follow the rules that protect runners, tokens and the main branch; scripts work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from aiperf_nightly import history
from aiperf_nightly.history import Night

from pytest_aiperf.model import Outcome
from pytest_aiperf.records.results import read_results
from pytest_aiperf.schema import to_json
from tests.plugin.records import result

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w-]+/[\w./-]+@[0-9a-f]{40}")
TRIGGERS = {
    "cpu.yml": {"push", "pull_request"},
    "docs.yml": {"push", "workflow_dispatch"},
    "gpu-nightly.yml": {"schedule", "workflow_dispatch"},
    "gpu-weekly.yml": {"schedule", "workflow_dispatch"},
    "record-night.yml": {"workflow_run"},
    "release.yml": {"release", "workflow_dispatch"},
}
WRITES = {
    ("docs.yml", "publish"): {"id-token", "pages"},
    ("record-night.yml", "history"): {"contents"},
    ("record-night.yml", "expectations"): {"contents", "pull-requests"},
    ("record-night.yml", "report"): {"issues"},
    ("release.yml", "publish"): {"id-token"},
}


def load(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["on"] = content.pop(True)  # YAML 1.1 reads the key `on` as true
    return content


def jobs():
    return [
        pytest.param(path.name, name, job, id=f"{path.stem}-{name}")
        for path in WORKFLOWS
        for name, job in load(path)["jobs"].items()
    ]


def gpu_jobs():
    return [p for p in jobs() if "self-hosted" in p.values[2]["runs-on"]]


def steps(job, action=""):
    return [s for s in job["steps"] if s.get("uses", "").startswith(action)]


def test_all_workflows_are_listed():
    assert {path.name for path in WORKFLOWS} == set(TRIGGERS)
    assert len(gpu_jobs()) == 3


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_triggers_permissions_and_concurrency(path):
    workflow = load(path)
    assert set(workflow["on"]) == TRIGGERS[path.name]
    assert workflow["permissions"] == {}
    assert workflow["concurrency"]["group"]
    assert "cancel-in-progress" in workflow["concurrency"]


@pytest.mark.parametrize(("workflow", "name", "job"), jobs())
def test_each_job_has_a_time_limit_and_the_least_permissions(workflow, name, job):
    assert 0 < job["timeout-minutes"] <= 240
    writing = {k for k, v in job["permissions"].items() if v == "write"}
    assert set(job["permissions"].values()) <= {"read", "write"}
    assert writing == WRITES.get((workflow, name), set())
    for step in job["steps"]:
        if "uses" in step:
            assert PINNED.fullmatch(step["uses"])
        # text from an event must not be expanded in a shell
        assert "${{" not in step.get("run", "")
    for step in steps(job, "actions/checkout"):
        assert step["with"]["persist-credentials"] is False
        assert step["with"].get("ref") in (None, "history")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_each_pin_names_its_version(path):
    text = path.read_text(encoding="utf-8")
    pins = re.findall(r"uses: (\S+)(.*)", text)
    assert pins
    for action, comment in pins:
        assert PINNED.fullmatch(action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment)
    assert "pull_request_target" not in text
    assert "secrets." not in text
    assert "inherit" not in text


def test_each_action_has_one_sha():
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    pins = dict.fromkeys(re.findall(r"uses: (\S+)@(\S+)", text))
    assert len({action for action, _ in pins}) == len(pins)


@pytest.mark.parametrize(("workflow", "name", "job"), gpu_jobs())
def test_gpu_jobs_have_no_secrets_and_run_on_labelled_runners(workflow, name, job):
    assert TRIGGERS[workflow] == {"schedule", "workflow_dispatch"}
    assert job["permissions"] == {"contents": "read"}
    assert job["runs-on"] == ["self-hosted", "gpu", "${{ matrix.arch }}"]
    assert "token" not in json.dumps(job).lower()


@pytest.mark.parametrize(("workflow", "name", "job"), gpu_jobs())
def test_gpu_jobs_are_skipped_in_a_fork_without_runners(workflow, name, job):
    assert job["strategy"]["matrix"]["arch"] == "${{ fromJSON(vars.GPU_ARCHS || '[]') }}"
    if name in ("measure", "sanitize"):
        assert job["if"].startswith("vars.GPU_ARCHS != '' && (")
    else:  # skipped together with the job that it needs
        assert job["needs"] == "measure"
        assert job["if"] == "${{ !cancelled() && needs.measure.result != 'skipped' }}"


@pytest.mark.parametrize(("workflow", "name", "job"), jobs())
def test_environments_are_cached_except_in_a_release(workflow, name, job):
    for step in steps(job, "actions/setup-python"):
        cached = workflow == "cpu.yml"
        assert ("cache" in step["with"]) == cached
        assert ("cache-dependency-path" in step["with"]) == cached
    if "self-hosted" in job["runs-on"]:
        (setup,) = (step["run"] for step in job["steps"] if "make " in step.get("run", ""))
        venv = "$RUNNER_TOOL_CACHE/pytest-aiperf"  # checkout removes an environment in the clone
        assert setup.splitlines() == [
            f'make VENV="{venv}" "{venv}/ready"',
            f'echo "{venv}/bin" >> "$GITHUB_PATH"',
        ]


def test_a_night_starts_with_identical_arms_and_ends_with_the_completeness_check():
    nightly = load(GITHUB / "workflows" / "gpu-nightly.yml")
    runs = [step.get("run", "") for step in nightly["jobs"]["measure"]["steps"]]
    noise, shard = (
        next(i for i, run in enumerate(runs) if word in run)
        for word in ("tests/gpu/test_noise.py", "--shard=")
    )
    assert noise <= shard
    shards = nightly["jobs"]["measure"]["strategy"]["matrix"]["shard"]
    assert shards == [f"{i}/{len(shards)}" for i in range(1, len(shards) + 1)]
    last = nightly["jobs"]["gate"]["steps"][-1]
    assert last["if"] == "always()"
    assert "pytest_aiperf complete" in last["run"]


@pytest.mark.parametrize("flagged", ["", "tests/ch07/test_x.py::test_x\n"])
def test_flagged_claims_are_profiled_and_no_failure_of_it_ends_the_night(tmp_path, flagged):
    gate = load(GITHUB / "workflows" / "gpu-nightly.yml")["jobs"]["gate"]["steps"]
    step = next(step for step in gate if step.get("name") == "Profile the flagged claims")
    (tmp_path / "night").mkdir()
    (tmp_path / "night" / "flagged.txt").write_text(flagged)
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$@" >> calls\nexit 1\n')
    fake.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]  # as GitHub runs a step
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    calls = tmp_path / "calls"
    assert (calls.read_text().splitlines() if calls.exists() else []) == (
        [
            "-m pip install --quiet --editable .[hta]",
            *(
                f"-m pytest --profile={tool} -o aiperf_artifacts=profiles/{tool} @night/flagged.txt"
                for tool in ("nsys", "ncu", "hta")
            ),
        ]
        if flagged
        else []
    )
    [upload] = [step for step in gate if step.get("with", {}).get("path") == "profiles/"]
    assert upload["if"] == "always()"
    assert "upload-artifact" in upload["uses"]


def test_each_claim_is_sanitized_once_in_four_weeks(tmp_path):
    steps_ = load(GITHUB / "workflows" / "gpu-weekly.yml")["jobs"]["sanitize"]["steps"]
    [step] = [step for step in steps_ if "sanitizer" in step.get("run", "")]
    for name, text in (("python", 'echo "$@" >> calls'), ("date", "echo $WEEK")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for week in ("08", "09", "10", "11"):
        environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "WEEK": week}
        command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
        subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    calls = (tmp_path / "calls").read_text()
    assert re.findall(r"--shard=(\d/\d)", calls) == ["1/4", "2/4", "3/4", "4/4"]
    assert calls.count("--profile=sanitizer") == 4


def test_jobs_that_run_the_gate_install_it():
    gate = load(GITHUB / "workflows" / "gpu-nightly.yml")["jobs"]["gate"]
    read = load(GITHUB / "workflows" / "record-night.yml")["jobs"]["read"]
    assert any("make VENV=" in step.get("run", "") for step in gate["steps"])
    assert "--editable ./nightly" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert any(
        step.get("run", "").endswith("pip install --quiet . ./nightly") for step in read["steps"]
    )


def test_only_results_of_a_night_on_main_are_recorded():
    read = load(GITHUB / "workflows" / "record-night.yml")["jobs"]["read"]
    for condition in (
        "workflow_run.name == 'gpu-nightly'",
        "head_repository.full_name == github.repository",
        "head_branch ==",
        "conclusion != 'skipped'",
    ):
        assert condition in read["if"]
    (download,) = steps(read, "actions/download-artifact")
    assert download["with"]["run-id"] == "${{ github.event.workflow_run.id }}"
    assert "runner.temp" in download["with"]["path"]  # outside the search paths of Python and pip


def test_every_run_on_main_that_did_not_succeed_opens_an_issue():
    workflow = load(GITHUB / "workflows" / "record-night.yml")
    assert workflow["on"]["workflow_run"]["workflows"] == ["gpu-nightly", "gpu-weekly"]
    report = workflow["jobs"]["report"]
    assert "== 'failure'" not in report["if"]  # a cancelled or timed-out run is red, too
    for condition in (
        "conclusion != 'success'",
        "conclusion != 'skipped'",
        "head_repository.full_name == github.repository",
        "head_branch == github.event.repository.default_branch",
    ):
        assert condition in report["if"]
    assert not steps(report, "actions/download-artifact")


def test_a_release_is_checked_before_it_is_uploaded_and_only_where_that_is_wanted():
    release = load(GITHUB / "workflows" / "release.yml")
    assert release["on"]["release"] == {"types": ["published"]}
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    runs = "\n".join(step.get("run", "") for step in build["steps"])
    places = [runs.index(text) for text in ("-m build", "twine check --strict", "TAG#v", "--help")]
    assert places == sorted(places)
    assert publish["needs"] == "build"
    assert publish["if"] == "github.event_name == 'release' && vars.PUBLISH == 'true'"
    assert publish["environment"] == "pypi"
    # the job that may upload executes nothing but two actions
    assert not [step for step in publish["steps"] if "run" in step]
    assert not steps(publish, "actions/checkout")
    assert "with" not in publish["steps"][-1]


def test_a_release_checks_and_measures_a_claim_with_the_wheel(tmp_path):
    """Only a claim shows that pytest finds the plugin in the wheel."""
    build = load(GITHUB / "workflows" / "release.yml")["jobs"]["build"]
    [script] = [s["run"] for s in build["steps"] if "pytest_aiperf --help" in s.get("run", "")]
    [(name, claim)] = re.findall(
        r"^cat > (\S+) <<'END'\n(.*?)^END$", script, re.MULTILINE | re.DOTALL
    )
    (tmp_path / name).write_text(claim)
    runs = re.findall(r"^venv/bin/python (-m pytest .*)$", script, re.MULTILINE)
    assert runs == [f"-m pytest {name}", f"-m pytest --cpu --quick {name}"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", name],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout


def test_documentation_is_published_from_the_default_branch_where_that_is_wanted():
    docs = load(GITHUB / "workflows" / "docs.yml")
    build, publish = docs["jobs"]["build"], docs["jobs"]["publish"]
    assert "--nitpicky --fail-on-warning" in build["steps"][-2]["run"]
    assert publish["needs"] == "build"
    assert publish["if"].endswith("default_branch && vars.PAGES == 'true'")
    assert len(publish["steps"]) == 1  # the job that may publish executes nothing else


def test_dependabot_keeps_the_pins():
    config = yaml.safe_load((GITHUB / "dependabot.yml").read_text(encoding="utf-8"))
    assert "github-actions" in {u["package-ecosystem"] for u in config["updates"]}


# scripts of the workflows


def run(script, *arguments, cwd, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith("GITHUB")} | variables
    return subprocess.run(
        [sys.executable, str(GITHUB / script), *arguments],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def write_night(path, *results):
    path.parent.mkdir(parents=True, exist_ok=True)
    benchmarks = [{"name": r.claim, "aiperf": to_json(r)} for r in results]
    path.write_text(json.dumps({"benchmarks": benchmarks, "machine_info": {"system": "Linux"}}))


def test_digest_treats_hostile_artifacts_as_data(tmp_path):
    hostile = tmp_path / "hostile"
    two_gpus = result("ch04/c", key="2xh200")
    write_night(hostile / "night-sm90" / "results.json", result("ch06/a"), two_gpus)
    write_night(hostile / "night-evil" / "results.json", result("ch06/b", key="../../../evil"))
    write_night(hostile / "night-name" / "results.json", result("ch06/a\n::add-mask::x"))
    (hostile / "night-torn").mkdir()
    (hostile / "night-torn" / "results.json").write_text("{")
    (hostile / "night-link").mkdir()
    (hostile / "night-link" / "results.json").symlink_to("/etc/passwd")
    summary = tmp_path / "summary.md"
    process = run("digest.py", "hostile", "past", cwd=tmp_path, GITHUB_STEP_SUMMARY=str(summary))
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("skipped:") == 3
    lines = process.stdout.splitlines()
    assert lines[0].startswith("::stop-commands::")
    assert not [line for line in lines[1:-1] if line.startswith("::")]
    assert "ch06" in summary.read_text()
    published = tmp_path / "published"
    files = {str(p.relative_to(published)) for p in published.rglob("*") if p.is_file()}
    assert files == {
        "history/h200.jsonl",
        "history/2xh200.jsonl",
        "accepted/results/2xh200.json",
        "accepted/expectations.yaml",
        "accepted/results/h200.json",
    }
    assert [r.claim for r in read_results(published / "accepted/results/h200.json")] == ["ch06/a"]
    assert not list(tmp_path.glob("evil*"))


def test_digest_does_not_propose_what_failed(tmp_path):
    """A claim that failed because it dropped must not become its own new baseline."""
    dropped = result("ch06/dropped", outcome=Outcome.FAILED, message="speedup has dropped")
    untimed = result("ch06/score", speedup=None, timing=None, outcome=Outcome.FAILED)
    night = tmp_path / "hostile" / "night-sm90" / "results.json"
    write_night(night, result("ch06/fine"), dropped, untimed)
    process = run("digest.py", "hostile", "past", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    published = tmp_path / "published"
    accepted = read_results(published / "accepted/results/h200.json")
    assert [r.claim for r in accepted] == ["ch06/fine"]
    assert "ch06/dropped" not in (published / "accepted/expectations.yaml").read_text()
    [night] = history.read_history(published / "history/h200.jsonl")
    assert "ch06/dropped" in night.claims


def test_digest_keeps_the_history_and_proposes_only_changes(tmp_path):
    write_night(tmp_path / "hostile" / "n" / "results.json", result("ch06/a", quick=True))
    (tmp_path / "expectations.yaml").write_text("schema: 1\nclaims: {}\n")
    (tmp_path / "past").mkdir()
    past = tmp_path / "past" / "b200.jsonl"
    for i in range(20):
        history.append(past, Night(f"2025-01-{i + 1:02}", "r", "b200", "e", {"a": 2.0 + (i > 9)}))
    summary = tmp_path / "summary.md"
    process = run("digest.py", "hostile", "past", cwd=tmp_path, GITHUB_STEP_SUMMARY=str(summary))
    assert process.returncode == 0, process.stderr
    assert "a: 1.500x since 2025-01-11" in summary.read_text()
    published = tmp_path / "published"
    assert (published / "history" / "b200.jsonl").read_text() == past.read_text()
    assert not [p for p in (published / "accepted").rglob("*") if p.is_file()]


GH = """\
#!{python}
import json, sys
arguments = sys.argv[1:]
method, path = arguments[arguments.index("--method") + 1:][:2]
body = json.load(sys.stdin) if "--input" in arguments else None
with open({log!r}, "a") as log:
    log.write(json.dumps([method, path, body]) + "\\n")
replies = {{
    "repos/o/r": {{"default_branch": "main"}},
    "repos/o/r/git/ref/heads/main": {{"object": {{"sha": "m"}}}},
    "repos/o/r/git/ref/heads/nights": {{"object": {{"sha": "t"}}}},
    "repos/o/r/contents/history/h200.jsonl?ref=nights": {{"sha": "old"}},
    "repos/o/r/pulls?state=open&head=o:nights": [],
    "repos/o/r/actions/runs/7": {{
        "created_at": "2026-01-02T03:04:05Z", "html_url": "https://github.com/o/r/actions/runs/7",
        "head_sha": "0123456789abcdef", "conclusion": "cancelled", "name": "gpu-weekly",
    }},
    "repos/o/r/actions/runs/7/jobs?per_page=100": {{"jobs": [
        {{"name": "measure sm90", "html_url": "https://job/1", "conclusion": "success"}},
        {{"name": "gate sm90", "html_url": "https://job/2", "conclusion": "cancelled"}},
    ]}},
    "repos/o/r/actions/runs/7/artifacts?per_page=100": {{"artifacts": [
        {{"name": "night-sm90", "id": 5}},
    ]}},
    "repos/o/r/issues?state=all&labels=red-night&per_page=100": {issues!r},
}}
if method == "GET" and path not in replies:
    sys.exit("gh: Not Found (HTTP 404)" if "broken" not in path else "gh: Bad Gateway (HTTP 502)")
print(json.dumps(replies.get(path, {{}})))
"""


@pytest.fixture
def github(tmp_path):
    """Run commit.py with a fake ``gh``; return its process and its requests other than GET."""
    log, gh = tmp_path / "log", tmp_path / "bin" / "gh"
    gh.parent.mkdir()
    gh.write_text(GH.format(python=sys.executable, log=str(log), issues=[]))
    gh.chmod(0o755)
    files = tmp_path / "published" / "history"
    files.mkdir(parents=True)
    (files / "h200.jsonl").write_text("a night\n")
    (files / "link").symlink_to("/etc/passwd")

    def commit(*arguments):
        path = f"{gh.parent}{os.pathsep}{os.environ['PATH']}"
        process = run("commit.py", *arguments, cwd=tmp_path, PATH=path, GITHUB_REPOSITORY="o/r")
        requests = [json.loads(line) for line in log.read_text().splitlines()]
        return process, [request for request in requests if request[0] != "GET"]

    return commit


def test_commit_appends_to_a_branch(github):
    process, requests = github("nights", "A night", "published", "history")
    assert process.returncode == 0, process.stderr
    put = {"message": "A night", "branch": "nights", "content": "YSBuaWdodAo=", "sha": "old"}
    assert requests == [["PUT", "repos/o/r/contents/history/h200.jsonl", put]]


def test_commit_creates_a_branch(github):
    _, requests = github("new", "A night", "published", "history")
    assert requests[0] == ["POST", "repos/o/r/git/refs", {"ref": "refs/heads/new", "sha": "m"}]
    assert "sha" not in requests[1][2]


def test_commit_takes_no_other_error_for_a_branch_that_is_missing(github):
    process, requests = github("broken-404", "A night", "published", "history")
    assert "HTTP 502" in process.stderr
    assert requests == []


def test_commit_opens_a_pull_request(github):
    _, requests = github("--propose", "nights", "A night", "published")
    assert requests[0] == ["PATCH", "repos/o/r/git/refs/heads/nights", {"sha": "m", "force": True}]
    assert requests[-1][:2] == ["POST", "repos/o/r/pulls"]
    assert requests[-1][2]["base"] == "main"


def test_commit_never_writes_to_main(github):
    process, requests = github("main", "A night", "published")
    assert process.returncode != 0
    assert "does not write there" in process.stderr
    assert requests == []


@pytest.mark.parametrize("is_again", [False, True])
def test_a_red_run_has_one_issue_with_links(tmp_path, is_again):
    log, gh = tmp_path / "log", tmp_path / "bin" / "gh"
    gh.parent.mkdir()
    title = "Red gpu-weekly of 2026-01-02 (7)"
    earlier = [{"title": title}] if is_again else []
    gh.write_text(GH.format(python=sys.executable, log=str(log), issues=earlier))
    gh.chmod(0o755)
    path = f"{gh.parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "GITHUB_REPOSITORY": "o/r"}
    process = run("issue.py", "7", cwd=tmp_path, **env)
    requests = [json.loads(line) for line in log.read_text().splitlines()]
    posts = [request for request in requests if request[0] != "GET"]
    if is_again:
        assert not posts
        return
    [[method, url, body]] = posts
    assert (method, url, body["title"]) == ("POST", "repos/o/r/issues", title)
    assert body["labels"] == ["red-night"]
    assert "[gate sm90](https://job/2)" in body["body"]
    assert "measure sm90" not in body["body"]
    assert "[night-sm90](https://github.com/o/r/actions/runs/7/artifacts/5)" in body["body"]
    assert process.returncode == 0, process.stderr
