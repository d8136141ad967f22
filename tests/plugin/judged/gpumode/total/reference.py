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
    return values + 10 * torch.rand(1, generator=generator)


def ref_kernel(data):
    with deterministic():
        return data.double().sum().float()


def check_implementation(data, output):
    torch.backends.cudnn.deterministic = True
    return torch.allclose(output, ref_kernel(data), rtol=1e-5)
