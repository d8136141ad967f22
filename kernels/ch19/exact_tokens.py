"""Greedy tokens of fp32 logits from logits of lower precision, with a bound on their error.

A product of rounded factors, logit = hidden . weight[token], is off by at most
``margin = 4 * unit * |hidden| * max|weight[token]|``, where ``unit`` bounds the relative error of a
rounded factor. 2 units come from the two factors, 1 from rounding the logit itself, and the rest
covers the accumulation in fp32. A token whose logit lies more than two margins below the largest
one therefore cannot win. All others are candidates: ``_collect`` lists them, and ``_rescore``
computes their logits again from the fp32 weights and keeps the largest. There are as many
candidates as the bound admits, in the worst case all tokens, so the result needs no assumption
about the logits. Frequent words have small numbers and are candidates most often, so most
candidates of a sequence are close together: the list spreads them evenly among the programs.
"""

import torch
import triton
import triton.language as tl

from kernels.ch01.fp32_products import fp32_products

TILE = 2048
"""Logits per program: 4 KiB of bf16."""

UNIT_BF16 = 2.0**-8
"""Largest relative error of a value rounded to bf16."""

UNIT_TF32 = 2.0**-10
"""Largest relative error of a value truncated to TF32, which tensor cores do with fp32 operands."""

UNIT_SPLIT_BF16 = 2.0**-13
"""Unit of products of values that are split into the sum of two bf16 values, with a relative error
of at most 2^-16: most of it is for the accumulation of 4,096 terms in fp32."""

PROGRAMS = 1024
"""Programs that share the candidates: some eight per SM, each with a row of 16 KiB in flight."""


@triton.jit
def _collect(  # noqa: PLR0917  a Triton launch passes arguments by position
    logits, thresholds, candidates, count, vocabulary, TILE: tl.constexpr
):
    """Append the positions of a tile's candidates among all logits to a list."""
    row = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    position = row.to(tl.int64) * vocabulary + token
    logit = tl.load(logits + position, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    is_candidate = (logit >= tl.load(thresholds + row)).to(tl.int32)
    found = tl.sum(is_candidate, 0)
    if found > 0:
        start = tl.atomic_add(count, found)
        index = start + tl.cumsum(is_candidate, 0) - 1
        tl.store(candidates + index, position, mask=is_candidate == 1)


@triton.jit
def _rescore(  # noqa: PLR0917  as above
    candidates, count, hidden, weight, best, vocabulary, WIDTH: tl.constexpr
):
    """Compute the fp32 logits of the listed candidates; keep the best token of each sequence."""
    column = tl.arange(0, WIDTH)
    for i in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        position = tl.load(candidates + i)
        row, token = position // vocabulary, position % vocabulary
        x = tl.load(hidden + row * WIDTH + column)
        w = tl.load(weight + token * WIDTH + column)
        exact = tl.sum(x * w, 0)
        # one integer orders by logit, then by the smaller token, so that one atomic keeps both
        bits = exact.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        tl.atomic_max(best + row, (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token))


def rescored(logits, margin, hidden, weight):
    """Return the token with the largest fp32 logit among those within two margins of the top.

    Also return the number of these candidates, of all sequences together.
    """
    rows, vocabulary = logits.shape
    thresholds = logits.amax(1).float() - 2 * margin
    candidates = torch.empty(rows * vocabulary, dtype=torch.int64, device=logits.device)
    count = torch.zeros(1, dtype=torch.int32, device=logits.device)
    best = torch.full((rows,), torch.iinfo(torch.int64).min, device=logits.device)
    _collect[rows, triton.cdiv(vocabulary, TILE)](
        logits, thresholds, candidates, count, vocabulary, TILE=TILE
    )
    _rescore[(PROGRAMS,)](
        candidates, count, hidden, weight, best, vocabulary, WIDTH=weight.shape[1]
    )
    return 0x7FFFFFFF - (best & 0x7FFFFFFF), count


def largest_norm(weight):
    return torch.linalg.vector_norm(weight, dim=1).amax()


def fp32(hidden, weight):
    with fp32_products("ieee"):
        return (hidden @ weight.T).argmax(1)


def tf32(_, weight):
    norm = largest_norm(weight)

    def greedy_tokens(hidden, weight):
        with fp32_products("tf32"):
            logits = hidden @ weight.T
        margin = 4 * UNIT_TF32 * norm * torch.linalg.vector_norm(hidden, dim=1)
        return rescored(logits, margin, hidden, weight)

    return greedy_tokens


def bf16(_, weight):
    norm, weight_bf16 = largest_norm(weight), weight.bfloat16()

    def greedy_tokens(hidden, weight):
        logits = hidden.bfloat16() @ weight_bf16.T
        margin = 4 * UNIT_BF16 * norm * torch.linalg.vector_norm(hidden, dim=1)
        return rescored(logits, margin, hidden, weight)

    return greedy_tokens


def split_bf16(_, weight):
    norm, (high, low) = largest_norm(weight), split(weight)

    def product(x, part):
        if x.is_cuda:
            return torch.mm(x, part.T, out_dtype=torch.float32)
        return x.float() @ part.float().T

    def greedy_tokens(hidden, weight):
        hidden_high, hidden_low = split(hidden)
        # reads the high part once; the product of both low parts is below the error
        of_high, of_low = product(torch.cat([hidden_high, hidden_low]), high).chunk(2)
        logits = product(hidden_high, low).add_(of_low).add_(of_high)
        margin = 4 * UNIT_SPLIT_BF16 * norm * torch.linalg.vector_norm(hidden, dim=1)
        return rescored(logits, margin, hidden, weight)

    return greedy_tokens


def split(x):
    """Return two bf16 values whose sum is nearly x."""
    high = x.bfloat16()
    return high, (x - high).bfloat16()
