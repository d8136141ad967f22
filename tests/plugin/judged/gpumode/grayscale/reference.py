import torch
from utils import matches


def generate_input(size: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, size, 3, generator=generator)


def ref_kernel(data):
    weights = torch.tensor([0.2989, 0.587, 0.114], dtype=data.dtype)
    return torch.stack([(row * weights).sum(dim=1) for row in data])


check_implementation = matches(ref_kernel, 1e-3)
