"""A ReLU and a scale, on inputs that are never negative."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        for _ in range(40):
            x = torch.relu(x)
        return (x - 2.5).relu() * self.scale + x * self.scale


def get_inputs():
    return [torch.rand(256, 256)]


def get_init_inputs():
    return [256]
