"""A search that judges every candidate finds a faster softmax kernel than the one it started from.

The start is a typical first softmax: three passes over a row, with Triton's defaults. The search
varies one parameter at a time (passes, warps, tile) and keeps what is faster. Long rows make passes
expensive: the rows in flight exceed the L2 cache, so each pass reads memory again. The best
candidate keeps a row in registers and moves half the bytes. torch.compile is the library arm.

A search is as good as its judge, because it finds whatever the judge lets through. Each candidate
must agree with fp64 on fresh inputs, is timed in mirrored rounds (ABBA), and its timed outputs are
checked. Two candidates are wrong on purpose and must be rejected: one overflows, one caches its
results. The search runs once, before the claim is measured. A language model can replace the
generator of candidates: `python -m examples.kernel_search --help`.
"""

import os

import torch

from examples.kernel_search import default_device, fastest, judge, load, search
from kernels.ch20 import softmax_variants
from pytest_aiperf import Compare, Work, evidence

# A profiler runs this test again in a child process, which cannot time candidates: it inherits the
# result of the search.
FOUND = "KERNEL_SEARCH_FOUND"


def searched(device: str) -> str:
    if FOUND in os.environ:
        return os.environ[FOUND]
    # on the CPU candidates are only checked: the two wrong ones, 2 passes and 1 pass
    budget = 9 if device == "cuda" else 4
    history = search(
        softmax_variants.candidates,
        budget,
        lambda candidate: judge(candidate, softmax_variants, device),
    )
    for judged in history:
        assert bool(judged.rejected) == judged.name.startswith("wrong"), judged
    found = fastest(history, softmax_variants.START).source
    if device == "cuda":
        os.environ[FOUND] = found
    return found


def test_kernel_search(compare: Compare) -> None:
    compare(
        baseline=load(softmax_variants.START),
        optimized=load(searched(default_device())),
        library=torch.compile(lambda x: torch.softmax(x, 1), dynamic=False),
        against="previous rung",
        inputs=softmax_variants.inputs,
        work=lambda x: Work(read=x.nbytes, written=x.nbytes),
        reference=softmax_variants.reference,
        evidence=[
            evidence.kernels(max=1),
            evidence.counter("dram__bytes.sum", max=0.8, per="baseline"),
        ],
    )
