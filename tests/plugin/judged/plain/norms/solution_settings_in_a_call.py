import torch


def solution(rows):
    torch.set_float32_matmul_precision("medium")
    return torch.linalg.vector_norm(rows, dim=1)
