"""Pack tokens for expert parallelism: a row per chosen expert, in the order of the experts.

A pair is a token and one of its chosen experts. All functions return the packed rows, sorted by
expert and within an expert by token, the number of rows of each expert, and the row of each pair,
which the combine step needs to find a token's results (the inverse map).

index_chain        Sort the experts of all pairs, then gather the tokens' rows in this order.
read_once          The same sort. A kernel loads each token's row once and stores it to all rows of
                   its pairs: a scatter instead of a gather.
counting_sort      The same row copy. Two kernels find the rows of the pairs with a counting sort.
quantized_first    FP8, with one scale per 128 elements: quantize the tokens, then pack the codes
                   and scales as counting_sort does.
quantized_in_copy  FP8: one kernel quantizes a row in registers and stores it to its places.
compiled           For torch.compile: sort 16-bit keys, scatter the rows.
compiled_fp8       The same in FP8; torch.compile fuses quantization and scatter.

The counting sort is stable and has no atomics on global memory, so the order is the same in each
call. _count makes one histogram per block of PAIRS pairs. _place adds up the histograms of all
blocks and those of earlier blocks, which gives the row of a block's first pair of each expert. A
pair's row follows from how many earlier pairs of its block have the same expert.
"""

import torch
import triton
import triton.language as tl

E4M3_MAX = 448
"""Largest finite value of float8_e4m3fn."""

MIN_MAGNITUDE = 1e-12
"""Keeps the scale of zeros above 0."""

GROUP = 128
"""Elements per scale, as in DeepSeek-V3."""

PAIRS = 512
"""Pairs per block of the counting sort: 65,536 pairs are 128 blocks, one for almost every SM."""

STEP = 64
"""Pairs, or histograms, that a block of the counting sort looks at per iteration."""

ROW_WARPS = 8
"""Warps per row: with 7,168 bf16 elements, each thread has four 16-byte loads in flight."""


def sorted_pairs(experts, expert_count, key_dtype=torch.int64):
    """Return the pairs in the order of their rows, the rows per expert, and the row of each pair.

    The counts are not from bincount, which waits for the GPU to know the length of its result.
    """
    flat = experts.flatten()
    order = flat.to(key_dtype).argsort(stable=True)
    counts = flat.new_zeros(expert_count).scatter_add_(0, flat, torch.ones_like(flat))
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    return order, counts, positions.view_as(experts)


def index_chain(x, experts, expert_count):
    order, counts, positions = sorted_pairs(experts, expert_count)
    return x[order // experts.shape[1]], counts, positions


@triton.jit
def _count(experts, counts, pairs, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """Count the pairs of each expert in one block of pairs."""
    block, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    chosen = tl.load(experts + pair, mask=pair < pairs, other=0).to(tl.int32)
    tl.store(counts + block * EXPERTS + expert, tl.histogram(chosen, EXPERTS, mask=pair < pairs))


@triton.jit
def _place(  # noqa: PLR0917  a launch passes arguments by position
    experts, counts, totals, positions, pairs, blocks, expert_count,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Find the rows of one block of pairs."""
    block, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)  # in earlier blocks
    for first in range(0, blocks, STEP):
        other_block = first + tl.arange(0, STEP)[:, None]
        in_block = tl.load(
            counts + other_block * EXPERTS + expert[None, :], mask=other_block < blocks, other=0
        )
        total += tl.sum(in_block, 0)
        before += tl.sum(tl.where(other_block < block, in_block, 0), 0)
    first_row = tl.cumsum(total, 0) - total + before
    if block == 0:
        tl.store(totals + expert, total.to(tl.int64), mask=expert < expert_count)

    pair = block * PAIRS + tl.arange(0, PAIRS)
    chosen = tl.load(experts + pair, mask=pair < pairs, other=0).to(tl.int32)
    rank = tl.zeros((PAIRS,), tl.int32)  # earlier pairs of the block with the same expert
    for first in range(0, PAIRS, STEP):
        other_pair = block * PAIRS + first + tl.arange(0, STEP)
        other = tl.load(experts + other_pair, mask=other_pair < pairs, other=-1).to(tl.int32)
        is_equal = other[:, None] == chosen[None, :]
        is_earlier = other_pair[:, None] < pair[None, :]
        rank += tl.sum((is_equal & is_earlier).to(tl.int32), 0)
    row = tl.gather(first_row, chosen, 0) + rank
    tl.store(positions + pair, row.to(tl.int64), mask=pair < pairs)


@triton.jit
def _copy_rows(  # noqa: PLR0917  as above
    x, scales, positions, out, out_scales, width, groups,
    TOP: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Copy one token's row, and its scales if it has GROUPS, to the rows of its pairs."""
    token, column, group = tl.program_id(0).to(tl.int64), tl.arange(0, TILE), tl.arange(0, GROUPS)
    values = tl.load(x + token * width + column, mask=column < width)
    if scales is not None:
        token_scales = tl.load(scales + token * groups + group, mask=group < groups)
    for choice in tl.static_range(TOP):
        row = tl.load(positions + token * TOP + choice)
        tl.store(out + row * width + column, values, mask=column < width)
        if scales is not None:
            tl.store(out_scales + row * groups + group, token_scales, mask=group < groups)


@triton.jit
def _quantize_rows(  # noqa: PLR0917  as above
    x, positions, out, out_scales, groups,
    TOP: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    E4M3_MAX: tl.constexpr, MIN_MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """Quantize one token's row; store it to the rows of its pairs, or as one row per token."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    valid = group[:, None] < groups
    width = groups * GROUP
    values = tl.load(x + token * width + offsets, mask=valid, other=0).to(tl.float32)
    token_scales = tl.maximum(tl.max(tl.abs(values), 1), MIN_MAGNITUDE) / E4M3_MAX
    codes = (values / token_scales[:, None]).to(out.dtype.element_ty)
    for choice in tl.static_range(TOP):
        row = token
        if positions is not None:
            row = tl.load(positions + token * TOP + choice)
        tl.store(out + row * width + offsets, codes, mask=valid)
        tl.store(out_scales + row * groups + group, token_scales, mask=group < groups)


def place(experts, expert_count):
    """Return the rows per expert and the row of each pair, from a counting sort."""
    pairs = experts.numel()
    blocks, bins = triton.cdiv(pairs, PAIRS), triton.next_power_of_2(expert_count)
    counts = torch.empty(blocks, bins, dtype=torch.int32, device=experts.device)
    totals, positions = experts.new_empty(expert_count), torch.empty_like(experts)
    _count[(blocks,)](experts, counts, pairs, bins, PAIRS)
    _place[(blocks,)](
        experts, counts, totals, positions, pairs, blocks, expert_count, bins, PAIRS, STEP,
        num_warps=8,
    )  # fmt: skip
    return totals, positions


def copy_rows(x, positions, scales=None):
    """Return the packed rows, and the packed scales if there are ``scales``."""
    (tokens, top), width = positions.shape, x.shape[1]
    groups = 1 if scales is None else scales.shape[1]
    out = x.new_empty(tokens * top, width)
    out_scales = None if scales is None else scales.new_empty(tokens * top, groups)
    _copy_rows[(tokens,)](
        x, scales, positions, out, out_scales, width, groups,
        top, triton.next_power_of_2(width), triton.next_power_of_2(groups), num_warps=ROW_WARPS,
    )  # fmt: skip
    return out, out_scales


def quantize_rows(x, dtype, positions=None):
    """Return codes and scales: packed with ``positions``, otherwise one row per token."""
    copies, groups = 1 if positions is None else positions.shape[1], x.shape[1] // GROUP
    codes = x.new_empty(len(x) * copies, x.shape[1], dtype=dtype)
    scales = x.new_empty(len(codes), groups, dtype=torch.float32)
    _quantize_rows[(len(x),)](
        x, positions, codes, scales, groups,
        copies, triton.next_power_of_2(groups), GROUP, E4M3_MAX, MIN_MAGNITUDE,
        num_warps=ROW_WARPS,
    )  # fmt: skip
    return codes, scales


def read_once(x, experts, expert_count):
    _, counts, positions = sorted_pairs(experts, expert_count)
    return copy_rows(x, positions)[0], counts, positions


def counting_sort(x, experts, expert_count):
    counts, positions = place(experts, expert_count)
    return copy_rows(x, positions)[0], counts, positions


def quantized_first(x, experts, expert_count, dtype):
    counts, positions = place(experts, expert_count)
    codes, scales = quantize_rows(x, dtype)
    return *copy_rows(codes, positions, scales), counts, positions


def quantized_in_copy(x, experts, expert_count, dtype):
    counts, positions = place(experts, expert_count)
    return *quantize_rows(x, dtype, positions), counts, positions


def scattered(rows, positions):
    """Return each token's row in the rows of its pairs; no temporary copy per pair is written."""
    out = rows.new_empty(positions.numel(), rows.shape[1])
    out[positions] = rows[:, None]
    return out


@torch.compile(fullgraph=True, dynamic=False)
def compiled(x, experts, expert_count):
    # of 8 bits per pass, the radix sort makes 2 over these keys and 8 over 64-bit ones
    _, counts, positions = sorted_pairs(experts, expert_count, torch.int16)
    return scattered(x, positions), counts, positions


@torch.compile(fullgraph=True, dynamic=False)
def compiled_fp8(x, experts, expert_count, dtype):
    _, counts, positions = sorted_pairs(experts, expert_count, torch.int16)
    groups = x.float().unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(2).clamp(min=MIN_MAGNITUDE) / E4M3_MAX
    codes = (groups / scales[..., None]).to(dtype).flatten(1)
    return scattered(codes, positions), scattered(scales, positions), counts, positions
