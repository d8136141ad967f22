"""Triton kernels for softmax over long rows, as source code that a search can vary.

A variant is a number of passes over the row, a tile and a number of warps:

3 passes  The maximum, then the sum, then the result: each pass reads the row again.
2 passes  Online softmax: the sum is rescaled whenever the running max grows.
1 pass    The whole row is one tile and stays in registers.

This module is a task for examples/kernel_search.py.
"""

import torch

HEAD = """import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x, out, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, TILE)
"""

BODIES = {
    3: """    row_max = tl.full((TILE,), -float("inf"), tl.float32)
    for start in range(0, columns, TILE):
        valid = start + column < columns
        value = tl.load(x + row + start + column, mask=valid, other=-float("inf"))
        row_max = tl.maximum(row_max, value)
    row_max = tl.max(row_max, 0)
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, columns, TILE):
        valid = start + column < columns
        value = tl.load(x + row + start + column, mask=valid, other=-float("inf"))
        total += tl.exp(value - row_max)
    total = tl.sum(total, 0)
    for start in range(0, columns, TILE):
        valid = start + column < columns
        value = tl.load(x + row + start + column, mask=valid, other=0)
        value = tl.exp(value - row_max) / total
        tl.store(out + row + start + column, value, mask=valid)
""",
    2: """    running_max = -float("inf")
    total = 0.0
    for start in range(0, columns, TILE):
        valid = start + column < columns
        value = tl.load(x + row + start + column, mask=valid, other=-float("inf"))
        new_max = tl.maximum(running_max, tl.max(value, 0))
        total = total * tl.exp(running_max - new_max) + tl.sum(tl.exp(value - new_max), 0)
        running_max = new_max
    for start in range(0, columns, TILE):
        valid = start + column < columns
        value = tl.load(x + row + start + column, mask=valid, other=0)
        value = tl.exp(value - running_max) / total
        tl.store(out + row + start + column, value, mask=valid)
""",
    1: """    value = tl.load(x + row + column, mask=column < columns, other=-float("inf"))
    value = tl.exp(value - tl.max(value, 0))
    tl.store(out + row + column, value / tl.sum(value, 0), mask=column < columns)
""",
}

TAIL = """

def run(x):
    out, tile = torch.empty_like(x), {tile}
    _softmax[(len(x),)](x, out, x.shape[1], tile, num_warps={warps})
    return out
"""

CACHING = """

CACHE = {}
compute = run


def run(x):
    if x.data_ptr() not in CACHE:
        CACHE[x.data_ptr()] = compute(x)
    return CACHE[x.data_ptr()]
"""

PROMPT = """\
Write a faster Triton kernel for softmax over the rows (16384 columns) of an fp32 matrix on the GPU.
Answer with one Python module in a ```python block. It has a function run(x) that returns a new
tensor. Every answer is checked against fp64 on fresh data."""


def variant(passes=3, tile=1024, warps=4):
    """Return the name and the source code of a variant."""
    row = "triton.next_power_of_2(x.shape[1])"
    source = HEAD + BODIES[passes] + TAIL.format(tile=row if passes == 1 else tile, warps=warps)
    return f"passes={passes}, tile={'row' if passes == 1 else tile}, warps={warps}", source


START = variant()[1]


def candidates(history):
    """Yield names and sources of a coordinate search around the best variant so far.

    The first two are wrong and must be rejected: one overflows, one caches its results by address.
    """
    yield "wrong: no maximum", variant(1)[1].replace(" - tl.max(value, 0)", "")
    yield "wrong: cached results", START + CACHING
    best = {"passes": 3, "tile": 1024, "warps": 4}
    for knob, values in {"passes": (2, 1), "warps": (8, 16, 32), "tile": (4096, 8192)}.items():
        if knob == "tile" and best["passes"] == 1:
            continue  # with one pass the tile is always the row
        speedups = {best[knob]: max([1, *(judged.speedup or 0 for judged in history)])}
        for value in values:
            yield variant(**best | {knob: value})
            speedups[value] = history[-1].speedup or 0
        best[knob] = max(speedups, key=speedups.get)


def inputs(bench):
    """Draw values so far apart that a softmax without the maximum overflows."""
    shape = bench.size(4096, check=3), bench.size(16384, check=2500)
    return 30 * torch.randn(shape, device=bench.device)


def reference(x):
    return torch.softmax(x.double(), 1)
