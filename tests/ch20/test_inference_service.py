"""Batching, then CUDA-graph capture over a preallocated KV cache, raises requests per second.

Each request has a prompt of 32 tokens and wants 12 tokens. Served one by one, each reads the
weights and launches the kernels again; a batch shares both. The first claim compares the two for 16
requests: the gain is about their number, and more would only take longer to measure. A decode step
then takes as long as its launches, and concatenating the new keys and values copies the whole
cache. A CUDA graph launches a step at once. For this, tokens and position must live on the GPU, and
keys and values are written in place into preallocated slabs. Of the 6.9 ms that it saves on an
H200, 4 are the GPU's: no concatenation (5.8 ms), but attention over the whole slab. The rest are
launches. The second claim compares it with the batched service, the usual first version, for 64
requests.

The model has 8 layers of width 2048. In a captured step the GEMMs take the most time, which read
0.8 GB of weights; attention is second. Both are judged on wall time, prefill included, for the same
requests: the ratio of times is that of requests per second. The graph's gain shrinks with longer
prompts, because prefill is the same in both services and bound by arithmetic, and with larger
models, whose kernels hide their launches; then the bytes moved decide (labs/decode_ladder). Every
token has a clear successor, so rounding changes no decision.
"""

from functools import partial

import torch

from kernels.ch15.decoder import Decoder, forward, random_decoder
from kernels.ch20 import serving
from pytest_aiperf import Bench, Compare, evidence, prepared, static


def requests(bench: Bench, request_count: int) -> tuple[Decoder, torch.Tensor, int]:
    """Draw a model in which each token has a clear successor, and prompts."""
    layers, width = bench.size(8, check=2), bench.size(2048, check=128)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    model = random_decoder(layers, width, 1000, **options)
    model.lm_head[torch.randperm(1000, device=bench.device)] = model.embedding.clone()
    model.out.mul_(0.5)  # the layers must not outweigh the embedding of the token
    model.down.mul_(0.5)
    shape = bench.size(request_count, check=3), bench.size(32, check=10)
    return static(model), torch.randint(1000, shape, device=bench.device), bench.size(12, check=4)


def in_fp64(model, prompts, count):
    model, tokens = model.to(torch.float64), prompts
    successor = (model.embedding @ model.lm_head.T).argmax(1)
    for _ in range(count):
        tokens = torch.cat([tokens, successor[tokens[:, -1:]]], 1)
    hidden = forward(model, tokens[:, :-1])
    states = hidden[:, prompts.shape[1] - 1 :].unbind(1)
    return torch.stack([serving.greedy_token(model, x) for x in states], 1), hidden[:, -1]


def test_batched_service(compare: Compare) -> None:
    compare(
        baseline=serving.one_by_one,
        optimized=serving.batched,
        against="naive",
        inputs=partial(requests, request_count=16),
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(max=0.1, per="baseline")],
    )


def test_captured_service(compare: Compare) -> None:
    compare(
        baseline=serving.batched,
        optimized=prepared(serving.graph),
        inputs=partial(requests, request_count=64),
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(max=0.15, per="baseline")],
    )
