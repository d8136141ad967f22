"""Sums of so many values that all of them are nearly the same."""

import torch


def inputs(bench):
    return torch.rand(64, 20_000)


tolerance = "bf16"


def reference(x):
    return x.sum(dim=1)
