"""A radix tree of prompt prefixes beats a dictionary of whole prompts.

The keys and values of a token depend only on the tokens before it, so a prompt can take over those
of any beginning that it shares with an earlier one. A dictionary keyed by the prompt serves only
exact repeats. A radix tree splits prompts into shared runs: requests with the same system prompt
and the same examples compute them once, and each new request only its own question.

Each call serves the whole trace from an empty cache. Both arms compute with the same code, so the
gain is about the ratio of tokens computed: its limit is prompt over question, here 240 over 16,
lowered by first sightings and by the repeats that the dictionary serves as well. Without shared
beginnings the tree only costs its walk. A real cache also has to evict, which is left out here.
"""

import numpy as np
import pytest

from kernels.ch16.prefix_cache import ExactCache, RadixCache, serve
from pytest_aiperf import Bench, Compare


def trace(bench: Bench) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Build requests for random questions of a pool, behind one system prompt and 4 examples."""
    rng = np.random.default_rng(bench.seed)
    scale, width = bench.size(8, check=2), bench.size(128, check=16)
    system = rng.integers(0, 1000, (1, 24 * scale))
    examples = rng.integers(0, 1000, (4, 4 * scale))
    questions = rng.integers(0, 1000, (24, 2 * scale))
    asked = rng.integers(0, len(questions), 16)
    prompts = np.hstack([np.tile(system, (16, 1)), examples[asked % 4], questions[asked]])
    layers = rng.standard_normal((2, 4, width, width), np.float32) * np.float32(width**-0.5)
    return prompts, rng.standard_normal((1000, width), np.float32), layers


def uncached(prompts, embedding, layers):
    """Attend over all prompts at once, in fp64: no cache, no runs, none of the arms' code."""
    x, size = embedding.astype(np.float64)[prompts], len(embedding[0]) ** 0.5
    seen = np.tri(prompts.shape[1])
    for query, key, value, output in layers.astype(np.float64):
        weights = np.exp(x @ query @ (x @ key).swapaxes(1, 2) / size) * seen
        x = x + weights / weights.sum(2, keepdims=True) @ (x @ value) @ output
    return x[:, -1]


@pytest.mark.host
def test_prefix_cache(compare: Compare) -> None:
    compare(
        baseline=lambda *inputs: serve(*inputs, ExactCache()),
        optimized=lambda *inputs: serve(*inputs, RadixCache()),
        inputs=trace,
        reference=uncached,
        metric="wall",
        cache="warm",
    )
