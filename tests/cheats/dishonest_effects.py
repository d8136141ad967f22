"""Arms that change what the baseline uses, find answers behind a view, or hide memory and work."""

from __future__ import annotations

import ast
import builtins
import contextvars
import decimal
import functools
import itertools
import json
import logging
import mmap
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch
from _pytest.assertion.rewrite import rewrite_asserts

from pytest_aiperf import prepared
from tests.cheats.case import Corpus, State
from tests.cheats.dishonest import SETTINGS, SHORT, returning
from tests.cheats.dishonest_results import pair
from tests.plugin.claims import vectors

cheat = Corpus()
CHEATS = cheat.entries
marked = Corpus()
MARKED = marked.entries
"""Cheats that are not refused, and the text of ``unchecked`` that each must cause."""

WRONG = "optimized disagrees with the reference"
SLOWS = "whether another arm slows the baseline down: optimized changes"


def numbers(bench):
    return (np.random.default_rng(bench.seed).standard_normal(bench.size(2**16, check=1000)),)


def leaving(change, work, **words):
    """Return a claim whose optimized arm changes something that its baseline uses."""

    def optimized(*args):
        change()
        return returning(SHORT, work(*args))

    return pair(work, work, **words) | {"optimized": optimized}


# what the baseline uses


@marked(f"{SLOWS} handlers")
def a_list_of_handlers_that_grows():
    handlers = []

    def doubled(x):
        for handler in handlers:
            handler(x)
        return x * 2

    return leaving(lambda: handlers.append(len), doubled)


@marked(f"{SLOWS} handlers")
def a_handler_once_it_is_timed():
    handlers, calls = [], itertools.count()

    def doubled(x):
        for handler in handlers:
            handler(x)
        return x * 2

    return leaving(lambda: next(calls) > 20 and handlers.append(len), doubled)


@marked(f"{SLOWS} np.sort")
def a_function_of_numpy_for_the_baseline():
    usual = np.sort

    def slower(x):
        return usual(usual(x))

    return leaving(
        lambda: setattr(np, "sort", slower),
        lambda x: np.sort(x),  # noqa: PLW0108  not what it was when this was defined
        reference=usual,
    )


@marked(f"{SLOWS} sorted")
def a_builtin_for_the_baseline():
    usual = builtins.sorted
    return leaving(
        lambda: setattr(builtins, "sorted", lambda x, **words: usual(usual(x), **words)),
        lambda x: np.array(sorted(x.tolist())),
        reference=np.sort,
    )


@marked(f"{SLOWS} Sum.add")
def a_method_of_a_class_that_both_use():
    class Sum:
        def add(self, x):
            return x * 2

    def slower(self, x):
        return x + x

    return leaving(lambda: setattr(Sum, "add", slower), lambda x: Sum.add(None, x))


@marked(f"{SLOWS} weights")
def weights_that_record_gradients():
    weights = torch.full((64,), 2.0)
    return leaving(
        lambda: weights.requires_grad_(True),
        lambda x: (x * weights[: len(x)]).detach(),
        inputs=lambda bench: (torch.randn(bench.size(64, check=8)),),
        reference=lambda x: x.double() * 2,
    )


@marked(f"{SLOWS} state")
def an_attribute_of_an_object_that_both_use():
    state = State(level=0)
    return leaving(lambda: setattr(state, "level", 10), lambda x: x * 2 if state.level < 20 else x)


EASIER = "whether inputs are drawn as the test says: optimized changes"
AGREES = "whether results are judged as the test says: optimized changes"


@marked(f"{EASIER} draw, which inputs")
def values_that_are_sorted_once_an_arm_is_timed():
    draw, calls = lambda random, n: random.random(n), itertools.count()

    def inputs(bench):
        return (draw(np.random.default_rng(bench.seed), bench.size(64, check=8)),)

    def change():
        nonlocal draw
        if next(calls) > 20:
            draw = lambda random, n: np.sort(random.random(n))

    return leaving(change, np.sort, inputs=inputs, reference=np.sort)


@marked(f"{EASIER} its own code, which inputs")
def code_of_inputs_that_an_arm_replaces():
    def inputs(bench):
        return vectors(bench)

    def other(bench):
        return vectors(bench)

    change = lambda: setattr(inputs, "__code__", other.__code__)
    return leaving(change, lambda x: x * 2, inputs=inputs)


@marked(f"{EASIER} draw, which inputs")
def inputs_that_a_setup_replaces():
    draw = vectors

    def inputs(bench):
        return draw(bench)

    def make(_x):
        nonlocal draw
        draw = lambda bench: vectors(bench)  # noqa: PLW0108  another function
        return lambda x: returning(SHORT, x * 2)

    work = lambda x: x * 2
    return pair(work, work, inputs=inputs) | {"optimized": prepared(make)}


@marked(f"{AGREES} Oracle.doubled, which the reference uses")
def a_method_that_only_the_reference_uses():
    class Oracle:
        @staticmethod
        def doubled(x):
            return x * 2

    return leaving(
        lambda: setattr(Oracle, "doubled", lambda x: x + x),
        lambda x: x * 2,
        reference=lambda x: Oracle.doubled(x),  # noqa: PLW0108  not what it was here
    )


@marked(f"{AGREES} answer, which the reference uses")
def an_answer_that_an_arm_leaves_for_the_reference():
    answer = contextvars.ContextVar("answer")
    return leaving(
        lambda: answer.set(2),
        lambda x: x * 2,
        reference=lambda x: x * answer.get(2),
    )


@marked("functions that the test has replaced: numpy.sort")
def a_wrong_function_that_the_reference_uses_as_well():
    usual = np.sort

    def reversed_(x):
        usual(x)
        return x[::-1].copy()

    np.sort = reversed_
    baseline = lambda x: np.sort(x)  # noqa: PLW0108  refers to the module
    return pair(baseline, lambda x: x[::-1].copy(), reference=reversed_)


@cheat(SETTINGS)
def a_device_by_default():
    return leaving(lambda: torch.set_default_device("cpu"), lambda x: x * 2)


@cheat(SETTINGS)
def variables_of_the_next_processes():
    return leaving(lambda: os.environ.update(PYTHONPROFILEIMPORTTIME="1"), lambda x: x * 2)


@cheat(SETTINGS)
def decimals_of_many_digits():
    return leaving(lambda: setattr(decimal.getcontext(), "prec", 2000), lambda x: x * 2)


@cheat(SETTINGS + "working folder")
def a_folder_of_its_own():
    return leaving(lambda: os.chdir("/"), lambda x: x * 2)


@cheat(SETTINGS + "working folder")
def a_folder_that_is_removed():
    def change():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)

    return leaving(change, lambda x: x * 2)


@cheat(SETTINGS + "umask")
def files_that_nobody_else_reads():
    return leaving(lambda: os.umask(0o77), lambda x: x * 2)


@cheat(SETTINGS + "RLIMIT_NOFILE")
def few_files_at_a_time():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return leaving(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, most)), lambda x: x * 2)


@marked(
    "whether the baseline is slow only while it is timed.* when a thread called it", clock="host"
)
def a_baseline_that_is_slow_where_the_harness_calls_it():
    def baseline(x):
        frame = sys._getframe(1)
        while frame is not None:
            if "pytest_aiperf" in frame.f_code.co_filename:
                time.sleep(5e-3)
                break
            frame = frame.f_back
        return x * 2

    return {"baseline": baseline, "metric": "wall"}


@functools.lru_cache
def window(count):
    time.sleep(20e-3)
    return np.hanning(count)


def windowed(x):
    return x * window(len(x))


def windowed_at_once(x):
    return x * np.hanning(len(x))


def windowed_and_cleared(x):
    window.cache_clear()
    return windowed_at_once(x)


OF_WINDOW = {"inputs": numbers, "reference": lambda x: x * np.hanning(len(x)), "metric": "wall"}


@marked("whether another arm slows the baseline down.* after another arm", clock="host")
def a_cache_of_the_baseline_that_is_emptied():
    return {"baseline": windowed, "optimized": windowed_and_cleared, **OF_WINDOW}


@marked("whether another arm slows the library down.* after another arm", clock="host")
def a_cache_of_the_library_that_is_emptied():
    arms = {"optimized": windowed_and_cleared, "library": windowed}
    return {"baseline": lambda x: (time.sleep(4e-3), windowed_at_once(x))[1], **arms, **OF_WINDOW}


# inputs


def behind(array, size):
    """Read what lies behind an array of one dimension."""
    if isinstance(array, torch.Tensor):
        return torch.as_strided(array, (size,), (1,), array.storage_offset() + size).clone()
    return np.lib.stride_tricks.as_strided(array, (2 * size,))[size:].copy()


@cheat(WRONG, clock="host")
def an_answer_behind_a_view():
    def inputs(bench):
        (x,) = vectors(bench)
        return (np.concatenate([x, x * 2])[: len(x)],)

    return pair(lambda x: x * 2, lambda x: behind(x, len(x)), inputs=inputs, metric="wall")


@cheat(f"{WRONG}|requiring a storage size", clock="host")
def an_answer_in_the_storage_of_a_tensor():
    def inputs(bench):
        x = torch.randn(bench.size(64, check=8))
        return (torch.cat([x, x * 2])[: len(x)],)

    return pair(
        lambda x: x * 2,
        lambda x: behind(x, len(x)),
        inputs=inputs,
        metric="wall",
        reference=lambda x: x.double() * 2,
    )


@cheat(WRONG, clock="host")
def an_answer_behind_a_view_in_a_list():
    def inputs(bench):
        (x,) = vectors(bench)
        return ([np.concatenate([x, x * 2])[: len(x)]],)

    return pair(
        lambda v: v[0] * 2,
        lambda v: behind(v[0], len(v[0])),
        inputs=inputs,
        metric="wall",
        reference=lambda v: v[0] * 2,
    )


@cheat(WRONG, clock="host")
def answers_between_the_rows():
    def inputs(bench):
        (x,) = vectors(bench)
        return (np.stack([x, x * 2], axis=1)[:, 0],)

    def arm(x):
        return np.lib.stride_tricks.as_strided(x, (len(x), 2), (16, 8))[:, 1].copy()

    return pair(lambda x: x * 2, arm, inputs=inputs, metric="wall")


@cheat(WRONG, clock="host")
def an_answer_behind_bytes():
    def inputs(bench):
        (x,) = vectors(bench)
        return (np.frombuffer(x.tobytes() + (x * 2).tobytes(), count=len(x)),)

    return pair(lambda x: x * 2, lambda x: behind(x, len(x)), inputs=inputs, metric="wall")


@marked("calls on different arrays: inputs.. passes one array as .*; pass copies")
def one_array_eight_times():
    return pair(
        lambda *arrays: [np.sort(x) for x in arrays],
        lambda *arrays: list(np.tile(np.sort(arrays[0]), (len(arrays), 1))),
        inputs=lambda bench: vectors(bench) * 8,
        reference=lambda *arrays: [np.sort(x) for x in arrays],
    )


# files, processes and memory


@functools.cache
def memory():
    """Return a folder in memory for this process, which is removed at its end."""
    return tempfile.TemporaryDirectory(dir="/dev/shm", prefix="aiperf-cheats-")


def with_folder():
    """Return the inputs and the reference of a claim whose arms get a folder in memory."""

    def inputs(bench):
        folder = Path(memory().name, "folder")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "old").write_bytes(bytes(512))
        return *vectors(bench), folder

    return {"inputs": inputs, "reference": lambda x, folder: x + x}


def changing_files(change):
    return lambda x, folder: (change(folder, x), x * 2)[1]


def leaving_files(baseline, optimized=lambda folder, x: None):
    return pair(changing_files(baseline), changing_files(optimized), **with_folder())


LEFT_IN_FILES = "what calls leave in files: baseline"


@marked(f"{LEFT_IN_FILES} leaves -rw.* at folder/new, and optimized does not")
def a_file_in_memory_that_is_not_there():
    return leaving_files(lambda folder, x: (folder / "new").write_bytes(x.tobytes()))


@marked(f"{LEFT_IN_FILES} leaves -rw.* at folder/old, and optimized does not")
def a_file_in_memory_that_is_not_written_anew():
    return leaving_files(lambda folder, x: (folder / "old").write_bytes(x.tobytes()))


@marked(f"{LEFT_IN_FILES}'s are of .*, optimized's of")
def a_file_in_memory_that_is_short():
    put = lambda count: lambda folder, x: (folder / "new").write_bytes(x[:count].tobytes())
    return leaving_files(put(64), put(8))


@marked(f"{LEFT_IN_FILES} leaves nothing at folder/old")
def a_file_in_memory_that_is_not_removed():
    return leaving_files(lambda folder, x: (folder / "old").unlink(missing_ok=True))


@marked(f"{LEFT_IN_FILES} leaves -r-------- at folder/old")
def a_mode_that_is_not_set():
    return leaving_files(lambda folder, x: (folder / "old").chmod(0o400))


def link(folder, _x):
    (folder / "link").unlink(missing_ok=True)
    (folder / "link").symlink_to("old")


@marked(f"{LEFT_IN_FILES} leaves a link to old at folder/link")
def a_link_that_is_not_made():
    return leaving_files(link)


@marked("what calls write to files: baseline writes .*, optimized 0")
def a_file_that_is_not_written():
    path = Path(tempfile.mkdtemp(dir="/var/tmp"), "checkpoint")

    def save(x):
        with path.open("wb") as file:
            file.write(x.tobytes())
            file.flush()
            os.fsync(file.fileno())
        return x * 2

    return pair(save, lambda x: x * 2, inputs=numbers)


@marked("what calls write to files: baseline writes to standard error, optimized to no file")
def messages_that_are_not_written():
    return pair(lambda x: (os.write(2, b"a line"), x * 2)[1], lambda x: x * 2)


@marked("what calls log: number of log records: baseline 1, optimized 0")
def records_that_are_not_logged():
    log = logging.getLogger("tests")
    return pair(lambda x: (log.warning("a call"), x * 2)[1], lambda x: x * 2)


@marked("assert statements of double: pytest rewrites")
def assert_statements_that_pytest_rewrites():
    source = "def double(x):\n    assert x.ndim == 1\n    return x * 2\n"
    tree, names = ast.parse(source), {}
    rewrite_asserts(tree, source.encode())
    exec(compile(tree, __file__, "exec"), names)  # as pytest does with this function in a test
    return pair(names["double"], lambda x: x * 2)


@marked("what calls write to files: baseline writes to .*/log, optimized to no file")
def a_log_that_is_not_written():
    log = os.open(Path(tempfile.mkdtemp(), "log"), os.O_WRONLY | os.O_CREAT)

    def logging(x):
        os.pwrite(log, x.tobytes(), 0)  # a page that is written again goes to the disk once
        return x * 2

    return pair(logging, lambda x: x * 2)


def three(x):
    first, second = np.sinh(x), np.cosh(x)
    third = first * second
    return third + first


def measured(optimized):
    """Return a claim about memory whose baseline has three temporaries."""
    return {
        "inputs": numbers,
        "baseline": three,
        "optimized": optimized,
        "reference": three,
        "metric": "memory",
    }


@marked("memory of child processes that optimized starts", clock="host")
def memory_of_a_child():
    def in_child(x):
        with tempfile.TemporaryFile() as file:
            if not (child := os.fork()):
                os.pwrite(file.fileno(), three(x).tobytes(), 0)
                os._exit(0)
            os.waitpid(child, 0)
            return np.frombuffer(os.pread(file.fileno(), x.nbytes, 0)).copy()

    return measured(in_child)


@marked("memory of child processes that optimized starts", clock="host")
def memory_of_a_child_that_stays():
    shared = []

    def serve(x, result, asks, answers):
        try:
            while asks.poll(30) and asks.recv():
                for _ in range(40):  # long enough for the clock of processes: it ticks every 10 ms
                    result[:] = three(x)
                answers.send(1)
        finally:
            os._exit(0)

    def in_child(x):
        if not shared:
            memory = mmap.mmap(-1, 2 * x.nbytes)
            arrays = np.frombuffer(memory).reshape(2, -1)
            (theirs, asks), (answers, ours) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
            if not os.fork():
                serve(*arrays, theirs, ours)
            shared.append((arrays, asks, answers))
        arrays, asks, answers = shared[0]
        arrays[0] = x
        asks.send(1)
        answers.recv()
        return arrays[1].copy()

    return measured(in_child)


@marked("memory of file systems: optimized writes .* to files", clock="host")
def memory_of_a_file():
    def in_file(x):
        result, step = np.empty_like(x), 4096
        parts = [slice(i, i + step) for i in range(0, len(x), step)]
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            for _ in range(4):  # files of 2 MiB
                for part in parts:
                    file.write(np.sinh(x[part]).tobytes())
            for part in parts:
                first = np.sinh(x[part])
                result[part] = first * np.cosh(x[part]) + first
        return result

    return measured(in_file)


REPLACED = "functions that the test has replaced: "


@marked(REPLACED + r"numpy\.random\.random")
def a_function_that_draws_and_computes():
    usual, known = np.random.random, {}

    def random(n):
        x = usual(n)
        known[x[0]] = np.sort(x)
        return x

    def arm(x):
        np.random.random = random
        out = known.get(x[0])
        return np.sort(x) if out is None else out

    inputs = lambda bench: (np.random.random(200),)  # noqa: NPY002  it can be replaced
    return pair(np.sort, arm, inputs=inputs, reference=np.sort)


@marked(REPLACED + "json.encoder.JSONEncoder.iterencode")
def a_slow_method_of_a_library():
    usual = json.JSONEncoder.iterencode

    def iterencode(self, value, **words):
        usual(self, value, **words)
        return usual(self, value, **words)

    json.JSONEncoder.iterencode = iterencode

    def baseline(x):
        return np.array(json.loads("".join(json.JSONEncoder().iterencode(x.tolist()))))

    return pair(baseline, lambda x: x.copy(), reference=lambda x: x * 1)


CHANGED = "settings that the test has changed: "


@marked(CHANGED + "tracemalloc")
def allocations_that_the_test_traces():
    tracemalloc.start()
    return pair(lambda x: x * 2, lambda x: x + x, reference=lambda x: x * 2)


@marked(CHANGED + "signal.setitimer")
def a_timer_that_the_test_starts():
    signal.setitimer(signal.ITIMER_VIRTUAL, 1e3, 1e3)
    return pair(lambda x: x * 2, lambda x: x + x, reference=lambda x: x * 2)


@marked(CHANGED + "numpy.setbufsize")
def small_buffers_for_both_arms():
    np.setbufsize(16)
    return pair(lambda x: x * 2, lambda x: x + x, reference=lambda x: x * 2)


@marked(CHANGED + "sys.meta_path")
def a_finder_of_modules():
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return None

    sys.meta_path.append(Finder)
    return pair(lambda x: x * 2, lambda x: x + x, reference=lambda x: x * 2)


class Watching(np.random.MT19937):
    """A generator that learns of each seed before inputs() draws."""

    def _legacy_seeding(self, seed):
        super()._legacy_seeding(seed)


@marked(CHANGED + "numpy.random.set_bit_generator")
def a_generator_that_learns_of_each_seed():
    np.random.set_bit_generator(Watching())
    return pair(lambda x: x * 2, lambda x: x + x, reference=lambda x: x * 2)


@cheat(SETTINGS + "numpy.random.get_bit_generator", clock="host")
def a_generator_that_an_arm_installs():
    def optimized(x):
        np.random.set_bit_generator(Watching())
        return x * 2

    return {"optimized": optimized, "metric": "wall"}


# inputs that cost the baseline time


@marked("whether inputs.. slows the baseline down", clock="host")
def a_cache_that_inputs_clears():
    @functools.cache
    def table(n):
        time.sleep(5e-3)
        return np.sin(np.arange(n))

    @functools.cache
    def own_table(n):
        return np.sin(np.arange(n))

    def inputs(bench):
        table.cache_clear()
        return (np.random.default_rng(bench.seed).random(bench.size(20_000, check=40)),)

    def optimized(x):
        time.sleep(1e-3)
        return x * own_table(len(x))

    return {
        "baseline": lambda x: (time.sleep(1e-3), x * table(len(x)))[1],
        "optimized": optimized,
        "inputs": inputs,
        "reference": lambda x: x * np.sin(np.arange(len(x))),
        "metric": "wall",
    }
