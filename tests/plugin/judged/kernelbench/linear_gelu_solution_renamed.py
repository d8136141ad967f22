import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        layer = nn.Linear(width, width)
        self.transposed = nn.Parameter(layer.weight.detach().t().contiguous())
        self.offset = nn.Parameter(layer.bias.detach())

    def forward(self, x):
        return torch.nn.functional.gelu(torch.addmm(self.offset, x, self.transposed))
