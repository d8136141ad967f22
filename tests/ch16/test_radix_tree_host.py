"""Sharing prefixes between chats reuses more tokens than keeping a cache for each chat.

The keys and values (KV) of a token depend only on the tokens before it, so prompts with a common
prefix can share them. The requests here are turns of chats: one of four system prompts, followed by
the chat so far. The baseline keeps the KV of each chat by itself and takes the one with the longest
common prefix. It already finds the chat so far, but every chat stores the system prompt again, and
older chats lose that room. "blocks" hashes each block of 16 tokens together with all tokens before
it (automatic prefix caching in vLLM). So a system prompt is stored once, and the longest cached
prefix is found in whole blocks. "radix", a radix tree (RadixAttention in SGLang), is judged against
"blocks". It finds the last partial block as well, half a block per request on average, so its
advantage is one or two percent here. "radix_64" is judged against blocks of 64 tokens, the page
size of some attention kernels. Their partial blocks are four times as large: the tree reuses 9 %
more tokens than they do.

All caches have room for the same number of tokens, which is checked after each request, and evict
the least recently used; the tree evicts leaves, so a prefix outlives its continuations. The score
is the share of all prompt tokens that were reused. The reused values must be right: the sum of each
prompt's values is compared with the sum of those computed from its first token. The library arm is
a tree with room for all tokens: no cache can reuse more. Blocks reach 0.88 of that and the tree
0.89. Tokens that are not reused must be computed, so the time to the first token depends on the
rest: about 32 % of the tokens with a cache for each chat, 24 % with blocks and 22 % with the tree.
The gain depends on the trace: there is none where prompts share no prefix. The trace is synthetic,
with messages of 10 to 80 tokens, evenly spread; with longer ones, half a block matters less. The
time that lookups and evictions take is not measured.
"""

import numpy as np
import pytest

from kernels.ch16 import lru_prefixes
from pytest_aiperf import Bench, Compare, Score


def chats(bench: Bench) -> tuple[np.ndarray, np.ndarray, int]:
    """Make the turns of chats as zero-padded prompts with lengths; some turns are sent twice."""
    rng = np.random.default_rng(bench.seed)
    turns, open_count = bench.size(1200, check=40), bench.size(24, check=4)

    def message(min_length, max_length):
        length = rng.integers(min_length, max_length)
        return tuple(rng.integers(0, 1000, length).tolist())

    systems = [message(100, 300) for _ in range(4)]
    open_chats, prompts = [], []
    while len(prompts) < turns:
        if len(open_chats) < open_count:
            open_chats.append(systems[rng.choice(4, p=[0.4, 0.3, 0.2, 0.1])])
        chat = rng.integers(len(open_chats))
        open_chats[chat] += message(10, 60)
        prompts += [open_chats[chat]] * (1 + (rng.random() < 0.25))
        open_chats[chat] += message(20, 80)  # the answer
        if len(open_chats[chat]) > 700:
            del open_chats[chat]
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), 1000), int)
    tokens[np.arange(1000) < lengths[:, None]] = np.concatenate(prompts)
    return tokens, lengths, bench.size(6000, check=1000)


def simulate(cache_class):
    def arm(tokens, lengths, capacity):
        sums, reused = lru_prefixes.serve(tokens, lengths, cache_class(capacity))
        return sums, Score(100 * reused / lengths.sum(), "% of tokens reused")

    return arm


def uncached(tokens, lengths, capacity):
    prompts = (row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True))
    return np.array([lru_prefixes.prefill(prompt, ()).sum() for prompt in prompts])


sessions, blocks, large_blocks, radix = map(
    simulate,
    (lru_prefixes.Sessions, lru_prefixes.Blocks, lru_prefixes.LargeBlocks, lru_prefixes.Radix),
)
unlimited = simulate(lambda _: lru_prefixes.Radix(10**9))
RUNGS = {
    "blocks": {"baseline": sessions, "optimized": blocks},
    "radix": {"baseline": blocks, "optimized": radix, "against": "previous rung"},
    "radix_64": {"baseline": large_blocks, "optimized": radix},
}


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_radix_tree_host(compare: Compare, rung: str) -> None:
    compare(**RUNGS[rung], library=unlimited, inputs=chats, reference=uncached, metric="score")
