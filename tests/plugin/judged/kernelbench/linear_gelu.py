"""A linear layer and a GELU."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x))


width = 256


def get_inputs():
    return [torch.randn(64, width)]


def get_init_inputs():
    return [width]
