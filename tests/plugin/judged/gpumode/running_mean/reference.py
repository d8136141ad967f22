import torch
from utils import matches


def generate_input(size: int, seed: int):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def ref_kernel(data):
    values = data.double()
    return torch.stack([values[: i + 1].mean() for i in range(len(values))])


check_implementation = matches(ref_kernel, 1e-3)
