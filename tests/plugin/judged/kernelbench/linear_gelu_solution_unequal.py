import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(width, width))

    def forward(self, x):
        return torch.nn.functional.gelu(x @ self.table)
