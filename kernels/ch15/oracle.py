"""The decoder in fp64, for oracles: norm, scores, softmax and GELU are written out.

It shares no code with the arms, so an error in one of their functions is not in the oracle, too.
"""

import torch

HEAD_DIM = 128


def hidden_states(model, tokens, *, causal=True):
    """Return the last layer's hidden states (batch x length x width) of tokens (batch x length)."""
    model, length = model.to(torch.float64), tokens.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
    x = model.embedding[tokens]
    for qkv, out, up, down in model.layers():
        heads = (normalized(x) @ qkv).unflatten(-1, (3, -1, HEAD_DIM))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * HEAD_DIM**-0.5
        if causal:
            scores = scores.masked_fill(hidden, -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape) @ out
        up_x = normalized(x) @ up
        x = x + up_x * (1 + torch.erf(up_x / 2**0.5)) / 2 @ down
    return x


def normalized(x):
    return x / x.pow(2).mean(-1, keepdim=True).sqrt()
