"""A Triton kernel: compiled once for each number that it is given as a constant."""

import torch
import triton
import triton.language as tl


@triton.jit
def _scaled(x, out, n, nonce: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < n)
    tl.store(out + at, value * 2 + nonce * 0, mask=at < n)


def scaled(x, nonce):
    out = torch.empty_like(x)
    _scaled[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), nonce, 1024)
    return out
