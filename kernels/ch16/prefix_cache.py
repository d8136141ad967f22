"""Prefill of a batch of prompts, with and without reuse of the keys and values of common prefixes.

A pool of slots holds the keys and values (KV), one slot per token and layer. The tokens to compute
are packed: they follow each other without padding. A request attends to the slots of its prompt in
order, whoever has written them; its own tokens are the last of them, so the causal mask is aligned
to the lower right.

full          Computes all tokens of all prompts.
radix         Inserts each prompt into a radix tree over tokens, and computes only the tokens behind
              the longest prefix that the tree already holds. A prefix may come from an earlier
              prompt of the same batch: each layer writes the KV of all new tokens before any
              request attends.
radix_filled  The same, with the KV of the system prompt already in the pool.
known         By hand, where the caller knows how long the common prefix is: computes it once, then
              the rest of all prompts as a padded batch, with SDPA over concatenated KV.
known_filled  The same, with the KV of the system prompt at hand.

Each arm returns the logits of each prompt's last token, with which the first token is chosen. Full
and radix write the KV of all tokens that they compute into the pool, because decoding needs them.
"""

import itertools
from typing import NamedTuple

import numpy as np
import torch

from kernels.ch15.decoder import attention, causal, norm
from kernels.ch15.decoder128 import HEAD_DIM, block


class Node:
    """Consecutive tokens of a prompt in consecutive slots, and the nodes that follow them."""

    def __init__(self, tokens, first_slot):
        self.tokens, self.first_slot = tokens, first_slot
        self.children = {}  # by their first token

    @property
    def slots(self):
        return range(self.first_slot, self.first_slot + len(self.tokens))

    def split(self, at):
        """Move the tokens from ``at`` on to a new child."""
        rest = Node(self.tokens[at:], self.first_slot + at)
        rest.children, self.children = self.children, {int(self.tokens[at]): rest}
        self.tokens = self.tokens[:at]


class RadixTree:
    """A radix tree over token ids on the host. NumPy compares all tokens of a node in one call."""

    def __init__(self):
        self.root = Node(np.empty(0, np.int64), 0)

    def insert(self, prompt, free):
        """Return the slots of the prompt's tokens as ranges, and how many hold a cached prefix.

        The other tokens get slots from ``free`` on. The last token is never reused, because its
        hidden state is needed.
        """
        node, count, slots = self.root, 0, []
        while count < len(prompt) and int(prompt[count]) in node.children:
            node = node.children[int(prompt[count])]
            shared = common_prefix(node.tokens, prompt[count:])
            if shared < len(node.tokens):
                node.split(shared)
            slots.append(node.slots)
            count += shared
        if count < len(prompt):
            node.children[int(prompt[count])] = Node(prompt[count:], free)
        else:
            slots[-1], count = slots[-1][:-1], count - 1
        return [*slots, range(free, free + len(prompt) - count)], count


def common_prefix(first, second):
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


class Layout(NamedTuple):
    """The tokens to compute, packed, and where their requests begin."""

    tokens: torch.Tensor
    new_offsets: torch.Tensor
    """Where each request's new tokens begin, and where those of the last end."""
    all_offsets: torch.Tensor
    """The same for all tokens of its prompt."""
    most_new: int
    longest: int
    slots: torch.Tensor | None
    """The slots of all tokens of all prompts, or None if nothing is reused."""


def lay_out(prompts, device, free, tree=None):
    """Look up each prompt, and copy the layout of what remains to the GPU."""
    tokens, slots, length = [], [], prompts.shape[1]
    new_offsets = [0]
    for prompt in prompts.numpy():
        count = 0
        if tree is not None:
            slots_of_prompt, count = tree.insert(prompt, free + new_offsets[-1])
            slots += slots_of_prompt
        tokens.append(prompt[count:])
        new_offsets.append(new_offsets[-1] + length - count)
    all_offsets = range(0, prompts.numel() + 1, length)
    offsets = torch.tensor([new_offsets, [*all_offsets]], dtype=torch.int32).to(device)
    index = None
    if new_offsets[-1] < prompts.numel():
        index = np.concatenate([np.arange(run.start, run.stop) for run in slots])
    return Layout(
        torch.from_numpy(np.concatenate(tokens)).to(device),
        *offsets.unbind(),
        max(map(len, tokens)),
        length,
        None if index is None else torch.from_numpy(index).to(device),
    )


def packed_lower_right(q, k, v, layout):
    """Attend from each request's new tokens to all tokens of its prompt.

    FlashAttention 2 aligns the causal mask to the lower right where there are more keys than
    queries.
    """
    if q.is_cuda:
        flash = torch.ops.aten._flash_attention_forward  # noqa: SLF001  as in decoder128
        offsets = layout.new_offsets, layout.all_offsets
        return flash(q, k, v, *offsets, layout.most_new, layout.longest, 0.0, True, False)[0]
    out = torch.zeros_like(q)
    ends = zip(layout.new_offsets.tolist(), layout.all_offsets.tolist(), strict=True)
    for (begin, first), (end, last) in itertools.pairwise(ends):
        qkv = q[None, begin:end], k[None, first:last], v[None, first:last]
        out[begin:end] = lower_right(*qkv)[0]
    return out


def lower_right(q, k, v):
    """Run causal attention on (batch x tokens x heads x HEAD_DIM); the last query sees all keys."""
    if q.is_cuda:
        # causal_lower_right() leads to the same call, but its class cannot be made while a
        # TorchDispatchMode is active, as in the plugin's check
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
        return flash(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, True)[0].transpose(1, 2)
    queries, keys = q.shape[1], k.shape[1]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return attention(q, k, v, attn_mask=mask)


def new_pool(model, slots):
    """Allocate a pool (layers x slots x 2 x heads x HEAD_DIM); keys come first."""
    layers, width = model.out.shape[:2]
    return model.embedding.new_empty(layers, slots, 2, width // HEAD_DIM, HEAD_DIM)


def prefill(model, prompts, pool, free=0, tree=None):
    """Return the logits of each prompt's last token. New tokens get the slots from ``free`` on."""
    layout = lay_out(prompts, model.embedding.device, free, tree)
    x = model.embedding[layout.tokens]
    for layer, kv in zip(model.layers(), pool, strict=True):

        def attend(q, k, v, kv=kv):
            new = kv[free : free + len(q)]
            new[:, 0], new[:, 1] = k, v
            if layout.slots is not None:
                k, v = kv[layout.slots].unbind(1)
            return packed_lower_right(q, k, v, layout)

        x = block(x, layer, attend)
    return logits(model, x[layout.new_offsets[1:] - 1])


def logits(model, x):
    return norm(x) @ model.lm_head.T


def joined(system, users):
    return torch.cat([system.expand(len(users), -1), users], 1)


def full(model, system, users):
    prompts = joined(system, users)
    return prefill(model, prompts, new_pool(model, prompts.numel()))


def radix(model, system, users):
    prompts = joined(system, users)
    return prefill(model, prompts, new_pool(model, prompts.numel()), tree=RadixTree())


def radix_filled(model, system, users):
    """Prefill the system prompt, untimed. Each call then finds it in the tree, and nothing else."""
    free = system.shape[1]
    pool = new_pool(model, free + users.numel())
    prefill(model, system, pool)

    def serve(model, system, users):
        tree = RadixTree()
        tree.insert(system[0].numpy(), 0)
        return prefill(model, joined(system, users), pool, free, tree)

    return serve


def prefix_kv(model, system):
    """Return keys and values of each layer (1 x tokens x heads x HEAD_DIM)."""
    kv, x = [], model.embedding[system.to(model.embedding.device)]

    def attend(q, k, v):
        kv.append((k.contiguous(), v.contiguous()))
        return causal(q, k, v)

    for layer in model.layers():
        x = block(x, layer, attend)
    return kv


def behind_prefix(model, kv, users):
    x = model.embedding[users.to(model.embedding.device)]
    for layer, (prefix_k, prefix_v) in zip(model.layers(), kv, strict=True):

        def attend(q, k, v, prefix_k=prefix_k, prefix_v=prefix_v):
            k = torch.cat([prefix_k.expand(len(k), -1, -1, -1), k], 1)
            v = torch.cat([prefix_v.expand(len(v), -1, -1, -1), v], 1)
            return lower_right(q, k, v)

        x = block(x, layer, attend)
    return logits(model, x[:, -1])


def known(model, system, users):
    return behind_prefix(model, prefix_kv(model, system), users)


def known_filled(model, system, _users):
    kv = prefix_kv(model, system)
    return lambda model, _system, users: behind_prefix(model, kv, users)
