"""x -> a x + b, applied k times to each element: k passes over memory, or one.

passes  PyTorch runs one kernel per step; each reads and writes the whole array.
fused   A Triton kernel reads an element, applies all steps in a register and writes it.
"""

import torch
import triton
import triton.language as tl

A, B = 0.999, 0.01
"""Factor and summand; 256 steps shrink the difference of two inputs by a quarter only."""
BLOCK = 2048
"""Elements per block: each of 128 threads has 16 independent chains of FMAs."""
UNROLL = 8
"""Steps per iteration; k is a multiple. 128 FMAs of a thread outweigh the loop's instructions."""


def passes(x, out, k):
    torch.add(B, x, alpha=A, out=out)
    for _ in range(k - 1):
        torch.add(B, out, alpha=A, out=out)


@triton.jit
def _steps(  # noqa: PLR0917  a Triton launch passes arguments by position
    x,
    out,
    n: tl.constexpr,  # then Triton sees that it is a multiple of 4: 16-byte loads despite the mask
    k: tl.constexpr,
    a: tl.constexpr,
    b: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    for _ in range(k // UNROLL):
        for _ in tl.static_range(UNROLL):
            value = value * a + b
    tl.store(out + at, value, mask=at < n)


def fused(x, out, k):
    n = x.numel()
    _steps[(triton.cdiv(n, BLOCK),)](x, out, n, k, A, B, BLOCK, UNROLL)
