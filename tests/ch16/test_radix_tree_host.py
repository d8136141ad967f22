"""A cache that knows prompts by their beginnings reuses more tokens than one of whole prompts.

The keys and values of a token depend on the tokens before it alone, so that prompts which begin
alike can share them. Requests here are turns of chats: one of a few system prompts, and all that
was said so far. A dictionary of whole prompts, the usual response cache, finds only what is asked
again word for word. Naming each block of 16 tokens after itself and all before it ("blocks") finds
the longest known beginning in steps of a block; a radix tree of runs ("radix") finds all of it.

Both arms have room for as many tokens, a sixth of all distinct beginnings, and drop the least
recently used: the tree its leaves, so that a beginning outlives its ends. Reused tokens are counted
exactly, and what is reused must be the right thing: each prompt's values are those computed from
its first token. The gain is that of the trace: prompts that share no beginning gain nothing, and
where all repeats are exact, neither. What a reused token saves in time is ch16/prefix_cache.
"""

import numpy as np
import pytest

from kernels.ch16 import lru_prefixes
from pytest_aiperf import Bench, Compare, Score

RUNGS = {"blocks": lru_prefixes.Blocks, "radix": lru_prefixes.Radix}


def chats(bench: Bench) -> tuple[np.ndarray, np.ndarray, int]:
    """Make prompts, padded with zeros, and their lengths: chats, some turns sent twice."""
    rng = np.random.default_rng(bench.seed)
    turns, open_chats = bench.size(600, check=40), bench.size(24, check=4)

    def said(least, most):
        return tuple(rng.integers(0, 1000, rng.integers(least, most)).tolist())

    systems = [said(100, 300) for _ in range(4)]
    running, prompts = [], []
    while len(prompts) < turns:
        if len(running) < open_chats:
            running.append(systems[rng.choice(4, p=[0.4, 0.3, 0.2, 0.1])])
        chat = rng.integers(len(running))
        running[chat] += said(10, 60)
        prompts += [running[chat]] * (1 + (rng.random() < 0.25))
        running[chat] += said(20, 80)  # the answer
        if len(running[chat]) > 700:
            del running[chat]
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), 1000), int)
    tokens[np.arange(1000) < lengths[:, None]] = np.concatenate(prompts)
    return tokens, lengths, bench.size(6000, check=1000)


def served(kind):
    def arm(tokens, lengths, room):
        sums, reused = lru_prefixes.serve(tokens, lengths, kind(room))
        return sums, Score(reused, "tokens reused")

    return arm


def uncached(tokens, lengths, room):
    prompts = (row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True))
    return np.array([lru_prefixes.prefill(prompt, ()).sum() for prompt in prompts])


@pytest.mark.host
def test_the_rest_of_a_split_run_is_dropped_in_its_turn() -> None:
    tree = lru_prefixes.Radix(room=5)
    for prompt in ((1, 2, 3), (4,), (5,), (1, 6)):  # the last one splits the first, and needs room
        tree.insert(prompt, lru_prefixes.prefill(prompt, ()))
    assert [len(tree.match(prompt)) for prompt in ((1, 2, 3), (4,), (5,), (1, 6))] == [1, 1, 1, 2]


@pytest.mark.host
@pytest.mark.parametrize("rung", RUNGS)
def test_radix_tree_host(compare: Compare, rung: str) -> None:
    compare(
        baseline=served(lru_prefixes.Exact),
        optimized=served(RUNGS[rung]),
        inputs=chats,
        reference=uncached,
        metric="score",
    )
