"""Decode steps over a paged KV cache, for a batch whose size changes from step to step.

eager    Launches each step operation by operation, for exactly its rows.
buckets  One CUDA graph per batch size in BUCKETS. A step runs the smallest graph that fits.
exact    One CUDA graph per batch size that will occur, which a server does not know: no padding.

A batch has one row per sequence, with all that the step needs to know of it: the block table, then
the slot (where in the pool the new key and value go), the token, and the length with this token. A
graph reads its rows from a tensor that all graphs share and writes hidden states to another one.
Padding has the slot NO_SLOT, so it stores nothing, and the length 1, so its attention reads a
single key. All else in a step treats each row alone: padding changes no other row.

Pools are layers x key heads x pages x PAGE x HEAD_DIM. Calls append to a copy of the pool that they
are given, because a call's inputs must stay as they are.
"""

from bisect import bisect_left
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.ch15.decoder import capture_graph, norm, output_and_mlp
from kernels.ch18.paged import paged_attention

HEAD_DIM = 128
"""Channels per attention head."""

GROUP = 4
"""Query heads per key head."""

PAGE = 16
"""Tokens per page."""

SLOT, TOKEN, LENGTH = -3, -2, -1
"""Columns of a batch after the block table."""

NO_SLOT = -1
"""The slot of padding."""

BUCKETS = 1, 2, 4, *range(8, 65, 8)
"""Batch sizes with a graph. From 8 on, at most 7 rows are padding, and in small batches at most
half of them."""


class Model(NamedTuple):
    """Weights, one tensor per kind for all layers. Inputs are rows: a layer is ``x @ weight``."""

    embedding: torch.Tensor
    """Vocabulary x width."""
    qkv: torch.Tensor
    """Layers x width x (width + 2 width / GROUP): queries, then keys, then values."""
    out: torch.Tensor
    """Layers x width x width."""
    up: torch.Tensor
    """Layers x width x 4 width."""
    down: torch.Tensor
    """Layers x 4 width x width."""


def random_model(layers, width, vocabulary, **options):
    """Draw weights scaled so that each layer adds about as much to x as the embedding does."""
    qkv_width = width + 2 * width // GROUP
    shapes = (width, qkv_width), (width, width), (width, 4 * width), (4 * width, width)
    weights = [torch.randn(layers, *s, **options).mul_(s[0] ** -0.5) for s in shapes]
    return Model(torch.randn(vocabulary, width, **options), *weights)


@triton.jit
def _append(  # noqa: PLR0917  a launch passes arguments by position
    k, v, keys, values, slots, stride, pool_slots, D: tl.constexpr
):  # fmt: skip
    """Store a row's key and value in the pool, unless the row is padding."""
    row, head, column = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    slot = tl.load(slots + row)
    mask = (slot >= 0) & (column < D)
    source = row * stride + head * D + column
    target = (head * pool_slots + slot).to(tl.int64) * D + column
    tl.store(keys + target, tl.load(k + source), mask=mask)
    tl.store(values + target, tl.load(v + source), mask=mask)


def append(k, v, keys, values, slots):
    """Append to a layer's pools; ``k`` and ``v`` are (rows x channels), with the same strides."""
    grid, pool_slots = (len(k), len(keys)), keys.shape[1] * keys.shape[2]
    _append[grid](k, v, keys, values, slots, k.stride(0), pool_slots, D=HEAD_DIM)


def decode(model, pools, batch):
    """Run the model on one token per row of a batch; return the hidden states (rows x width)."""
    # copies: Triton compiles a kernel anew for a pointer that is not a multiple of 16
    slots, lengths = batch[:, SLOT].clone(), batch[:, LENGTH].clone()
    x = model.embedding[batch[:, TOKEN]]
    width = x.shape[1]
    for qkv, *weights, keys, values in zip(*model[1:], *pools, strict=True):
        q, k, v = (norm(x) @ qkv).split([width, width // GROUP, width // GROUP], 1)
        append(k, v, keys, values, slots)
        heads = q.unflatten(1, (-1, GROUP, HEAD_DIM)).contiguous()
        # the block table is the first columns, so the whole batch can be passed in its place
        attended = paged_attention(heads, keys, values, batch, lengths)
        x = output_and_mlp(x, attended.flatten(1), *weights)
    return x


def run_steps(step, model, batches, sizes):
    """Run all steps; return hidden states (steps x rows x width), 0 where a step has no row."""
    hidden = model.embedding.new_zeros(*batches.shape[:2], model.embedding.shape[1])
    for batch, size, out in zip(batches, sizes, hidden, strict=True):
        out[:size] = step(batch[:size])
    return hidden


def eager(_model, keys, values, _batches, _sizes):
    pools = keys.clone(), values.clone()

    def run(model, _keys, _values, batches, sizes):
        return run_steps(lambda batch: decode(model, pools, batch), model, batches, sizes)

    return run


class Graphs:
    """One graph per batch size, and the tensors that all of them read and write."""

    def __init__(self, model, pools, largest, columns, sizes):
        self.model, self.pools, self.sizes = model, pools, sizes
        device = model.embedding.device
        self.batch = torch.zeros(largest, columns, dtype=torch.long, device=device)
        self.batch[:, SLOT], self.batch[:, LENGTH] = NO_SLOT, 1
        self.padding = self.batch.clone()
        self.hidden = model.embedding.new_zeros(largest, model.embedding.shape[1])
        # one memory pool for the intermediate values of all graphs, because only one runs at a
        # time; the largest comes first, so that the others fit into its blocks
        on_gpu = device.type == "cuda"
        shared = [torch.cuda.graph_pool_handle()] if on_gpu else []
        self.replay = {}
        for size in sorted(sizes, reverse=True):
            step = partial(self.step, size)
            self.replay[size] = capture_graph(step, *shared).replay if on_gpu else step

    def step(self, size):
        self.hidden[:size] = decode(self.model, self.pools, self.batch[:size])

    def run(self, batch):
        rows = len(batch)
        size = self.sizes[bisect_left(self.sizes, rows)]
        self.batch[:rows] = batch
        if rows < size:
            # otherwise rows of an earlier step would append to pages that others may have by now
            self.batch[rows:size] = self.padding[rows:size]
        self.replay[size]()
        return self.hidden[:rows]


def buckets(model, keys, values, batches, _sizes):
    largest = batches.shape[1]
    sizes = [*(size for size in BUCKETS if size < largest), largest]
    return _in_graphs(sizes, model, keys, values, batches)


def exact(model, keys, values, batches, sizes):
    return _in_graphs(sorted(sizes), model, keys, values, batches)


def _in_graphs(sizes, model, keys, values, batches):
    graphs = Graphs(model, (keys.clone(), values.clone()), *batches.shape[1:], sizes)

    def run(model, _keys, _values, batches, sizes):
        return run_steps(graphs.run, model, batches, sizes)

    return run
