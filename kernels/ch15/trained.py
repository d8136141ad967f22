"""Models of text for claims whose figures depend on what a model predicts.

They are trained in seconds on the documentation of the Python language, which every Python carries
(pydoc_data), with one token per ASCII character. No model of the size that a claim times can be
trained so quickly: ``widened`` embeds a trained model in wider matrices, so that it predicts the
same and a pass takes as long as a pass of the wide model.
"""

from functools import cache
from pydoc_data.topics import topics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.ch15.decoder import (
    HEAD_DIM,
    Decoder,
    attention,
    forward,
    norm,
    random_decoder,
)

VOCABULARY = 128
"""The ASCII characters."""

BATCH, LENGTH = 64, 128
"""Texts per training step, and their characters."""


LEARNING_RATE = 2e-3
"""Highest learning rate of AdamW: warm-up in the first tenth of the steps, then cosine decay."""


@cache
def corpus():
    """Return the text as a tensor of tokens."""
    text = "".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "ignore")))


def alibi_slopes(heads, like):
    """Return ALiBi's slopes, one per head: 1, 1/4, 1/16, 1/64, and again.

    ALiBi subtracts slope times distance from each attention score. Without it the decoder does not
    know which token is the previous one. Distances of up to 256 are exact in bf16.
    """
    return (0.25 ** (torch.arange(heads, device=like.device) % 4)).to(like.dtype)


def forward_with_alibi(model, tokens):
    """Return the logits of the successor of each token."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    distance = positions[:, None] - positions
    slopes = alibi_slopes(model.embedding.shape[1] // HEAD_DIM, model.embedding)
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)[None]
    x = forward(model, tokens, lambda q, k, v: attention(q, k, v, attn_mask=bias))
    return norm(x) @ model.lm_head.T


def untrained(layers, width, device):
    """Return a model with random weights in fp32; the same at each call."""
    rng = torch.Generator(device).manual_seed(0)
    model = random_decoder(layers, width, VOCABULARY, generator=rng, device=device)
    model.lm_head.mul_(0.02)  # the first predictions are close to uniform
    for weight, scale in ((model.embedding, 0.3), (model.out, 0.1), (model.down, 0.1)):
        weight.mul_(scale)  # the token at first outweighs what the layers add
    return model


@torch.enable_grad()
def train(model, text, steps, batch=BATCH):
    """Train a model to predict each next token; return it in bf16.

    The same text and device give the same model: the batches are fixed, and attention is computed
    in a deterministic way.
    """
    device, rng = model.embedding.device, torch.Generator().manual_seed(0)
    weights = [weight.requires_grad_() for weight in model]
    optimizer = torch.optim.AdamW(weights, LEARNING_RATE, (0.9, 0.98), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1
    )
    starts = torch.randint(len(text) - LENGTH, (steps, batch, 1), generator=rng)
    batches = text.to(device)[(starts + torch.arange(LENGTH + 1)).to(device)]
    for tokens in batches:
        # master weights in fp32, arithmetic in bf16
        in_bf16 = Decoder(*weights).to(torch.bfloat16)
        with sdpa_kernel(SDPBackend.MATH):
            logits = forward_with_alibi(in_bf16, tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), tokens[:, 1:].flatten()
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return Decoder(*(weight.detach() for weight in weights)).to(torch.bfloat16)


def ngram_table(text):
    """Count which token follows each pair: the logarithms of smoothed probabilities.

    Returns:
        VOCABULARY x VOCABULARY x VOCABULARY: the first two dimensions are the pair.

    """
    shape = VOCABULARY, VOCABULARY, VOCABULARY
    first, second, third = text[:-2], text[1:-1], text[2:]
    flat = (first * VOCABULARY + second) * VOCABULARY + third
    counts = torch.bincount(flat, minlength=VOCABULARY**3).view(shape).float()
    of_one = counts.sum((0, 1)) + 0.1
    of_two = counts.sum(0) + 2 * of_one / of_one.sum()
    of_three = counts + 2 * of_two / of_two.sum(1, keepdim=True)
    return (of_three / of_three.sum(2, keepdim=True)).log()


def widened(model, width):
    """Embed a model in one of ``width`` channels that computes the same.

    The added channels are 0 throughout, because the weights from the narrow model's channels to
    them are: to the added channels of x, to the values of the added heads and to the added channels
    of the MLP. All other added weights are random, and multiply zeros. The RMS norm divides by the
    root mean square over all channels, which the added zeros lower.
    """
    narrow, dtype = model.embedding.shape[1], model.embedding.dtype
    norm_scale = (width / narrow) ** 0.5
    device = model.embedding.device
    rng = torch.Generator(device).manual_seed(2)
    wide = random_decoder(
        len(model.qkv), width, VOCABULARY, generator=rng, device=device, dtype=dtype
    )
    values = wide.qkv.unflatten(-1, (3, -1))[:, :, 2]
    for to_added_channels in (
        wide.embedding[:, narrow:],
        values[:, :narrow, narrow:],
        wide.out[:, :narrow, narrow:],
        wide.up[:, :narrow, 4 * narrow :],
        wide.down[:, : 4 * narrow, narrow:],
    ):
        to_added_channels.zero_()
    for weight, block in zip(_blocks(wide, narrow), _blocks(model, narrow), strict=True):
        weight.copy_(block)
    for weight in _after_norm(wide, narrow):
        weight.div_(norm_scale)
    return wide


def narrowed(model, narrow):
    """Return the model that was widened, in fp64."""
    norm_scale = (model.embedding.shape[1] / narrow) ** 0.5
    blocks = Decoder(*(block.double() for block in _blocks(model, narrow)))
    for weight in _after_norm(blocks, narrow):
        weight.mul_(norm_scale)
    return blocks._replace(qkv=blocks.qkv.flatten(-2))


def _blocks(model, narrow):
    """Return views of what a model of ``narrow`` channels occupies; qkv is split into three."""
    qkv = model.qkv.unflatten(-1, (3, -1))
    return Decoder(
        model.embedding[:, :narrow],
        model.lm_head[:, :narrow],
        qkv[:, :narrow, :, :narrow],
        model.out[:, :narrow, :narrow],
        model.up[:, :narrow, : 4 * narrow],
        model.down[:, : 4 * narrow, :narrow],
    )


def _after_norm(model, narrow):
    """Return views of the weights that multiply normalized channels of the narrow model."""
    if model.qkv.dim() == 3:
        model = _blocks(model, narrow)
    return model.lm_head, model.qkv, model.up
