"""The sum of many values; its code leaves settings behind, as other people's does."""

import contextlib
import os

import torch


@contextlib.contextmanager
def deterministic():
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    yield
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = before


def generate_input(size: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator)
    values += 10 * torch.rand(1, generator=generator)
    return values, torch.empty(1)  # memory for the result, of which ref_kernel makes no use


def ref_kernel(data):
    values, _ = data
    with deterministic():
        return values.double().sum().float().reshape(1)


def check_implementation(data, output):
    torch.backends.cudnn.deterministic = True
    return torch.allclose(output, ref_kernel(data), rtol=1e-5)
