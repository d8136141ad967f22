"""Search for a fast softmax over long rows; every proposal is judged as a claim is.

A proposal is the text of a Python module with a function `run(x)`. The judge is pytest-aiperf's
own: first it must agree with the fp64 softmax on fresh inputs of several seeds, then it is timed
against the start in mirrored rounds, on re-allocated and re-drawn inputs, and the outputs of the
timed calls are checked again. It is called once before that, after which other values are written
over its input: what remembers its answers is out, like what skips work or fails, however fast.

Proposals come from a generator: a template whose knobs are turned one after the other, each from
the best found so far (two of its proposals are wrong on purpose), or a language model behind an
OpenAI-compatible endpoint. A model's proposals are judged in a process of their own, which guards
against hangs and crashes and not against malice: run that in a container.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count
from pathlib import Path

import torch

from pytest_aiperf.claim.compare import claim_of
from pytest_aiperf.claim.replicate import Plan, measure, speedup
from pytest_aiperf.claim.trial import Trial
from pytest_aiperf.model import Bench, Metric, prepared
from pytest_aiperf.timing.cuda import CudaMachine

BRIEF = Plan(half_width=0.02, least=3, most=3, rounds=2, seconds=0.3)
"""A comparison of half a second: enough to tell variants that differ by some percent."""

HEAD = """import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x, out, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, TILE)
"""

BODIES = {
    3: """    top = tl.full((TILE,), -float("inf"), tl.float32)
    for start in range(0, columns, TILE):
        inside = start + at < columns
        top = tl.maximum(top, tl.load(x + row + start + at, mask=inside, other=-float("inf")))
    top = tl.max(top, 0)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, columns, TILE):
        inside = start + at < columns
        total += tl.exp(tl.load(x + row + start + at, mask=inside, other=-float("inf")) - top)
    total = tl.sum(total, 0)
    for start in range(0, columns, TILE):
        inside = start + at < columns
        value = tl.exp(tl.load(x + row + start + at, mask=inside, other=0) - top) / total
        tl.store(out + row + start + at, value, mask=inside)
""",
    2: """    top = -float("inf")
    total = 0.0
    for start in range(0, columns, TILE):
        inside = start + at < columns
        value = tl.load(x + row + start + at, mask=inside, other=-float("inf"))
        higher = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher), 0)
        top = higher
    for start in range(0, columns, TILE):
        inside = start + at < columns
        value = tl.exp(tl.load(x + row + start + at, mask=inside, other=0) - top) / total
        tl.store(out + row + start + at, value, mask=inside)
""",
    1: """    value = tl.load(x + row + at, mask=at < columns, other=-float("inf"))
    value = tl.exp(value - tl.max(value, 0))
    tl.store(out + row + at, value / tl.sum(value, 0), mask=at < columns)
""",
}
TAIL = """

def run(x):
    out, tile = torch.empty_like(x), {tile}
    _softmax[(len(x),)](x, out, x.shape[1], tile, num_warps={warps})
    return out
"""
REMEMBERING = """

KNOWN = {}
plain = run


def run(x):
    if x.data_ptr() not in KNOWN:
        KNOWN[x.data_ptr()] = plain(x)
    return KNOWN[x.data_ptr()]
"""


@dataclass(frozen=True, slots=True)
class Proposal:
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Judged:
    """A proposal and its speedup over the start, or why it was rejected."""

    name: str
    text: str
    speedup: float | None = None
    rejected: str = ""

    @property
    def verdict(self):
        return self.rejected or (f"{self.speedup:.2f}x" if self.speedup else "agrees")


def variant(sweeps=3, tile=1024, warps=4):
    if sweeps == 1:
        tile = "triton.next_power_of_2(x.shape[1])"
    text = HEAD + BODIES[sweeps] + TAIL.format(tile=tile, warps=warps)
    return Proposal(f"{sweeps} sweeps, tiles of {tile}, {warps} warps", text)


START = variant()


def turn_knobs(history):
    """Propose what differs from the best so far in one knob, knob by knob."""
    yield Proposal("wrong: no maximum", variant(1).text.replace(" - tl.max(value, 0)", ""))
    yield Proposal("wrong: remembers answers", START.text + REMEMBERING)
    best = {"sweeps": 3, "tile": 1024, "warps": 4}
    for knob, values in {"sweeps": (2, 1), "warps": (8, 16, 32), "tile": (4096, 8192)}.items():
        if knob == "tile" and best["sweeps"] == 1:
            continue  # a row is one tile
        tried = {best[knob]: best_speed(history)}
        for value in values:
            yield variant(**best | {knob: value})
            tried[value] = history[-1].speedup or 0
        best[knob] = max(tried, key=tried.get)


def best_speed(history):
    return max([1, *(judged.speedup or 0 for judged in history)])  # the start is at 1


@cache
def loaded(text):
    """Import a proposal; Triton wants its functions in a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "proposal.py")
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("proposal", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.run


def rows(bench: Bench):
    """Make values so far apart that a softmax without the maximum overflows."""
    shape = bench.size(4096, check=3), bench.size(16384, check=2500)
    return 30 * torch.randn(shape, device=bench.device)


@cache
def _clock(device):
    machine = CudaMachine()
    if device == "cpu":
        return machine.clock(None)
    mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    gpus = machine.gpus()
    return machine.clock(next((gpu for gpu in gpus if gpu.uuid.endswith(mine)), gpus[0]))


def judge(proposal, device):
    """Let a proposal prove itself; without a GPU it only has to agree."""
    clock = _clock(device)

    def rehearsed(x):
        run = loaded(proposal.text)
        run(x)
        return run

    try:
        claim = claim_of(
            baseline=loaded(START.text),
            optimized=prepared(rehearsed),
            inputs=rows,
            reference=lambda x: torch.softmax(x.double(), 1),
            work=None,
            library=None,
            metric="device",
            against="previous rung",
            cache="cold",
            precision=None,
        )
        trial = Trial(claim, clock, 1, full=device != "cpu", say=lambda *_, **__: None)
        trial.agreement()
        if device == "cpu":
            return Judged(proposal.name, proposal.text)
        ratio = speedup(measure(trial, Metric.DEVICE, BRIEF))
    except Exception as why:  # noqa: BLE001  a proposal may fail in any way
        return Judged(proposal.name, proposal.text, rejected=f"{type(why).__name__}: {why}")
    finally:
        clock.release()
    return Judged(proposal.name, proposal.text, ratio.value)


def search(generate, budget, judge, say=lambda _: None):
    """Judge up to ``budget`` proposals, which may build on what became of those before."""
    history = []
    for _, proposal in zip(range(budget), generate(history), strict=False):
        history.append(judge(proposal))
        say(history[-1])
    return history


def best(history):
    """Return the fastest that was not rejected, or the start where none is faster."""
    fair = [judged for judged in history if not judged.rejected]
    # where nothing was timed, the last one
    found = max(reversed(fair), key=lambda j: j.speedup or 1, default=None)
    return found if found and (found.speedup or 1) >= 1 else Judged(START.name, START.text, 1)


def ask(endpoint, model, key):
    """Make a generator of what a language model proposes, told what became of the last ones."""
    task = (
        "Write a faster Triton kernel for softmax over the rows (16384 columns) of an fp32 matrix "
        "on the GPU. Answer with one Python module in a ```python block, with a function run(x) "
        "that returns a new tensor. Every answer is checked against fp64 on fresh data."
    )

    def generate(history):
        for number in count(1):
            told = [f"{j.name}: {j.verdict}" for j in history[-5:]]
            now = best(history)
            prompt = "\n".join([task, *told, f"The best so far:\n```python\n{now.text}```"])
            body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
            request = urllib.request.Request(  # noqa: S310  main() sees to its being http
                f"{endpoint.rstrip('/')}/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
            )
            with urllib.request.urlopen(request, timeout=300) as reply:  # noqa: S310  as above
                answer = json.load(reply)["choices"][0]["message"]["content"]
            block = re.search(r"```(?:python)?\n(.*?)```", answer, re.DOTALL)
            yield Proposal(f"{model} {number}", block[1] if block else answer)

    return generate


def judge_apart(device, seconds):
    """Judge in a process of its own, which may hang or crash."""

    def run(proposal):
        with tempfile.TemporaryDirectory() as folder:
            given, got = Path(folder, "proposal.json"), Path(folder, "judged.json")
            given.write_text(json.dumps(asdict(proposal)))
            command = [sys.executable, "-m", __spec__.name, "--judge", str(given), str(got)]
            try:
                subprocess.run([*command, "--device", device], timeout=seconds, check=True)
            except subprocess.SubprocessError as why:
                return Judged(proposal.name, proposal.text, rejected=str(why))
            return Judged(**json.loads(got.read_text()))

    return run


def main():
    parser = argparse.ArgumentParser("python -m kernels.ch20.kernel_search", description=__doc__)
    parser.add_argument("--budget", type=int, default=9, help="how many proposals to judge")
    parser.add_argument("--endpoint", help="ask a model there: https://HOST/v1 or the like")
    parser.add_argument("--model", default="default", help="the model's name at the endpoint")
    parser.add_argument("--key", default="OPENAI_API_KEY", help="variable that holds the API key")
    parser.add_argument("--seconds", type=float, default=120, help="for a model's proposal")
    parser.add_argument("--out", type=Path, help="where to write the best module")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--judge", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge:
        given, got = options.judge
        judged = judge(Proposal(**json.loads(given.read_text())), options.device)
        got.write_text(json.dumps(asdict(judged)))
        return
    if options.endpoint and not options.endpoint.startswith(("http://", "https://")):
        parser.error("--endpoint wants a URL that begins with http:// or https://")

    def say(judged):
        print(f"{judged.name}: {judged.verdict}")  # noqa: T201  a command's output

    if options.endpoint:
        generate = ask(options.endpoint, options.model, os.environ.get(options.key, ""))
        apart = judge_apart(options.device, options.seconds)
        history = search(generate, options.budget, apart, say)
    else:
        history = search(turn_knobs, options.budget, lambda p: judge(p, options.device), say)
    found = best(history)
    say(found)
    if options.out:
        options.out.write_text(found.text)


if __name__ == "__main__":
    main()
