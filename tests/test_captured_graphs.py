"""A captured graph addresses only memory that lives as long as the arm that replays it.

A graph holds addresses, not tensors. A tensor that an arm makes while it prepares must be held by
what it returns: otherwise its memory is given to others, and a replay reads their values and
overwrites them. Without a GPU the step itself is called, which holds its tensors, so the tests of
the claims cannot see this.
"""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.ch01 import training_loop
from kernels.ch15 import slots, speculative, trained
from kernels.ch15.decoder import random_decoder
from kernels.ch16 import pieces
from kernels.ch20 import serving
from kernels.labs import decode

VOCABULARY, WIDTH, LAYERS, TEXTS, COUNT = trained.VOCABULARY, 128, 2, 3, 5


class Addressed(TorchDispatchMode):
    """Notes the memory that operations read or write, except what they themselves allocate."""

    def __init__(self):
        super().__init__()
        self.memory, self.own_memory = set(), set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.memory |= memory_of((args, kwargs)) - self.own_memory
        result = operation(*args, **(kwargs or {}))
        self.own_memory |= memory_of(result) - self.memory
        return result


def memory_of(values):
    tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    return {StorageWeakRef(x.untyped_storage()) for x in tensors}


def speculative_requests():
    model, small, untrained = (random_decoder(n, WIDTH, VOCABULARY) for n in (LAYERS, 1, 1))
    table = trained.ngram_table(torch.randint(VOCABULARY, (1000,)))
    prompts = torch.randint(VOCABULARY, (TEXTS, 8))
    return model, table, small, untrained, prompts, torch.randn(TEXTS, COUNT, VOCABULARY)


def prompts_of_a_model():
    return random_decoder(LAYERS, WIDTH, VOCABULARY), torch.randint(VOCABULARY, (TEXTS, 8))


def requests_for_slots():
    return *prompts_of_a_model(), torch.randint(1, 9, (TEXTS,)), COUNT


def requests_for_pieces():
    lengths = torch.randint(1, 9, (TEXTS,))
    return *prompts_of_a_model(), lengths, torch.empty(TEXTS, WIDTH)


def requests_for_decode():
    model = decode.random_decoder(LAYERS, WIDTH, VOCABULARY, 8)
    past = torch.randn(LAYERS, 2, WIDTH // decode.HEAD_DIM, 8, decode.HEAD_DIM)
    return model, past, torch.randint(VOCABULARY, (COUNT,))


def batches_for_training():
    batches = torch.randn(COUNT, 2, TEXTS, WIDTH)
    state = [[torch.rand(shape) for shape in ((WIDTH, WIDTH), (WIDTH,))] for _ in range(3)]
    return batches, batches.clone(), *state


ARMS = {
    "training_loop.captured_steps": (training_loop.captured_steps, batches_for_training),
    "speculative.plain": (speculative.plain, speculative_requests),
    "speculative.ngram": (speculative.ngram, speculative_requests),
    "speculative.small_model": (speculative.small_model, speculative_requests),
    "slots.static": (slots.static(slots.ADMITTED), requests_for_slots),
    "slots.continuous": (slots.continuous(slots.ADMITTED), requests_for_slots),
    "pieces.padded": (pieces.padded, requests_for_pieces),
    "pieces.piecewise": (pieces.piecewise, requests_for_pieces),
    "serving.graph": (serving.graph, lambda: (*requests_for_slots(), TEXTS)),
    "decode.Graph": (decode.Graph, requests_for_decode),
}


@pytest.mark.parametrize("arm", ARMS)
def test_what_a_graph_addresses_outlives_the_preparation(arm, monkeypatch):
    graphs = []

    def captured(step, _device):
        step()  # as before a capture
        with Addressed() as addressed:
            step()
        graphs.append(addressed)
        return lambda: None

    for module in (training_loop, speculative, slots, pieces, serving, decode):
        monkeypatch.setattr(module, "captured", captured)
    prepare, make_requests = ARMS[arm]
    requests = make_requests()
    run = prepare(*requests)
    gc.collect()
    assert graphs
    assert callable(run)
    for graph in graphs:
        assert graph.memory
        assert not [memory for memory in graph.memory if memory.expired()]
