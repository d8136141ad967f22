"""Search for a faster kernel: every candidate is checked and timed by pytest-aiperf.

    python -m examples.kernel_search kernels.ch20.row_tasks:softmax
    python -m examples.kernel_search kernels.ch20.row_tasks:softmax --endpoint https://HOST/v1

A task is a Python module, or an object in a dictionary TASKS of a module (see `Task`). Candidates
come from the task's generator, or from a language model behind an OpenAI-compatible endpoint. A
candidate is the source code of a module with a function ``run``. It is rejected if it raises, if
its result is wrong, or if it caches results: inputs are overwritten in place between calls. The
accepted candidates of a generation are timed in the same rounds, and compared with the task's start
(`pytest_aiperf.measure_each`). With TRITON_INTERPRET=1, which needs no GPU, candidates are only
checked.

Candidates of a language model run in a subprocess. That protects the search from hangs and crashes,
not from malice: run it in a container.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import triton

from pytest_aiperf import Bench, Result, measure_each, prepared
from pytest_aiperf.model import Prepared

TOLERANCE = 1e-3
"""Relative tolerance of an element, plus this share of the result's RMS: fp32 and TF32 pass."""

MODEL_TIMEOUT_S = 300
"""Seconds to wait for the endpoint's reply: a large model may write for minutes."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate with its speedup over the task's start, or with the reason for its rejection."""

    name: str
    source: str
    speedup: float | None = None
    """None if the candidate was rejected, or only checked."""
    rejected: str = ""

    @property
    def summary(self) -> str:
        """The verdict in a few words."""
        return self.rejected or (f"{self.speedup:.2f}x" if self.speedup else "agrees")


Candidate = tuple[str, str]
"""Name and source code."""

Generations = Callable[[list[Judged]], Iterator[list[Candidate]]]
"""Yields lists of candidates that are judged together. Its argument lists all judged candidates,
and grows between one list and the next."""


class Task(Protocol):
    """What a task module defines."""

    START: str
    """Source code of the kernel to beat."""
    PROMPT: str
    """The task in words, for a language model."""

    def generations(self, history: list[Judged]) -> Iterator[list[Candidate]]:
        """Yield lists of candidates. ``history`` grows: it lists those that were judged so far."""

    def inputs(self, bench: Bench) -> object:
        """Draw the arguments of ``run``: one tensor or a tuple of them."""

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Compute the result in fp64."""


@cache
def load(source: str) -> Callable[..., torch.Tensor]:
    """Import a candidate and return its ``run``. Triton reads kernels from a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "candidate.py")
        file.write_text(source)
        spec = importlib.util.spec_from_file_location("candidate", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return cast("Callable[..., torch.Tensor]", module.run)


def default_device() -> str:
    """Return "cuda", or "cpu" where there is no GPU or Triton interprets its kernels."""
    usable = torch.cuda.is_available() and not triton.knobs.runtime.interpret
    return "cuda" if usable else "cpu"


def check(run: Callable[..., torch.Tensor], task: Task, device: str) -> None:
    """Compare with the reference at small sizes, then with new values in the same tensors."""
    inputs = _draw(task, device, seed=1)
    for seed in (1, 2):
        for old, new in zip(inputs, _draw(task, device, seed), strict=True):
            old.copy_(new)
        result, expected = run(*inputs).double(), task.reference(*inputs)
        rms = float(expected.square().mean().sqrt())
        torch.testing.assert_close(result, expected, rtol=TOLERANCE, atol=TOLERANCE * rms)


def _draw(task: Task, device: str, seed: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    inputs = task.inputs(Bench(device=device, seed=seed, full=False))
    return inputs if isinstance(inputs, tuple) else (cast("torch.Tensor", inputs),)


def judge(candidates: Sequence[Candidate], task: Task, device: str) -> list[Judged]:
    """Check candidates and, on a GPU, time those that agree with the reference together."""
    if device == "cpu":
        return [_checked(candidate, task) for candidate in candidates]
    results = measure_each(
        [_arm(source, task) for _, source in candidates],
        baseline=load(task.START),
        inputs=task.inputs,
        reference=task.reference,
        quick=True,
        device="cuda",
    )
    return [_judged(*each) for each in zip(candidates, results, strict=True)]


def _checked(candidate: Candidate, task: Task) -> Judged:
    name, source = candidate
    try:
        check(load(source), task, "cpu")
    except Exception as error:  # noqa: BLE001  a candidate may fail in any way
        return Judged(name, source, rejected=f"{type(error).__name__}: {_on_one_line(str(error))}")
    return Judged(name, source)


def _arm(source: str, task: Task) -> Prepared:
    @cache
    def run() -> Callable[..., torch.Tensor]:
        check(load(source), task, "cuda")
        return load(source)

    # measure_each() first prepares arms while no process times anything on this GPU, which the
    # check would disturb. A candidate that fails the check is not timed.
    return prepared(lambda *_inputs: run())


def _judged(candidate: Candidate, result: Result) -> Judged:
    # without a verdict, either a result is wrong or the times are not valid
    if result.verdict is None or result.speedup is None:
        return Judged(*candidate, rejected=_on_one_line(result.message))
    return Judged(*candidate, result.speedup.value)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def search(
    generations: Generations,
    budget: int,
    judge: Callable[[list[Candidate]], list[Judged]],
    progress: Callable[[Judged], object] = lambda _: None,
) -> list[Judged]:
    """Judge up to ``budget`` candidates; their generator sees the verdicts so far."""
    history: list[Judged] = []
    for generation in generations(history):
        for judged in judge(generation[: budget - len(history)]):
            history.append(judged)
            progress(judged)
        if len(history) >= budget:
            break
    return history


def fastest(history: Sequence[Judged], start: str) -> Judged:
    """Return the fastest candidate that was not rejected, or the start if none is faster.

    If candidates are only checked, return the last one that was not rejected.
    """
    accepted = [judged for judged in reversed(history) if not judged.rejected]
    best = max(accepted, key=lambda judged: judged.speedup or 1, default=None)
    return best if best and (best.speedup or 1) >= 1 else Judged("start", start, 1)


def ask_model(task: Task, endpoint: str, model: str, key: str) -> Generations:
    """Return a generator that asks a language model; each prompt contains the last verdicts."""

    def generations(history: list[Judged]) -> Iterator[list[Candidate]]:
        for number in count(1):
            verdicts = [f"{judged.name}: {judged.summary}" for judged in history[-5:]]
            best = fastest(history, task.START)
            prompt = "\n".join(
                [task.PROMPT, *verdicts, f"The fastest so far:\n```python\n{best.source}```"]
            )
            body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
            request = urllib.request.Request(  # noqa: S310  main() requires http or https
                f"{endpoint.rstrip('/')}/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
            )
            with urllib.request.urlopen(request, timeout=MODEL_TIMEOUT_S) as reply:  # noqa: S310  as above
                answer: str = json.load(reply)["choices"][0]["message"]["content"]
            block = re.search(r"```(?:python)?\n(.*?)```", answer, re.DOTALL)
            yield [(f"{model} {number}", block[1] if block else answer)]

    return generations


def judge_in_subprocess(
    candidates: Sequence[Candidate], task_name: str, device: str, timeout_s: float
) -> list[Judged]:
    """Judge candidates that may hang or crash."""
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder, "candidates.json"), Path(folder, "judged.json")
        request.write_text(json.dumps(candidates))
        command = [sys.executable, "-m", "examples.kernel_search", task_name, "--device", device]
        command += ["--judge", str(request), str(reply)]
        try:
            subprocess.run(command, timeout=timeout_s, check=True)
        except subprocess.SubprocessError as error:
            return [Judged(*candidate, rejected=str(error)) for candidate in candidates]
        return [Judged(**judged) for judged in json.loads(reply.read_text())]


def find_task(task_name: str) -> Any:
    """Import a task, such as ``package.module``, or ``package.module:name`` of its ``TASKS``."""
    module, _, name = task_name.partition(":")
    task: Any = importlib.import_module(module)
    if name:
        if name not in task.TASKS:
            raise LookupError(f"TASKS has {', '.join(task.TASKS)}")
        task = task.TASKS[name]
    for attribute in ("START", "PROMPT", "generations", "inputs", "reference"):
        getattr(task, attribute)
    return task


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a search from the command line."""
    parser = argparse.ArgumentParser(
        "python -m examples.kernel_search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", help="module, or module:name: kernels.ch20.row_tasks:softmax")
    parser.add_argument("--budget", type=int, default=12, help="number of candidates to judge")
    parser.add_argument("--endpoint", help="URL of a language model's API: https://HOST/v1")
    parser.add_argument("--model", default="default", help="name of the model at the endpoint")
    parser.add_argument(
        "--key", default="OPENAI_API_KEY", help="environment variable that holds the API key"
    )
    parser.add_argument(
        "--seconds", type=float, default=120, help="time limit per candidate of a language model"
    )
    parser.add_argument("--out", type=Path, help="file for the source of the fastest candidate")
    parser.add_argument(
        "--device", default=default_device(), choices=("cuda", "cpu"), help="cpu: only check"
    )
    parser.add_argument("--judge", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        task = find_task(options.task)
    except (ImportError, AttributeError, LookupError) as error:
        parser.error(f"{options.task} is no task: {error}")
    if options.judge:
        request, reply = options.judge
        verdicts = judge(json.loads(request.read_text()), task, options.device)
        reply.write_text(json.dumps([asdict(judged) for judged in verdicts]))
        return
    if options.endpoint and not options.endpoint.startswith(("http://", "https://")):
        parser.error("--endpoint must start with http:// or https://")

    history: list[Judged] = []

    def progress(judged: Judged) -> None:
        print(f"{judged.name}: {judged.summary}", flush=True)  # noqa: T201  a command's output
        history.append(judged)
        if options.out:  # each time, because an endpoint may fail and a search may be stopped
            options.out.write_text(fastest(history, task.START).source, encoding="utf-8")

    generations: Generations = task.generations
    judge_all: Callable[[list[Candidate]], list[Judged]] = partial(
        judge, task=task, device=options.device
    )
    if options.endpoint:
        key = os.environ.get(options.key, "")
        generations = ask_model(task, options.endpoint, options.model, key)
        judge_all = partial(
            judge_in_subprocess,
            task_name=options.task,
            device=options.device,
            timeout_s=options.seconds,
        )
    progress(fastest(search(generations, options.budget, judge_all, progress), task.START))


if __name__ == "__main__":
    main()
