"""Batching, a preallocated KV cache and CUDA graphs each raise a service's requests per second.

Served one by one, each request reads the weights and launches the kernels again; a batch shares
both ("batched", judged against that naive service). Concatenating the new keys and values copies
the whole cache in every step, a read and a write besides the read of attention; written in place
into a preallocated slab, they leave only attention's read ("slab"). In small batches, a step then
still takes as long as its launches, some sixteen kernels per layer: with an H100 or an H200 the GPU
is idle for more than half of the time. A CUDA graph launches all of them with one call
("captured"). For this, tokens and position must live on the GPU, and attention goes over the whole
slab with a mask, which costs the GPU 2 to 3 % more time on H100s and less than 1 % on H200s.
"captured" gains 3.0x to 3.6x on H200s (2.5x to 4.9x), where 4x was the aim; with an earlier layout
of the cache it gained 2.3x to 4.0x on H200s, and 2.3x and 3.6x on H100s. The ratio follows the
host: in two runs, the eager service took 227 to 560 ms. In traces on H200s, the kernels of the
captured service take 98 to 99 ms of its 105 to 109 ms, so little is left to gain from launches.
Capturing is outside the timed region, as compiling is for the library arm, and so is the allocation
of the slab, which "slab" makes once per batch. The library arm of "captured" is faster: it captures
the same step after torch.compile has fused its kernels, which leaves 8,000 instead of 12,900
kernels for all requests, and takes 0.87 to 0.88 times as long on H200s. So fusion is the next step.
Serving engines were not compared. Each stage is judged against the one before.

The model has 4 layers of width 2048 with heads of 128 channels. Prompts and answers have the
quantiles of the Azure LLM inference trace of 2023 (conversations), cut at 2,048 and 704 tokens.
They are divided by eight, except for the prompts of "slab". When a text ends is found out, not
known: the model emits an end token, and after each step the host asks whether all requests of the
batch have ended. So a batch runs until its longest answer ends, which continuous batching would
avoid (ch15/continuous_batching).

A service answers thousands of requests; these claims have 16 to 128, because every batch is served
in the same way and more would only take longer to measure. Each stage has the requests in which its
cost binds, so the gains do not multiply to that of one service. "batched" has 16, because one by
one even these take a good part of a second. Their answers take 418 passes of the model one by one
and 65 in a batch, so by the passes its gain is 6.4x, and 8x, the aim, would need more requests per
batch.

"slab" has one batch of 96 requests with prompts of full length. The bytes that concatenation copies
grow with the square of a text's length, the launches only linearly: in short texts the host
launches too slowly for the copies to matter, in long ones the GPU is the limit. From the lengths,
the copies of these 87 steps move 1.14 TB and attention reads 0.57 TB. In a trace on an H200 the
copies take 287 ms, at 4.0 TB/s, attention 136 ms, at 4.2 TB/s, and all kernels of "slab" 303 ms;
the rest, with 86 TFLOP of prefill, is the same in both services. So the limit of the steps is 3x,
and the service gains 1.7x to 1.8x. Longer answers would come closer to it and take longer to
measure. `cat` is slow on strided views, so the new keys and values are made contiguous first.
ch15/kv_cache_vs_recompute measures the steps alone, in device time. "captured" has 128 requests in
two batches of 64, in which launches outweigh the rest.

All are judged on wall time, prefill included, for the same requests: the ratio of times is that of
requests per second. The graph's gain shrinks with longer prompts, because prefill is the same in
both services and bound by arithmetic, and with larger models, whose kernels hide their launches;
then the bytes moved decide (labs/decode_ladder). Every token has a clear successor, so rounding
changes no decision. The reference knows the answers from a table and computes each text in one
pass, without a cache, but with the same code for the layers, in fp64.
"""

from functools import partial

import numpy as np
import torch

from kernels import azure_trace
from kernels.ch15.decoder import Decoder, random_decoder
from kernels.ch20 import serving
from pytest_aiperf import Bench, Compare, evidence, prepared, static

LONGEST_PROMPT, LONGEST_ANSWER = 2048, 704
"""Longer ones are cut, so that one prompt or answer in a hundred does not decide the padding."""

TEXTS_PER_PASS = 4
"""Texts of similar length that the reference runs at once. The attention scores of a long one take
0.6 GB per layer in fp64, and softmax needs several copies of them."""

Service = tuple[Decoder, torch.Tensor, torch.Tensor, int, int]


def lengths(count: int, tokens: tuple[int, ...], longest: int, divisor: int) -> torch.Tensor:
    """Return lengths at evenly spaced quantiles of the trace, in random order."""
    percents = 100 * (np.arange(count) + 0.5) / count
    of_trace = azure_trace.tokens_at(percents, tokens).clip(max=longest)
    return torch.from_numpy(np.ceil(of_trace / divisor).astype(np.int64))[torch.randperm(count)]


def requests(bench: Bench, batches: int, batch: int, prompt_divisor: int = 8) -> Service:
    """Draw a model in which tokens count down to the end, and prompts with lengths on the host."""
    size, answer_divisor = bench.size(batch, check=3), bench.size(8, check=88)
    prompt_divisor = bench.size(prompt_divisor, check=88)
    layers, width = bench.size(4, check=2), bench.size(2048, check=256)
    vocabulary, count = bench.size(1000, check=64), batches * size
    options = {"device": bench.device, "dtype": torch.bfloat16}
    model = random_decoder(layers, width, vocabulary, **options)
    model.out.mul_(0.5)  # the layers must not outweigh the embedding of the token
    model.down.mul_(0.5)
    fixed = torch.Generator().manual_seed(1)  # the model is static: later prompts must suit it
    others = 1 + torch.randperm(vocabulary - 1, generator=fixed)
    countdown = torch.cat([torch.tensor([serving.END]), others])
    model.lm_head[countdown[:-1]] = model.embedding[countdown[1:]]
    prompt_lengths = lengths(count, azure_trace.PROMPTS, LONGEST_PROMPT, prompt_divisor)
    answer_lengths = lengths(count, azure_trace.ANSWERS, LONGEST_ANSWER, answer_divisor)
    prompts = torch.randint(vocabulary, (count, int(prompt_lengths.max())))
    prompts[torch.arange(count), prompt_lengths - 1] = countdown[answer_lengths]
    longest = LONGEST_ANSWER // answer_divisor
    return static(model), prompts.to(bench.device), prompt_lengths, longest, size


def in_fp64(model, prompts, prompt_lengths, longest, _size):
    """Run the texts, prompt and answer in one pass. Padding at the end does not change a text."""
    model = model.to(torch.float64)
    successor = (model.embedding @ model.lm_head.T).argmax(1).tolist()
    answers, texts = [], []
    for prompt, length in zip(prompts.tolist(), prompt_lengths.tolist(), strict=True):
        text = prompt[:length]
        while text[-1] != serving.END:
            text.append(successor[text[-1]])
        answers.append(text[length:] + [serving.END] * (longest + length - len(text)))
        texts.append(text[:-1])
    states = model.embedding.new_empty(len(texts), model.embedding.shape[1])
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for ids in (by_length[i : i + TEXTS_PER_PASS] for i in range(0, len(texts), TEXTS_PER_PASS)):
        lengths = [len(texts[i]) for i in ids]
        padded = [texts[i] + [serving.END] * (max(lengths) - len(texts[i])) for i in ids]
        x = serving.forward(model, prompts.new_tensor(padded))
        states[ids] = x[range(len(ids)), [length - 1 for length in lengths]]
    return prompts.new_tensor(answers), states


def test_batched_service(compare: Compare) -> None:
    compare(
        baseline=serving.one_by_one,
        optimized=serving.batched,
        against="naive",
        inputs=partial(requests, batches=1, batch=16),
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(max=0.3, per="baseline")],
    )


def test_slab_service(compare: Compare) -> None:
    compare(
        baseline=serving.batched,
        optimized=serving.slab,
        against="previous rung",
        inputs=partial(requests, batches=1, batch=96, prompt_divisor=1),
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.counter("dram__bytes.sum", max=0.6, per="baseline")],
    )


def test_captured_service(compare: Compare) -> None:
    compare(
        baseline=serving.slab,
        optimized=prepared(serving.graph),
        library=prepared(serving.compiled),
        against="previous rung",
        inputs=partial(requests, batches=2, batch=64),
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(max=0.15, per="baseline")],
    )
