import torch
from utils import matches


def generate_input(size: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator), torch.empty(size)


def ref_kernel(data):
    values, output = data
    output[...] = torch.sort(values).values
    return output


check_implementation = matches(ref_kernel, 1e-5)
