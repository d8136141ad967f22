"""A Triton kernel that is compiled once per value of its constexpr ``nonce``."""

import torch
import triton
import triton.language as tl


@triton.jit
def _scaled(x, out, n, nonce: tl.constexpr, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(out + offsets, value * 2 + nonce * 0, mask=offsets < n)


def scaled(x, nonce):
    out = torch.empty_like(x)
    _scaled[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), nonce, 1024)
    return out
