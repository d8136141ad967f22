"""A small language model with the output matrix of a large one, for claims about real logits.

It predicts the next word of the source code of PyTorch, which every installation has, from the
words before it (a feed-forward language model after Bengio et al., 2003). Its vocabulary and its
width are those of a model with eight billion weights. It has one layer, because it is trained in
the setup of the claim. So rows of the output matrix, hidden states and logits are what training
makes of them, not what a claim chooses.
"""

import re
from collections import defaultdict
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy, embedding, gelu, rms_norm

CONTEXT, CHANNELS = 8, 128
"""Words that a prediction depends on, and the channels of the embedding of one of them."""

BATCH = 2048
"""Predictions per training step."""

WORD = re.compile(r" ?\w+|\s+|[^\w\s]", re.ASCII)
"""A word, white space or a symbol. ASCII takes less time and differs in a few comments at most."""


class Model(NamedTuple):
    """The weights, all in fp32."""

    words: torch.Tensor
    """The embedding: vocabulary x CHANNELS."""
    up: torch.Tensor
    """CONTEXT * CHANNELS x width."""
    down: torch.Tensor
    """Width x width."""
    output: torch.Tensor
    """The output matrix: vocabulary x width. Logits are ``hidden @ output.T``."""


@cache
def texts(vocabulary, files):
    """Return the words of the training text and of the test text, as numbers by frequency.

    A word includes the space before it, as in the vocabularies of language models. Words beyond the
    ``vocabulary`` most frequent ones are left out. Every tenth file is part of the test text.
    """
    paths = sorted(Path(torch.__file__).parent.rglob("*.py"))[:files]
    ids = defaultdict(count().__next__)  # by word, in the order of their first use
    split = (WORD.findall(path.read_text("utf-8", "ignore")) for path in paths)
    of_files = [
        torch.from_numpy(np.fromiter(map(ids.__getitem__, words), np.int64)) for words in split
    ]
    by_frequency = torch.cat(of_files).bincount().argsort(descending=True, stable=True)
    number = torch.empty_like(by_frequency)
    number[by_frequency] = torch.arange(len(number))
    numbers = [number[file] for file in of_files]
    frequent = [file[file < vocabulary] for file in numbers]
    test = frequent[::10]
    del frequent[::10]
    return torch.cat(frequent), torch.cat(test)


def contexts_of(text, ends):
    """Return the CONTEXT words before each of the positions ``ends``."""
    return text[ends[:, None] - torch.arange(CONTEXT, 0, -1, device=ends.device)]


def hidden_states(model, contexts):
    """Return the normalized hidden state (width) that follows each context."""
    x = gelu(embedding(contexts, model.words).flatten(1) @ model.up) @ model.down
    return rms_norm(x, x.shape[1:])


@torch.enable_grad()
def train(vocabulary, width, text, steps, batch=BATCH):
    """Train a model in bf16 with weights in fp32. The same text and device give the same model."""
    device, rng = text.device, torch.Generator(text.device).manual_seed(0)
    shapes = (
        (vocabulary, CHANNELS),
        (CONTEXT * CHANNELS, width),
        (width, width),
        (vocabulary, width),
    )
    scales = 1, (CONTEXT * CHANNELS) ** -0.5, width**-0.5, 0.02
    model = Model(
        *(
            torch.randn(shape, generator=rng, device=device).mul_(scale).requires_grad_()
            for shape, scale in zip(shapes, scales, strict=True)
        )
    )
    # a step of Adam changes a logit by the rate times the width at most
    rates = 1e-2, 1 / width, 1 / width, 1 / width
    groups = [{"params": [w], "lr": rate} for w, rate in zip(model, rates, strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, list(rates), total_steps=steps, pct_start=0.1
    )
    for _ in range(steps):
        ends = torch.randint(CONTEXT, len(text), (batch,), generator=rng, device=device)
        in_bf16 = Model(*(weight.bfloat16() for weight in model))
        logits = hidden_states(in_bf16, contexts_of(text, ends)) @ in_bf16.output.T
        loss = cross_entropy(logits.float(), text[ends])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return Model(*(weight.detach() for weight in model))
