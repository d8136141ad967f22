"""A search that judges every candidate finds faster row kernels than those it starts from.

There are five tasks, from softmax to dividing each row by its largest magnitude. Each starts from a
naive version, which makes two or three passes over a row with Triton's default number of warps. The
search varies one parameter at a time (passes, warps, cache hints, tile) and keeps the fastest
variant. The rows that are in flight together exceed the L2 cache, so each pass of the start reads
its row from memory again. One pass that keeps the row in registers moves a half or two thirds of
the bytes, and the gain is mostly that ratio: 2.0x or 1.5x. Triton's tutorial on softmax does so;
for a search that starts there, only warps and hints are left. Two passes with hints would move as
few, if the second one found the row in the L2 cache. The kernels that torch.compile generates have
this shape, but their bytes were not counted. The list of candidates contains all variants from the
start: the claim is that the search selects a good one and rejects wrong ones, not that it invents
it. The results reach 96 to 97 % of the rate of a copy on an H100 and 94 to 95 % on an H200.
torch.compile, the library arm, takes 13 % longer for log_softmax, and for softmax 17 to 20 % longer
on H200s and 1 % on an H100. It wins for layer_norm, rms_norm and absmax: by 1 to 2 % on an H100,
and by 2 to 4 % on H200s. Where the rows in flight fit in the L2 cache, a second pass costs little
and there is little to find.

A search finds whatever its judge accepts, so the judge must be strict. It compares each candidate
with fp64 on fresh inputs, times all candidates of a generation in the same mirrored rounds, and
verifies results of timed calls, too. Two candidates per task are wrong on purpose and must be
rejected: one makes a typical mistake, such as counting the padding of a row, the other caches its
results. The search runs once, before the claim is measured. A language model can replace the
generator of candidates: `python -m examples.kernel_search --help`.
"""

import os

import pytest
import torch

from examples.kernel_search import default_device, fastest, judge, load, search
from kernels.ch20 import row_tasks
from pytest_aiperf import Compare, Work, evidence

TASKS = row_tasks.TASKS  # through the module: its file is a part of the code that is hashed

# A profiler runs this test again in a child process, which cannot time candidates: it inherits the
# result of the search.
FOUND = "KERNEL_SEARCH_FOUND_"


def searched(name: str, device: str) -> str:
    if FOUND + name in os.environ:
        return os.environ[FOUND + name]
    # on the CPU candidates are only checked: the two wrong ones and two others
    budget = 12 if device == "cuda" else 4
    task = TASKS[name]
    history = search(task.generations, budget, lambda candidates: judge(candidates, task, device))
    for judged in history:
        assert bool(judged.rejected) == judged.name.startswith("wrong"), judged
    found = fastest(history, task.START).source
    if device == "cuda":
        os.environ[FOUND + name] = found
    return found


@pytest.mark.parametrize("task", TASKS)
def test_kernel_search(compare: Compare, task: str) -> None:
    compare(
        baseline=load(TASKS[task].START),
        optimized=load(searched(task, default_device())),
        library=torch.compile(TASKS[task].function, dynamic=False),
        against="naive",
        inputs=TASKS[task].inputs,
        work=lambda x: Work(read=x.nbytes, written=x.nbytes),
        reference=TASKS[task].reference,
        evidence=[evidence.counter("dram__bytes.sum", max=0.8, per="baseline")],
    )
