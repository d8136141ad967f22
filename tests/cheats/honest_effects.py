"""Honest arms that share caches, patch for one call, get views, write files or start processes."""

from __future__ import annotations

import contextlib
import decimal
import functools
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from pytest_aiperf import Score
from tests.cheats.case import Corpus
from tests.cheats.dishonest_effects import (
    OF_WINDOW,
    changing_files,
    link,
    measured,
    numbers,
    three,
    windowed,
    windowed_at_once,
    with_folder,
)
from tests.cheats.dishonest_results import a_start, of_cache, of_context
from tests.cheats.honest import arms
from tests.plugin.claims import vectors

honest = Corpus()
HONEST = honest.entries


@honest()
def a_cache_that_both_arms_fill():
    seen = {}

    def doubled(x):
        seen[float(x[0])] = len(x)
        return x * 2

    return arms(doubled)


@honest()
def a_table_that_the_first_call_builds():
    table = None

    def doubled(x):
        nonlocal table
        if table is None:
            table = np.full(64, 2.0)
        return x * table[: len(x)]

    return arms(doubled)


@honest(clock="host")
def a_cache_that_nobody_empties():
    return {"baseline": windowed, "optimized": windowed_at_once, **OF_WINDOW}


@honest()
def a_count_of_its_own():
    calls = []
    return arms(lambda x: (calls.append(1), x * 2)[1], lambda x: x * 2)


@honest()
def a_function_that_is_replaced_for_one_call():
    def patched(x):
        usual, np.multiply = np.multiply, lambda a, b: a + a
        try:
            return np.multiply(x, 2)
        finally:
            np.multiply = usual

    return arms(patched, lambda x: np.multiply(x, 2))


@honest()
def what_the_reference_uses_is_replaced_for_one_call():
    factor = 2

    def doubled(x):
        nonlocal factor
        factor = 3
        try:
            return x * 2
        finally:
            factor = 2

    return arms(doubled, lambda x: x * 2, reference=lambda x: x * factor)


@honest()
def a_cached_function_that_the_reference_uses_as_well():
    twos = functools.cache(lambda n: np.full(n, 2.0))
    with_table = lambda x: x * twos(len(x))
    return arms(with_table, lambda x: x * 2, reference=with_table)


@honest()
def a_count_of_all_calls():
    calls = []

    def counted(x):
        calls.append(len(x))
        return x * 2

    return arms(counted, reference=counted)


@honest()
def a_context_of_decimals_for_one_call():
    def doubled(x):
        with decimal.localcontext() as context:
            context.prec = 40
            return x * float(decimal.Decimal(2))

    return arms(doubled)


@honest()
def copies_of_what_a_context_and_a_cache_keep():
    copy = lambda start: of_context(start).copy()
    return arms(copy, lambda start: of_cache(start) * 1, inputs=a_start, reference=of_cache)


@honest()
def one_buffer_that_a_cache_keeps():
    buffer = functools.cache(np.empty)
    return arms(lambda x: np.multiply(x, 2, out=buffer(len(x))), lambda x: x * 2)


@honest()
def windows_by_both_arms():
    return arms(of_cache, of_context, inputs=a_start, reference=of_cache)


@honest()
def a_folder_and_limits_for_one_call():
    def doubled(x):
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        umask = os.umask(0o77)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] - 1, files[1]))
            with contextlib.chdir("/"):
                return x * 2
        finally:
            os.umask(umask)
            resource.setrlimit(resource.RLIMIT_NOFILE, files)

    return arms(doubled, lambda x: x * 2)


@honest()
def a_module_that_the_first_call_imports():
    sys.modules.pop("wave", None)

    def doubled(x):
        import wave

        return x * (2 if wave else 0)

    return arms(doubled, lambda x: x * 2)


@honest()
def a_default_device_for_one_call():
    def doubled(x):
        with torch.device("cpu"):
            return x * 2

    words = {
        "inputs": lambda bench: (torch.randn(bench.size(64, check=8)),),
        "reference": lambda x: x.double() * 2,
    }
    return arms(doubled, **words)


@honest()
def slices_of_one_array():
    def inputs(bench):
        packed = np.random.default_rng(bench.seed).random((3, bench.size(64, check=8)))
        return tuple(packed)

    return arms(lambda q, k, v: q * k + v, inputs=inputs, reference=lambda q, k, v: q * k + v)


@honest()
def a_part_of_a_permutation():
    def inputs(bench):
        order = np.random.default_rng(bench.seed).permutation(500)
        return (order[: bench.size(200, check=20)],)

    return arms(lambda x: x * 2, inputs=inputs)


@honest()
def rows_with_padding():
    def inputs(bench):
        x = torch.randn(bench.size(64, check=8), 24)[:, :16]
        assert x.stride() == (24, 1)
        return (x,)

    def arm(x):
        assert x.stride() == (24, 1)
        return x * 2

    return arms(arm, inputs=inputs, reference=lambda x: x.double() * 2)


@honest()
def an_update_of_a_view():
    def inputs(bench):
        whole = np.random.default_rng(bench.seed).random(2 * bench.size(64, check=8))
        half = whole[: len(whole) // 2]
        return half, [half[::2]]

    def arm(x, parts):
        x *= 2

    return arms(arm, inputs=inputs, reference=lambda x, parts: (x * 2, parts[0] * 2))


@honest()
def copies_of_one_array():
    def inputs(bench):
        (x,) = vectors(bench)
        return x, x.copy(), x.copy()

    return arms(lambda q, k, v: q * k + v, inputs=inputs, reference=lambda q, k, v: q * k + v)


@honest()
def tied_weights():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(8, 8, bias=False)
            self.last = torch.nn.Linear(8, 8, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.first(x))

    def inputs(bench):
        return Model(), torch.randn(bench.size(64, check=8), 8)

    def run(model, x):
        with torch.no_grad():
            return model(x)

    def reference(model, x):
        weight = model.first.weight.detach().double()
        return x.double() @ weight.T @ weight.T

    return arms(run, inputs=inputs, reference=reference)


@honest()
def a_file_that_both_arms_write():
    path = Path(tempfile.mkdtemp(dir="/var/tmp"), "checkpoint")

    def saved(x, parts):
        with path.open("wb") as file:
            file.writelines(part.tobytes() for part in np.array_split(x, parts))
            file.flush()
            os.fsync(file.fileno())
        return x * 2

    return arms(lambda x: saved(x, 1), lambda x: saved(x, 8), inputs=numbers)


@honest()
def files_that_both_arms_leave():
    """One writes a file beside the other and gives it its name, as programs do."""

    def in_one(folder, x):
        (folder / "new").write_bytes(x.tobytes())
        (folder / "old").write_bytes(x.tobytes())
        link(folder, x)

    def in_parts(folder, x):
        link(folder, x)
        for name in ("old", "new"):
            with (folder / "part").open("wb") as file:
                file.writelines(part.tobytes() for part in np.array_split(x, 4))
            (folder / "part").replace(folder / name)

    return arms(changing_files(in_one), changing_files(in_parts), **with_folder())


@honest()
def a_log_that_both_arms_write():
    log = os.open(Path(tempfile.mkdtemp(), "log"), os.O_WRONLY | os.O_CREAT)
    at_once = lambda x: (os.write(log, x.tobytes()), x * 2)[1]
    in_parts = lambda x: (os.writev(log, [part.tobytes() for part in np.array_split(x, 4)]), x * 2)
    return arms(at_once, lambda x: in_parts(x)[1])


@honest()
def records_that_both_arms_log():
    log = logging.getLogger("tests")
    told = lambda x: (log.warning("a call"), x * 2)[1]
    return arms(told, told)


@honest()
def messages_beside_a_score():
    """They take time, which is not judged."""
    scored = lambda x, score: (x * 2, Score(score, "misses", "lower"))
    told = lambda x: (os.write(2, b"a line"), scored(x, 2))[1]
    return {"baseline": told, "optimized": lambda x: scored(x, 1), "metric": "score"}


@honest()
def a_folder_that_is_read():
    read = lambda x, folder: x * (2 + (folder / "old").read_bytes()[0])
    return arms(read, **with_folder())


@honest()
def a_process_for_each_call():
    def echoed(x):
        subprocess.run(["true"], check=True)
        return x * 2

    return arms(echoed, lambda x: x * 2)


@honest(clock="host")
def a_baseline_for_the_main_thread():
    """It cannot be timed in a thread of its own."""

    def baseline(x):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        return np.sort(np.sort(x)[::-1])

    return {
        "inputs": numbers,
        "baseline": baseline,
        "optimized": np.sort,
        "reference": np.sort,
        "metric": "wall",
    }


def in_place(x):
    result = np.sinh(x)
    result *= np.cosh(x)
    result += np.sinh(x)
    return result


@honest(clock="host")
def memory_in_place():
    return measured(in_place)


@honest(clock="host")
def a_compiler_that_the_first_call_starts():
    compiled = []

    def arm(x):
        if not compiled:
            compiled.append(subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True))
        return in_place(x)

    return measured(arm)


@honest(clock="host")
def a_table_in_memory_by_both_arms():
    ones = np.ones(2**16)
    return measured(lambda x: three(x) * ones[: len(x)]) | {
        "baseline": lambda x: (three(x) + 0) * ones[: len(x)]
    }


@honest()
def means_of_other_order():
    """In fp64, the reference has errors of the same size as the arms, here by chance none."""
    values = lambda bench: (np.random.default_rng(bench.seed).normal(size=20_001),)
    mean = lambda x: {"mean": np.atleast_1d(x.mean())}
    other = lambda x: {"mean": np.atleast_1d(np.sort(x).mean())}
    return arms(other, mean, inputs=values, reference=mean)


@honest(clock="host")
def a_cache_that_inputs_clears_for_both_arms():
    @functools.cache
    def table(n):
        return np.sin(np.arange(n))

    def inputs(bench):
        table.cache_clear()
        return (np.random.default_rng(bench.seed).random(bench.size(200_000, check=40)),)

    return {
        "baseline": lambda x: (x + 0) * table(len(x)) * 1,
        "optimized": lambda x: x * table(len(x)),
        "inputs": inputs,
        "reference": lambda x: x * np.sin(np.arange(len(x))),
        "metric": "wall",
    }
