import torch


def custom_kernel(data):
    return torch.zeros(data.shape[:2])
