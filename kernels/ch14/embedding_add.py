"""Add a row of a table to each row of ``x``, with or without a hint to the L2 cache.

The table is read again and again, in the order of random ids. Each row of ``x`` is read once, and
each row of the result is written once. The kernel marks these accesses as ``evict_first`` if asked
to: in a set of the L2 cache their lines are then evicted before lines of the table.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _embedding_add(  # noqa: PLR0917  a Triton launch passes arguments by position
    x, table, ids, out, columns, ROW: tl.constexpr, STREAMED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, ROW)
    inside = at < columns
    entry = tl.load(ids + row).to(tl.int64)
    values = tl.load(x + row * columns + at, mask=inside, eviction_policy=STREAMED)
    added = tl.load(table + entry * columns + at, mask=inside)
    total = values.to(tl.float32) + added.to(tl.float32)
    tl.store(out + row * columns + at, total, mask=inside, eviction_policy=STREAMED)


def _add(policy, x, table, ids):
    out, columns = torch.empty_like(x), x.shape[1]
    row = triton.next_power_of_2(columns)
    warps = min(max(row // 512, 1), 8)  # 16 elements per thread
    _embedding_add[(len(x),)](
        x, table, ids, out, columns, ROW=row, STREAMED=policy, num_warps=warps
    )
    return out


def normal(x, table, ids):
    return _add("", x, table, ids)


def evict_first(x, table, ids):
    return _add("evict_first", x, table, ids)
