"""FlexAttention over a paged KV cache: the block mask lists the pages of each sequence.

All pages form one long sequence of keys that the sequences share, and a block of the mask is a
page. A sequence visits its full pages without a mask; ``visible`` masks the last one, which is
partly filled. The arrays have the shapes of kernels/ch18/paged.py.
"""

import torch
from torch.nn.attention import flex_attention as flex

COMPILED = torch.compile(flex.flex_attention, dynamic=False)


def block_mask(table, lengths, pages, page, queries):
    """Return the mask for this step: in a service, all layers share it."""
    sequences, columns = table.shape
    # the place of each page in its sequence, or -1
    place = table.new_full((sequences, pages), -1)
    place.scatter_(1, table, torch.arange(columns, device=table.device).expand_as(table))

    def visible(sequence, _head, _query, token):
        logical = place[sequence, token // page]
        return (logical >= 0) & (logical * page + token % page < lengths[sequence])

    full = lengths // page
    last = table.gather(1, full.clamp(max=columns - 1)[:, None])
    partial = (lengths % page > 0).int()
    # FlexAttention wants as many columns as there are pages in the pool
    full_pages, last_page = (place.new_zeros(place.shape, dtype=torch.int32) for _ in range(2))
    full_pages[:, :columns] = table
    last_page[:, :1] = last
    return flex.BlockMask.from_kv_blocks(
        kv_num_blocks=partial[:, None, None],
        kv_indices=last_page[:, None, None],
        full_kv_num_blocks=full.int()[:, None, None],
        full_kv_indices=full_pages[:, None, None],
        BLOCK_SIZE=(128, page),
        mask_mod=visible,
        seq_lengths=(queries, pages * page),
        compute_q_blocks=False,
    )


def prepare(q, keys, _values, table, lengths):
    """Make the block mask; return attention with it, which takes the same arguments.

    The mask depends on table and lengths alone, so these must keep their values.
    """
    heads, pages, page, width = keys.shape
    mask = block_mask(table, lengths, pages, page, q.shape[2])

    def attend(q, keys, values, _table, _lengths):
        pools = (pool.view(1, heads, pages * page, width) for pool in (keys, values))
        return COMPILED(q, *pools, block_mask=mask)

    return attend
