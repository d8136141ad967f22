import torch


def custom_kernel(data):
    counts = torch.arange(1, len(data) + 1, dtype=data.dtype)
    return torch.cumsum(data, dim=0) / counts
