"""A search whose every candidate is judged finds a faster kernel than the one it started from.

The start is a softmax as one writes it first: three sweeps over a row, with Triton's defaults. The
search turns one knob at a time (sweeps, warps, tile) and keeps what is faster. Long rows make
sweeps dear: the rows in flight outgrow the L2 cache, so that each sweep reads memory again, and the
best candidate, which holds a row in registers, moves half the bytes. torch.compile is the library
arm: for such rows, eager PyTorch's softmax is slower than the start.

A search is as good as its judge, since whatever the judge lets through will be found. Each
candidate is a claim of its own here: it must agree with fp64 on fresh inputs, is timed in mirrored
rounds, and its timed outputs are checked. Two wrong candidates are among them, one that overflows
and one that remembers its answers, and must be rejected. A language model can take the place of the
knobs: `python -m kernels.ch20.kernel_search --help`. The search runs once, outside the clock.
"""

from functools import cache

import torch

from kernels.ch20 import kernel_search
from kernels.ch20.kernel_search import Judged
from pytest_aiperf import Compare, Work, evidence, prepared


@cache
def searched(device: str) -> Judged:
    budget = 9 if device == "cuda" else 4
    history = kernel_search.search(
        kernel_search.turn_knobs, budget, lambda proposal: kernel_search.judge(proposal, device)
    )
    for judged in history:
        assert bool(judged.rejected) == judged.name.startswith("wrong"), judged
    return kernel_search.best(history)


def found(x):
    return kernel_search.loaded(searched(x.device.type).text)


def test_kernel_search(compare: Compare) -> None:
    compare(
        baseline=kernel_search.loaded(kernel_search.START.text),
        optimized=prepared(found),
        library=torch.compile(lambda x: torch.softmax(x, 1), dynamic=False),
        inputs=kernel_search.rows,
        work=lambda x: Work(bytes=2 * x.nbytes),
        reference=lambda x: torch.softmax(x.double(), 1),
        evidence=[
            evidence.kernels(most=1),
            evidence.counter("dram__bytes.sum", most=0.8, per="baseline"),
        ],
    )
