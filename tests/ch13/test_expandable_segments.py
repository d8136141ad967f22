"""A cache that grows reserves less memory with expandable segments than with PyTorch's default.

Each of eight layers appends 128 tokens at a time to its keys and values (torch.cat), up to 2,048
tokens. So each step allocates a tensor that is a little larger than the one it frees. By default,
PyTorch's caching allocator requests a segment of device memory for each tensor above 10 MiB, and
keeps it for later tensors that fit. The tensors of the next step are larger, and segments cannot be
merged: memory that is reserved but not allocated (fragmentation) accumulates until the device is
full, and only then are unused segments returned. With expandable segments there is one range of
addresses, into which the allocator maps device memory page by page. Neighboring free blocks merge,
and the range grows at its end. The library arm takes the least memory: it allocates each layer's
cache once, at its final length. Where that length is known, it beats both settings, and it does not
copy earlier tokens again.

The score is the memory that PyTorch has reserved after a call, over the size of the full caches,
256 MiB. The peak of the allocated bytes is the same, so the difference is fragmentation: 4.4x less
is reserved with expandable segments, on an H200 and on an H100. The test also judges the score
itself: by default it must be at least 5, and with expandable segments at most 2. 1694 and 382 MiB
are reserved, and 258 by the library arm. At most 287 MiB are allocated at a time: the caches, and
the last one's predecessor. The aim for expandable segments was to reserve 1.1 times these 287 MiB.
It is 1.33 times on an H200. A likely reason is that a layer frees a block that is too small for its
next tensor, and that such holes inside the range stay mapped until their neighbors are free; what
the range held was not examined.

The price of mapping is time, which is not judged: each call begins without cached memory, and a
time that includes requests for device memory says nothing about later calls, which find it mapped.
So the other aim, at most 5 % more time, was not measured. Tensors whose sizes recur, as in a
training loop of fixed shapes, do not fragment the default allocator either.

Programs set ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` before they start. Here both arms
run in one process, where a private function of PyTorch changes the setting for one call.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pytest_aiperf import Bench, Compare, Score, evidence

LENGTH, CHUNK = 2048, 128
LAYERS, BATCH, HEADS, WIDTH = 8, 4, 8, 128

MIN_DEFAULT = 5
"""Least score of the default allocator: it reserves most of its memory for sizes that are gone."""

MAX_EXPANDABLE = 2
"""Highest score of expandable segments: more of their memory is used than not."""

Tokens = tuple[torch.Tensor, torch.Tensor]


def tokens(bench: Bench) -> Tokens:
    """Draw one query per layer, and the keys and values of all tokens."""
    options = {"device": bench.device, "dtype": torch.bfloat16}
    q = torch.randn(LAYERS, BATCH, HEADS, 1, WIDTH, **options)
    return q, torch.randn(LAYERS, 2, BATCH, HEADS, LENGTH, WIDTH, **options)


def concatenated(q, kv):
    """Append each chunk to the cache of each layer; return what the query attends to by then."""
    caches = [None] * len(q)
    outputs = []
    for chunk in kv.split(CHUNK, dim=4):
        for i, new in enumerate(chunk):
            caches[i] = new.clone() if caches[i] is None else torch.cat([caches[i], new], 3)
            outputs.append(scaled_dot_product_attention(q[i], *caches[i]))
    return torch.stack(outputs)


def preallocated(q, kv):
    caches = [torch.empty_like(layer) for layer in kv]
    outputs = []
    for end in range(CHUNK, LENGTH + 1, CHUNK):
        new = slice(end - CHUNK, end)
        for i, cache in enumerate(caches):
            cache[..., new, :] = kv[i, ..., new, :]
            outputs.append(scaled_dot_product_attention(q[i], *cache[..., :end, :]))
    return torch.stack(outputs)


def reserving(run, is_expandable, q, kv):
    """Run with or without expandable segments; the score is reserved over the caches' memory."""
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{is_expandable}")
    try:
        outputs = run(q, kv)
        reserved = torch.cuda.memory_reserved() - reserved
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    return outputs, Score(reserved / kv.nbytes, "bytes reserved per byte of the caches", "lower")


def in_fp64(q, kv):
    keys, values = kv.double().unbind(1)
    logits = (keys @ q.double().mT).squeeze(-1) / q.shape[-1] ** 0.5
    outputs = []
    for end in range(CHUNK, LENGTH + 1, CHUNK):
        weights = logits[..., :end].softmax(-1)
        outputs.append((weights[..., None] * values[..., :end, :]).sum(-2, keepdim=True))
    return torch.cat(outputs)


@pytest.mark.gpu
def test_expandable_segments(compare: Compare) -> None:
    result = compare(
        baseline=partial(reserving, concatenated, False),
        optimized=partial(reserving, concatenated, True),
        library=partial(reserving, preallocated, False),
        inputs=tokens,
        reference=in_fp64,
        metric="score",
        # both arms allocate the same bytes, so this holds for both: the difference is fragmentation
        evidence=[evidence.peak_memory(max=1.05, per="baseline")],
    )
    for replicate in result.timing.replicates if result.timing else ():
        [score] = replicate.rounds  # of a score: one value per arm
        assert score.seconds["baseline"][0] >= MIN_DEFAULT
        assert score.seconds["optimized"][0] <= MAX_EXPANDABLE
