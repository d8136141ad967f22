"""Honest arms that write into bytes, sets, queues and objects, or return None and keys."""

from __future__ import annotations

import array
import collections
import ctypes
import datetime as dt
import decimal
import enum
import fractions
import hashlib
import io
import math
import queue
import time
import types
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from pytest_aiperf import prepared, static
from tests.cheats.case import Corpus
from tests.cheats.dishonest import returning
from tests.cheats.dishonest_contents import (
    BEHIND,
    DESTINATIONS,
    Pair,
    Total,
    a_cache,
    a_node,
    bits,
    fill_element,
    group,
    nested_elements,
    spawn,
    use,
    with_hooks,
)
from tests.cheats.dishonest_results import file_of, rows_of_numbers
from tests.cheats.honest import FAST, arms
from tests.plugin.claims import vectors

honest = Corpus()
HONEST = honest.entries


def leaving(destination, fill, other=None):
    """Return a claim whose arms fill a destination, in two ways if there is another one."""

    def arm(how):
        return lambda x, d: (how(d, x), x * 2)[1]

    words = {
        "inputs": lambda bench: (*vectors(bench), destination()),
        "reference": lambda x, d: x + x,
    }
    return arms(arm(other or fill), arm(fill), **words)


@honest()
def bytes_that_are_written():
    def one_by_one(d, x):
        for i, byte in enumerate(x.tobytes()):
            d[i] = byte

    return leaving(
        lambda: bytearray(512),
        one_by_one,
        lambda d, x: d.__setitem__(slice(len(x) * 8), x.tobytes()),
    )


@honest()
def memory_that_is_written():
    return leaving(
        lambda: memoryview(bytearray(8)), lambda d, x: d.__setitem__(slice(8), x[0].tobytes())
    )


@honest()
def a_c_array_that_is_written():
    return leaving(ctypes.c_uint8 * 8, lambda d, x: ctypes.memmove(d, x[0].tobytes(), 8))


@honest()
def an_array_of_floats_that_is_written():
    return leaving(lambda: array.array("d", [0.0]), lambda d, x: d.__setitem__(0, float(x[0])))


@honest()
def elements_that_are_added_at_once():
    def extend(d, x):
        new = [ET.Element("value") for _ in x]
        for element, value in zip(new, x.tolist(), strict=True):
            element.text = str(value)
        d[0].extend(new)

    return leaving(nested_elements, fill_element, extend)


@honest()
def a_masked_array_that_is_filled():
    """What lies under the mask is not part of the result."""

    def one_by_one(d, x):
        for i, value in enumerate(x.tolist()):
            d[i] = value if value > 0.5 else np.ma.masked

    def fill(d, x):
        d[: len(x)] = x
        d[: len(x)][x <= 0.5] = np.ma.masked

    return leaving(lambda: np.ma.array(np.zeros(64), mask=np.zeros(64, bool)), one_by_one, fill)


@dataclass
class Options:
    """As many as a model may have."""

    layers: int = 32
    heads: int = 16
    width: int = 1024
    hidden: int = 2816
    words: int = 32_000
    window: int = 4096
    epsilon: float = 1e-5
    base: float = 10_000.0
    activation: str = "silu"
    is_causal: bool = True
    names: list[str] = field(default_factory=lambda: ["query", "key", "value", "output"])


class Rounding(enum.Enum):
    """An option."""

    UP, DOWN = "round towards plus infinity", "round towards minus infinity"


def with_argument(make):
    return arms(
        lambda x, d: x * 2,
        inputs=lambda bench: (*vectors(bench), make()),
        reference=lambda x, d: x + x,
    )


@honest()
def options_for_all_seeds():
    return with_argument(Options)


@honest()
def odd_options_for_all_seeds():
    """Few values of many types."""
    return with_argument(
        lambda: [
            *(Path("/tmp/folder"), Rounding.UP, slice(0, 9, 2), range(100)),
            *(decimal.Decimal("0.01"), fractions.Fraction(1, 3), dt.date(2026, 1, 1), dt.UTC),
            *(np.dtype("i8, f8"), np.datetime64("2026-01-01"), compile("x * 2", "", "eval")),
        ]
    )


@honest()
def files_of_each_seed():
    return arms(
        lambda x, d: x * 2,
        inputs=lambda bench: (*vectors(bench), file_of(vectors(bench)[0].tobytes())),
        reference=lambda x, d: x + x,
    )


@honest()
def an_ordinary_module():
    """Its attributes are the same for all seeds, and its parameters are not."""
    block = lambda i: (torch.nn.Conv2d(i, 2 * i, 3, padding=1), torch.nn.BatchNorm2d(2 * i))
    return with_argument(lambda: torch.nn.Sequential(*block(4), *block(8), torch.nn.GELU()))


@honest()
def a_scratch_buffer_of_zeros():
    return with_argument(lambda: SimpleNamespace(values=np.zeros(4096), data=bytearray(4096)))


@honest()
def a_table_of_numbers_that_is_static():
    return with_argument(lambda: static({str(i): i * i for i in range(200)}))


def prepared_with(make):
    """Return a claim with a prepared arm that reads a module or a tensor anew in each call."""
    return with_argument(make) | {
        "optimized": prepared(lambda x, d: lambda x, d: returning(FAST, x * 2))
    }


@honest()
def a_module_of_a_prepared_arm():
    """It keeps its parameters in lists as well, and a hook under a number that torch counts."""

    def make():
        module = torch.nn.LSTM(4, 4)
        module.register_forward_hook(lambda *_: None)
        return module

    return prepared_with(make)


@honest()
def a_tensor_of_a_prepared_arm_with_a_name():
    def make():
        tensor = torch.rand(8)
        tensor.title = "weights"
        return tensor

    return prepared_with(make)


@honest()
def a_number_of_a_module_that_is_read():
    """It cannot be overwritten in place, so each arm gets a new module for new values."""

    def make(bench):
        module = torch.nn.Identity()
        module.factor = float(np.random.default_rng(bench.seed).random())
        return module

    arm = lambda x, m: x * m.factor
    return arms(arm, inputs=lambda bench: (*vectors(bench), make(bench)), reference=arm)


@honest()
def texts_that_are_grouped_under_keys_of_each_seed():
    return leaving(lambda: collections.defaultdict(list), group)


@honest()
def a_sparse_matrix_that_is_scaled():
    return leaving(lambda: torch.eye(9).to_sparse(), lambda d, x: d.mul_(float(x[0])))


@honest()
def a_set_that_is_filled_in_another_order():
    return leaving(
        set,
        lambda d, x: d.update(bits(x).tolist()),
        lambda d, x: d.update(bits(x)[::-1].tolist()),
    )


@honest()
def a_set_that_both_arms_freeze():
    def freeze(d, x):
        d[0] = frozenset(bits(x).tolist())

    return leaving(lambda: [{1, 2}], freeze, freeze)


@honest()
def a_queue_that_is_filled():
    return leaving(lambda: collections.deque(maxlen=4), lambda d, x: d.extend(bits(x).tolist()))


@honest()
def a_cache_whose_order_is_kept():
    def again(d, x):
        key = int(64 * x[0])
        d[key] = d.pop(key)

    return leaving(a_cache, again, use)


@honest()
def a_dict_that_is_filled_in_another_order():
    fill = lambda step: lambda d, x: d.update({i: str(x[i]) for i in range(8)[::step]})
    return leaving(dict, fill(-1), fill(1))


@honest()
def a_file_in_memory_that_is_written_in_parts():
    def in_parts(d, x):
        d.write(x[:3].tobytes())
        d.write(x[3:].tobytes())

    return leaving(io.BytesIO, in_parts, lambda d, x: d.write(x.tobytes()))


@honest()
def texts_that_are_written():
    return leaving(lambda: [""], lambda d, x: d.__setitem__(0, str(x[0])))


@honest()
def decimals_that_are_written():
    return leaving(
        lambda: [decimal.Decimal(0)], lambda d, x: d.__setitem__(0, decimal.Decimal(float(x[0])))
    )


@honest()
def byte_strings_that_are_written():
    return leaving(lambda: np.zeros(1, "S8"), lambda d, x: d.__setitem__(0, str(x[0])[:8].encode()))


@honest()
def objects_that_lead_to_others_and_are_not_changed():
    """A registry of everything behind which the cheats hide lists."""
    return arms(
        lambda x, d: x * 2,
        inputs=lambda bench: (*vectors(bench), {k: make() for k, (make, _) in BEHIND.items()}),
        reference=lambda x, d: x + x,
    )


@honest()
def objects_that_contain_themselves():
    """A tree whose nodes know their parents, and a list in itself."""

    def inputs(bench):
        loop = [SimpleNamespace()]
        loop[0].parent = loop
        for _ in range(5000):
            loop[0] = SimpleNamespace(child=loop[0], root=loop)
        return *vectors(bench), SimpleNamespace(loop=loop)

    return arms(lambda x, d: x * 2, inputs=inputs, reference=lambda x, d: x + x)


@honest()
def a_structure_of_c_that_is_written():
    return leaving(Pair, lambda d, x: setattr(d, "second", int(1e6 * x[0])))


@honest()
def a_structure_with_a_pointer_that_is_read():
    return arms(
        lambda x, d: x * 2 + d.values[0],
        inputs=lambda bench: (*vectors(bench), a_node()),
        reference=lambda x, d: x + x,
    )


@honest()
def destinations_with_padding():
    """Both arms write all of each."""

    def fill(d, x):
        for part, (_, put_and_clear, _) in zip(d, DESTINATIONS.values(), strict=True):
            put_and_clear(part, x)

    def fill_anew(d, x):
        other = [make() for make, _, _ in DESTINATIONS.values()]
        fill(other, x)
        for part, values in zip(d, other, strict=True):
            part[:] = values

    return leaving(lambda: [make() for make, _, _ in DESTINATIONS.values()], fill, fill_anew)


@honest()
def a_destination_of_texts_that_is_read_first():
    def fill(d, x):
        d[:] = np.where(d == "", x[0].astype("U8"), d)

    return leaving(lambda: np.array(["", "text"] * 8, "U8"), fill)


@honest()
def long_doubles_with_other_bytes_between():
    """Of their 16 bytes, 10 hold a value."""

    def other(d, x):
        d[: len(x)] = x
        d.view(np.uint8).reshape(-1, 16)[:, 10:] = 7

    return leaving(lambda: np.zeros(64, "g"), lambda d, x: d.__setitem__(slice(len(x)), x), other)


@honest()
def seeds_that_both_arms_spawn():
    return leaving(lambda: np.random.SeedSequence(1), spawn)


@honest()
def a_storage_that_both_arms_write():
    write = lambda d, x: d.__setitem__(0, int(256 * x[0]))
    return leaving(lambda: torch.zeros(8).untyped_storage(), write)


def hashed(step):
    """Return an arm that updates a hash in steps, and returns its digest as numbers."""

    def arm(x, d):
        data = x.tobytes()
        for i in range(0, len(data), step):
            d.update(data[i : i + step])
        return np.frombuffer(d.digest(), np.uint8).copy()

    return arm


@honest(clock="host")
def a_hash_that_both_arms_update():
    """A set of inputs that is used twice in a block has another result then."""

    def inputs(bench):
        time.sleep(25e-3)  # so that blocks would share values, if calls did not update them
        return *vectors(bench), hashlib.sha256()

    return {
        "baseline": hashed(8),
        "optimized": hashed(1 << 20),
        "inputs": inputs,
        "reference": hashed(1 << 20),
        "metric": "wall",
    }


@honest()
def modules_among_the_arguments():
    """As in code that takes the library of its arrays as an argument."""
    return with_argument(lambda: [np, math, types.ModuleType("settings")])


@honest(clock="host")
def a_file_in_memory_that_is_read():
    """Each call reads all of it, so each must get it anew."""
    read = lambda d: np.frombuffer(d.read()) * 2
    numbers = lambda bench: np.random.default_rng(bench.seed).random(2**16)
    return {
        "baseline": read,
        "optimized": lambda d: np.frombuffer(d.read(8) + d.read()) * 2,
        "inputs": lambda bench: (io.BytesIO(numbers(bench).tobytes()),),
        "reference": read,
        "metric": "wall",
    }


@honest()
def an_iterator_that_is_read():
    """A stream of requests that each call takes until its end."""
    total = lambda d: sum(d)  # noqa: PLW0108  builtins have no signature
    return arms(
        total,
        lambda d: sum(list(d)),
        inputs=lambda bench: ((float(v) for v in vectors(bench)[0]),),
        reference=total,
    )


@honest()
def an_object_that_only_the_optimized_arm_changes():
    """A cache that lives in an argument, as that of a tokenizer."""

    class Cache:
        pass

    return leaving(Cache, lambda d, x: None, lambda d, x: setattr(d, "kept", len(x)))


@honest()
def an_object_that_is_read_only():
    class Scale:
        def __init__(self):
            self.by, self.names = 2, ["a", "b"]

    words = {
        "inputs": lambda bench: (*vectors(bench), Scale()),
        "reference": lambda x, scale: x + x,
    }
    return arms(lambda x, scale: x * scale.by, **words)


@honest()
def a_module_with_settings():
    return arms(
        lambda x: Total(x * 2, "float64"),
        lambda x: Total(x * 2, ["another"]),
        reference=lambda x: x + x,
    )


@honest()
def none_beside_a_result():
    """Attention returns no weights."""
    return arms(lambda x: (x * 2, None), lambda x: x * 2, reference=lambda x: x + x)


@honest()
def a_list_with_none():
    found = lambda x: [float(a) * 2 if i % 2 else None for i, a in enumerate(x)]
    return arms(found, reference=found)


def counting(key, keys):
    def counted(x):
        return collections.Counter(map(key, np.floor(x * keys).astype(int).tolist()))

    def in_arrays(x):
        found, counts = np.unique(np.floor(x * keys).astype(int), return_counts=True)
        return dict(zip(map(key, found.tolist()), counts.tolist(), strict=True))

    return arms(in_arrays, counted, reference=counted)


@honest()
def counts_by_key():
    return counting(int, keys=50)


@honest()
def counts_by_keys_that_differ_between_seeds():
    return counting(str, keys=500)


@honest()
def layers_by_number():
    by_layer = lambda x: {i: x[i % len(x)] * 2 for i in range(40)}
    words = {"inputs": lambda bench: (torch.randn(40, 8),)}
    return arms(by_layer, reference=lambda x: by_layer(x.double()), **words)


@honest()
def a_few_counters_beside_the_result():
    return arms(
        lambda x: (x * 2, np.arange(4), len(x)), reference=lambda x: (x + x, np.arange(4), len(x))
    )


@honest()
def a_mask_of_few_values():
    """A causal mask needs no work: its values are 0 and 1."""
    mask = np.tri(32, dtype=np.int64)
    return arms(lambda x: (x * 2, mask.copy()), reference=lambda x: (x + x, mask))


@honest()
def small_integers_that_are_sorted():
    """At most positions, the value is the same for all seeds."""

    def inputs(bench):
        return np.random.default_rng(bench.seed).integers(0, 50, 20_000), *vectors(bench)

    return arms(
        lambda n, x: (np.sort(n), x * 2), inputs=inputs, reference=lambda n, x: (np.sort(n), x + x)
    )


@honest()
def a_histogram_with_the_same_keys_for_all_seeds():
    def inputs(bench):
        return (np.random.default_rng(bench.seed).integers(0, 50, 20_000),)

    def in_arrays(n):
        return dict(enumerate(np.bincount(n, minlength=50).tolist()))

    def counted(n):
        return dict(sorted(collections.Counter(n.tolist()).items()))

    return arms(in_arrays, counted, inputs=inputs, reference=counted)


# objects of the inputs


@honest()
def rows_of_the_inputs_in_both_arms():
    return arms(sorted, inputs=rows_of_numbers, reference=sorted)


@honest()
def rows_of_an_argument_that_both_arms_change():
    def double(x):
        for row in x:
            row[:] = [2 * number for number in row]
        return x[:4]

    copied = lambda x: [row[:] for row in double(x)]
    doubled = lambda x: (np.array(x) * 2).tolist()
    words = {"inputs": rows_of_numbers, "reference": lambda x: (doubled(x)[:4], doubled(x))}
    return arms(double, copied, **words)


@honest()
def rows_that_are_copied_in_another_way():
    copied = lambda x: [row[:] for row in sorted(x)]
    return arms(copied, lambda x: sorted(map(list, x)), inputs=rows_of_numbers, reference=sorted)


def changing_rows(change, row=list):
    """Return a claim whose arms change many rows, which the reference returns."""

    def rows(bench):
        table = np.random.default_rng(bench.seed).random((bench.size(200, check=50), 2))
        return *vectors(bench), [row(numbers) for numbers in table.tolist()]

    def changed(rows):
        change(rows)
        return rows

    words = {"inputs": rows, "reference": lambda x, rows: (x * 2, changed(rows))}
    return arms(lambda x, rows: (change(rows), x * 2)[1], **words)


@honest()
def many_rows_that_are_sorted_in_place():
    return changing_rows(list.sort)


@honest()
def rows_of_tuples_that_are_replaced():
    return changing_rows(lambda rows: rows.__setitem__(slice(None), rows[::-1]), tuple)


@honest()
def a_column_of_many_rows():
    """The reference returns the one column that changes."""

    def double(rows):
        for row in rows:
            row[1] *= 2

    claim = changing_rows(double)
    reference = lambda x, rows: (x * 2, [2 * second for _, second in rows])
    return claim | {"reference": reference}


@honest()
def rows_in_a_dict_that_are_sorted_in_place():
    def inputs(bench):
        table = np.random.default_rng(bench.seed).random((200, 2)).tolist()
        return *vectors(bench), {"rows": table, "options": [1, 2]}

    def sort(x, d):
        d["rows"].sort()
        return x * 2

    return arms(sort, inputs=inputs, reference=lambda x, d: (x * 2, sorted(d["rows"])))


@honest()
def a_queue_that_both_arms_drain():
    def filled(x):
        jobs = queue.Queue()
        for value in x.tolist():
            jobs.put(value)
        return jobs

    def drained(jobs):
        return [jobs.get() for _ in range(jobs.qsize())]

    inputs = lambda bench: (filled(*vectors(bench)),)
    doubled = lambda jobs: np.array(drained(jobs)) * 2
    return arms(doubled, inputs=inputs, reference=doubled)


@honest()
def views_that_both_arms_release():
    def doubled(x, views):
        views[0].release()
        return x * 2

    inputs = lambda bench: (*vectors(bench), [memoryview(vectors(bench)[0].tobytes())])
    return arms(doubled, inputs=inputs, reference=doubled)


class Sensor:
    """An object whose class has a table, which is the same for all seeds."""

    UNITS = tuple(f"a unit of length number {i}" for i in range(16))

    def __init__(self, x):
        self.x, self.count = x, 0


@honest()
def objects_whose_class_has_a_table():
    def doubled(sensor):
        sensor.count += 1
        return sensor.x * 2

    inputs = lambda bench: (Sensor(*vectors(bench)),)
    return arms(doubled, lambda s: doubled(s) + 0, inputs=inputs, reference=doubled)


@honest()
def a_context_that_both_arms_use():
    def rounded(x, context):
        return np.array([float(context.create_decimal_from_float(v)) for v in x.tolist()])

    inputs = lambda bench: (*vectors(bench), decimal.Context(prec=5))
    return arms(rounded, inputs=inputs, reference=rounded)


@honest()
def a_module_with_the_same_hooks():
    hooked = lambda x: with_hooks(x, 3)
    return arms(hooked, inputs=vectors, reference=lambda x: x * 2)


@honest()
def objects_that_both_arms_put_in_order():
    def particles(bench):
        return ([SimpleNamespace(x=x) for x in vectors(bench)[0].tolist()],)

    def ordered(particles):
        particles.sort(key=lambda particle: particle.x)
        return np.array([particle.x for particle in particles])

    return arms(ordered, inputs=particles, reference=ordered)


@honest()
def rows_that_are_sorted_in_place():
    """A row may be in its place already, and for another seed it is not."""

    def rows_of(bench):
        return *vectors(bench), np.random.default_rng(bench.seed).random((12, 2)).tolist()

    def sort(x, rows):
        rows.sort()
        return x * 2

    return arms(sort, inputs=rows_of, reference=lambda x, rows: (x * 2, sorted(rows)))
