import torch

torch.set_num_threads(3)


def solution(rows):
    return torch.linalg.vector_norm(rows, dim=1)
