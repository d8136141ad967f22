"""`doctor --bundle F --run -- COMMAND` packs how a command ended, without secrets."""

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from pytest_aiperf.cli import main
from pytest_aiperf.doctor import doctor, triage
from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import environment
from pytest_aiperf.profilers.command import EXPIRED, INTERRUPTED
from tests.plugin.conftest import PATIENCE_S

TWO_RANKS = """\
import os
import torch.distributed as dist
dist.init_process_group("gloo")
print("loss of rank", dist.get_rank(), flush=True)
if dist.get_rank() == 1:
    raise ValueError("shapes differ")
dist.barrier()
"""

ENVIRON = {
    "PATH": os.environ["PATH"], "HOME": "/home/someone", "API_TOKEN": "q7z", "SETTING": "a/b c&d",
    "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def healthy(monkeypatch):
    """Skip the checks of the machine, which take seconds; its environment is the real one."""
    monkeypatch.setattr(doctor, "checks", lambda _host, links: [])


def ended(*command, deadline_s=PATIENCE_S, environ=ENVIRON):
    """Run a command; return the facts about it, its files and its exit status."""
    files, status = triage.run(command, environ, environment.private(environ), deadline_s)
    return json.loads(files.pop("run.json")), files, status


def log_of(text):
    """Return what is packed of a command that prints a text."""
    Path("text").write_text(text)
    return ended("cat", "text")[1]["run.log"]


def packed():
    with tarfile.open("b.tar.gz") as archive:
        return {
            Path(each.name).name: archive.extractfile(each).read().decode()
            for each in archive.getmembers()
        }


# how it ended


def test_each_rank_of_torchrun_has_its_last_lines():
    Path("train.py").write_text(TWO_RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environ = dict(os.environ) | {"API_TOKEN": "q7z"}
    facts, files, status = ended(*torchrun, "train.py", environ=environ)
    assert (status, facts["status"], facts["ended"]) == (1, 1, "by itself")
    assert {"rank-0.stdout.log", "rank-1.stdout.log", "rank-1.stderr.log"} < set(files)
    for rank in "01":
        assert files[f"rank-{rank}.stdout.log"] == f"loss of rank {rank}\n"
    assert "ValueError: shapes differ" in files["rank-1.stderr.log"]
    assert "ValueError" not in files.get("rank-0.stderr.log", "")
    assert "ValueError: shapes differ" in files["run.log"]


@pytest.mark.parametrize(
    ("script", "status", "how"),
    [
        ("exit 0", 0, "by itself"),
        ("exit 3", 3, "by itself"),
        ("kill -9 $$", 128 + signal.SIGKILL, "by a signal"),
    ],
)
def test_the_exit_status_is_that_of_the_command(script, status, how, healthy, capfd):
    script = f"echo out; echo err >&2; {script}"
    assert main(["doctor", "--bundle", "b.tar.gz", "--run", "--", "sh", "-c", script]) == status
    printed = capfd.readouterr()
    assert printed.out == (f"the command ended with exit status {status}\nwritten: b.tar.gz\n")
    assert printed.err == "out\nerr\n"
    files = packed()
    assert files["run.log"] == "out\nerr\n"
    facts = json.loads(files["run.json"])
    assert (facts["status"], facts["ended"]) == (status, how)


def test_a_broken_machine_is_a_failure_though_the_command_ended_well(monkeypatch):
    def no_gpus(_host):
        raise UsageError("CUDA_VISIBLE_DEVICES=7: there is no such GPU")

    monkeypatch.setattr(doctor.Host, "gpus", no_gpus)
    broken = doctor.Check("torch", state=doctor.State.BROKEN, found="none", todo="install it")
    monkeypatch.setattr(doctor, "checks", lambda _host, links: [broken])
    assert main(["doctor", "--bundle", "b.tar.gz", "--run", "--", "true"]) == 1


def test_a_deadline_interrupts_the_command():
    started = time.monotonic()
    code = "import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('stopped')"
    facts, files, status = ended(sys.executable, "-c", code, deadline_s=1.0)
    assert status == EXPIRED
    assert facts["ended"] == "by its deadline, or with status 124"
    assert files["run.log"] == "stopped\n"
    assert 1.0 <= time.monotonic() - started < triage.GRACE_S


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_the_command_and_write_the_archive(signum):
    words = ["--bundle", "b.tar.gz", "--run", "--", "sh", "-c", "echo $$; exec sleep 600"]
    running = subprocess.Popen(
        [sys.executable, "-m", "pytest_aiperf", "doctor", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # the tests may be a background job, which ignores Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    pid = int(running.stderr.readline())
    running.send_signal(signum)
    assert running.wait(PATIENCE_S) == INTERRUPTED
    assert json.loads(packed()["run.json"])["ended"] == "by Ctrl-C or SIGTERM"
    assert not Path(f"/proc/{pid}").exists()


def test_the_load_of_the_gpus_is_packed_with_their_numbers(monkeypatch):
    idle, busy = "0,1980,,90,1073741824", "100,1980,,650,2147483648"

    class Recorder:
        def __init__(self, uuids, file):
            lines = [
                f"{17.5 + i},{uuid},{load}\n"
                for uuid in uuids
                for i, load in enumerate((idle, busy))
            ]
            file.write_text("".join(lines))

        def stop(self):
            stopped.append(self)

    stopped = []
    monkeypatch.setattr(triage.telemetry, "Recorder", Recorder)
    monkeypatch.setattr(triage, "_SAMPLES", 1)
    files, _ = triage.run(["true"], ENVIRON, {}, PATIENCE_S, uuids=["GPU-a", "GPU-b"])
    head, first, second = files["telemetry.csv"].splitlines()
    assert head == ("time_s,gpu,utilization_percent,sm_mhz,memory_mhz,power_w,memory_used_bytes")
    assert first == "1.0,0,100.0,1980.0,,650.0,2147483648.0"
    assert second.startswith("1.0,1,100.0")
    assert len(stopped) == 1
    assert "telemetry.csv" not in ended("true")[1]


def test_crashes_and_nccl_are_explained_unless_set_otherwise():
    shown = 'echo "$NCCL_DEBUG $PYTHONFAULTHANDLER"'
    assert ended("sh", "-c", shown)[1]["run.log"] == "WARN 1\n"
    environ = {name: value for name, value in ENVIRON.items() if name != "NCCL_DEBUG"}
    assert ended("sh", "-c", shown, environ=environ)[1]["run.log"] == "INFO 1\n"


def test_only_the_last_lines_are_packed():
    lines = log_of("".join(f"line {i}\n" for i in range(1000))).splitlines()
    assert len(lines) == 200
    assert lines[-1] == "line 999"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--bundle", "b.tar.gz", "--run"], "name a command"),
        (["--bundle", "b.tar.gz", "--", "true"], "name a command"),
        (["--run", "--", "true"], "--run adds to an archive"),
        (["--bundle", "b.tar.gz", "--deadline", "3"], "--deadline is for the command of --run"),
        (["--bundle", "b.tar.gz", "--run", "--", "no-such-program"], "is not a program on PATH"),
    ],
)  # fmt: skip
def test_wrong_arguments_say_what_to_do(words, why, monkeypatch, capfd):
    monkeypatch.setattr(doctor, "checks", lambda *_: pytest.fail("checked the machine first"))
    assert main(["doctor", *words]) == 2
    assert why in capfd.readouterr().err
    assert not Path("b.tar.gz").exists()


def test_an_archive_that_cannot_be_written_is_an_error_before_the_command_runs(healthy, capfd):
    words = ["--bundle", "no/where/b.tar.gz", "--run", "--", "touch", "ran"]
    assert main(["doctor", *words]) == 2
    assert "cannot write no/where/b.tar.gz" in capfd.readouterr().err
    assert not Path("ran").exists()


@pytest.mark.parametrize("text", ["no program", "#!/no/such/interpreter\n"])
def test_a_command_that_the_kernel_cannot_run_is_named(text, healthy, capfd):
    Path("job").write_text(text)
    Path("job").chmod(0o755)
    assert main(["doctor", "--bundle", "b.tar.gz", "--run", "--", "./job"]) == 2
    assert capfd.readouterr().err.startswith("doctor: ./job cannot be run: ")


# what is hidden


def test_the_environment_and_the_command_line_are_hidden():
    script = 'echo "$API_TOKEN, $SETTING, $HOME/data, $NCCL_DEBUG"; echo a%2Fb%20c%26d'
    facts, files, _ = ended("sh", "-c", script, "x", "--hf-token", "k", "a/b c&d", "--lr=0.1")
    assert files["run.log"] == "<API_TOKEN>, <SETTING>, ~/data, WARN\n<SETTING>\n"
    assert facts["command"].endswith("x --hf-token <hidden> '<SETTING>' --lr=0.1")


@pytest.mark.parametrize(
    "secret",
    [
        "--wandb-api-key=0123abcd", "password: hunter2", '"secret": "hunter2"', "API_KEY = hunter2",
        "Authorization: Bearer abcdefgh", "https://me:hunter2@index.example/simple",
        "hf_abcdefghijklmnop", "ghp_0123456789abcdef", "AKIAABCDEFGHIJKLMNOP",
        "/home/hunter2/data", "/Users/hunter2/data", "GPU-0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f",
        "10.1.2.3", "fe80::1:2", "2001:db8:0:1:2:3:4:5",
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_hidden(secret):
    hidden = log_of(f"before {secret} after\n")
    parts = ("0123abcd", "hunter2", "abcdefgh", "0123456789", "0a1b", "ABCDEF", "1.2.3", "1:2")
    assert not [part for part in parts if part in hidden]
    assert hidden.startswith("before ")
    assert hidden.endswith(" after\n")


def test_the_names_of_machine_and_user_are_hidden(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17")
    monkeypatch.setattr(triage.getpass, "getuser", lambda: "ann")
    assert log_of("node-17 ann's annex node-170\n") == "<host> <user>'s annex node-170\n"


@pytest.mark.parametrize("home", ["/home/someone", "/", ""])
def test_what_explains_a_failure_stays(home):
    text = (
        "KeyError: 'layers.0.weight'\n"
        "tokens/s: 1200, max_tokens=512, step 3 at 12:30:01\n"
        "node:0 [127.0.0.1] torch 2.11.0 NCCL 2.28.3\n"
    )
    Path("text").write_text(text)
    assert ended("cat", "text", environ=ENVIRON | {"HOME": home})[1]["run.log"] == text


def test_a_secret_that_the_start_of_the_tail_cuts_is_not_packed(monkeypatch):
    monkeypatch.setattr(triage, "_TAIL_BYTES", 64)
    rest = "ter2\n" + "y" * 58 + "\n"  # what is read of the log
    assert log_of("password: hun" + rest) == "y" * 31 + "\n"
