"""The experts of a mixture-of-experts layer on routed tokens, in two ways.

An expert computes (silu(x gate) * (x up)) down; gate and up share one matrix. A choice is one of
the experts that the router selected for a token. All ways copy the tokens to rows in the order of
the experts, run two products and the activation on these rows, and add up each token's results.
They differ in where the rows of an expert begin, and in the products:

padded     Every expert gets as many rows as the fullest one needs, so that a product is one bmm.
grouped    The experts' rows follow each other without gaps; a product is one grouped GEMM, which
           reads the ends of the groups on the GPU.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Routing:
    """The experts of all tokens; a group is the choices of one expert."""

    experts: torch.Tensor  #: Experts of each token.
    positions: torch.Tensor  #: Position of each choice in its group, in the shape of ``experts``.
    ends: torch.Tensor  #: End of each group in a list of all choices, sorted by expert.
    sizes: torch.Tensor  #: Number of choices in each group, on the host.

    def sorted_rows(self):
        """Return the row of each choice if the groups follow each other without gaps."""
        return torch.nn.functional.pad(self.ends, (1, 0))[self.experts] + self.positions


@triton.jit
def _gate(gate_up, out, inner, TILE: tl.constexpr):
    """Apply the gate to one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    valid, gate_pointer = column < inner, gate_up + row * 2 * inner + column
    gate = tl.load(gate_pointer, mask=valid, other=0).to(tl.float32)
    up = tl.load(gate_pointer + inner, mask=valid, other=0).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * inner + column, value.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _combine(  # noqa: PLR0917  a launch passes arguments by position
    results, rows, weights, out, width, TOP: tl.constexpr, TILE: tl.constexpr
):
    """Add up the weighted results of one token."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    valid, total = column < width, tl.zeros((TILE,), tl.float32)
    for choice in tl.static_range(TOP):
        row = tl.load(rows + token * TOP + choice)
        weight = tl.load(weights + token * TOP + choice)
        value = tl.load(results + row * width + column, mask=valid, other=0)
        total += weight * value.to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=valid)


def dispatch(x, rows, count):
    """Copy each token to the rows of its choices, of ``count`` rows."""
    token_of_choice = torch.arange(rows.numel(), device=x.device) // rows.shape[1]
    # rows of padding get token 0: their results are computed, but not used
    return x[rows.new_zeros(count).scatter_(0, rows.flatten(), token_of_choice)]


def gated(gate_up):
    count, inner = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(count, inner)
    _gate[(count,)](gate_up, out, inner, triton.next_power_of_2(inner))
    return out


def combine(results, rows, weights):
    (tokens, top), width = rows.shape, results.shape[1]
    out = results.new_empty(tokens, width)
    _combine[(tokens,)](results, rows, weights, out, width, top, triton.next_power_of_2(width))
    return out


def padded(x, weights, routing, gate_up, down):
    experts, capacity = len(gate_up), int(routing.sizes.max())
    rows = routing.experts * capacity + routing.positions
    tokens = dispatch(x, rows, experts * capacity).view(experts, capacity, -1)
    hidden = gated(torch.bmm(tokens, gate_up).flatten(0, 1)).view(experts, capacity, -1)
    return combine(torch.bmm(hidden, down).flatten(0, 1), rows, weights)


def grouped(x, weights, routing, gate_up, down):
    rows = routing.sorted_rows()
    grouped_mm = torch._grouped_mm  # noqa: SLF001  public only in later versions
    hidden = gated(grouped_mm(dispatch(x, rows, rows.numel()), gate_up, offs=routing.ends))
    return combine(grouped_mm(hidden, down, offs=routing.ends), rows, weights)
