"""Requests a second rise stage by stage: batched, then in a graph over a slab.

16 requests of 128 tokens each want 12 tokens. Served one by one, weights are read and kernels
launched for each of them ("batched", against one by one). From there the time of a token is that of
its launches. "graph" launches a token as a whole, for which token and position must lie on the GPU,
and keys and values in a slab that is written in place. It is judged against the batched service,
the usual first version.

A slab without a graph is no stage of its own: it copies fewer bytes, but a write in place is a
launch as a copy is, and launches are what a token waits for (0.92x with six layers on an H200).
Nor are compiled blocks: the graph has no fewer kernels with them.

What the caller waits for (wall) is judged, prompts included. The gains multiply because each
removes what the one before it left: repetition, then launches and copies. With larger models the
kernels hide their launches, and from the graph on there is little to gain: bytes are what counts
(labs/decode_ladder). The model is sure of its tokens, so that rounding decides none.
"""

import pytest
import torch

from kernels.ch15.decoder import Decoder, forward, random_decoder
from kernels.ch20 import serving
from pytest_aiperf import Bench, Compare, evidence, prepared, static


def requests(bench: Bench) -> tuple[Decoder, torch.Tensor, int]:
    """Make a model in which each token has a clear successor, and prompts."""
    layers, width = bench.size(2, check=2), bench.size(512, check=128)
    kind = {"device": bench.device, "dtype": torch.bfloat16}
    model = random_decoder(layers, width, 1000, **kind)
    model.lm_head[torch.randperm(1000, device=bench.device)] = model.embedding.clone()
    model.out.mul_(0.5)  # what the layers add must not drown the token
    model.down.mul_(0.5)
    shape = bench.size(16, check=3), bench.size(128, check=10)
    return static(model), torch.randint(1000, shape, device=bench.device), bench.size(12, check=4)


def in_fp64(model, prompts, count):
    model, texts = model.to(torch.float64), prompts
    following = (model.embedding @ model.lm_head.T).argmax(1)
    for _ in range(count):
        texts = torch.cat([texts, following[texts[:, -1:]]], 1)
    hidden = forward(model, texts[:, :-1])
    tokens = [serving.choose(model, x) for x in hidden[:, prompts.shape[1] - 1 :].unbind(1)]
    return torch.stack(tokens, 1), hidden[:, -1]


RUNGS = {
    "batched": (serving.one_by_one, serving.batched, 0.1),
    "graph": (serving.batched, prepared(serving.graph), 0.15),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_inference_stack_ladder(compare: Compare, rung: str) -> None:
    baseline, optimized, launches = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        against="naive" if rung == "batched" else "idiomatic",
        inputs=requests,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(most=launches, per="baseline")],
    )
