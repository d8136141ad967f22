"""Arms that leave out what is neither an array nor a number, or slow the baseline down a little."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import decimal
import enum
import gc
import hashlib
import io
import random
import threading
import time
import types
import weakref
import xml.etree.ElementTree as ET
import zlib
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from tests.cheats.case import Corpus
from tests.cheats.dishonest import LONG, SHORT, returning
from tests.cheats.dishonest_results import pair
from tests.plugin.claims import vectors

cheat = Corpus()
CHEATS = cheat.entries
marked = Corpus()
MARKED = marked.entries
"""Cheats that are not refused, and the text of ``unchecked`` that each must cause."""

LEFT = "optimized leaves other contents in d than the baseline"
UNREAD = "what calls change in d: optimized leaves other objects than the baseline"


def leaving(destination, fill, instead=lambda d, x: None):
    """Return a claim whose baseline also fills a destination, which its arms get."""

    def baseline(x, d):
        fill(d, x)
        return x * 2

    words = {
        "inputs": lambda bench: (*vectors(bench), destination()),
        "reference": lambda x, d: x + x,
    }
    return pair(baseline, lambda x, d: (instead(d, x), x * 2)[1], **words)


def bits(x):
    return x.view(np.uint8)


@cheat(LEFT)
def bytes_that_are_not_written():
    return leaving(lambda: bytearray(512), lambda d, x: d.__setitem__(slice(8), x[0].tobytes()))


@cheat(LEFT)
def memory_that_is_not_written():
    return leaving(
        lambda: memoryview(bytearray(8)), lambda d, x: d.__setitem__(slice(8), x[0].tobytes())
    )


@cheat(LEFT)
def a_set_that_is_not_frozen():
    return leaving(lambda: [{1, 2}], lambda d, x: d.__setitem__(0, frozenset(d[0])))


@cheat(LEFT)
def a_c_array_that_is_not_written():
    return leaving(ctypes.c_uint8 * 8, lambda d, x: ctypes.memmove(d, x[0].tobytes(), 8))


@cheat(LEFT)
def an_array_of_integers_that_is_not_written():
    return leaving(
        lambda: array.array("q", [0]),
        lambda d, x: d.__setitem__(0, int.from_bytes(x[0].tobytes()[:7])),
    )


@cheat(LEFT)
def a_set_that_is_not_filled():
    return leaving(set, lambda d, x: d.update(bits(x).tolist()))


@cheat(LEFT)
def a_queue_that_is_not_filled():
    return leaving(lambda: collections.deque(maxlen=4), lambda d, x: d.extend(bits(x).tolist()))


def a_cache():
    return collections.OrderedDict.fromkeys(range(64), "")


def use(d, x):
    d.move_to_end(int(64 * x[0]))


@cheat(LEFT)
def a_cache_whose_order_is_not_kept():
    return leaving(a_cache, use)


@cheat(LEFT)
def a_file_in_memory_that_is_not_written():
    return leaving(io.BytesIO, lambda d, x: d.write(x.tobytes()))


@cheat(LEFT)
def texts_that_are_not_written():
    return leaving(lambda: [""], lambda d, x: d.__setitem__(0, str(x[0])))


@cheat(LEFT)
def decimals_that_are_not_written():
    return leaving(
        lambda: [decimal.Decimal(0)], lambda d, x: d.__setitem__(0, decimal.Decimal(float(x[0])))
    )


@cheat(LEFT)
def byte_strings_that_are_not_written():
    return leaving(lambda: np.zeros(1, "S8"), lambda d, x: d.__setitem__(0, str(x[0])[:8].encode()))


def fill_element(d, x):
    for value in x.tolist():
        ET.SubElement(d[0], "value").text = str(value)


def nested_elements():
    root = ET.Element("root")
    ET.SubElement(root, "rows")
    return root


@cheat(LEFT)
def elements_that_are_not_added():
    return leaving(nested_elements, fill_element)


@cheat(LEFT)
def an_element_deep_in_others_that_is_not_added():
    def deep():
        root = element = ET.Element("root")
        for _ in range(5000):
            element = ET.SubElement(element, "child")
        return root

    return leaving(deep, lambda d, x: ET.SubElement([*d.iter()][-1], "value").set("x", str(x[0])))


@cheat(LEFT)
def a_mask_that_is_not_set():
    return leaving(
        lambda: np.ma.array(np.arange(64), mask=np.zeros(64, bool)),
        lambda d, x: d.mask.__setitem__(slice(len(x)), x > 0.5),
    )


def group(d, x):
    for value in x.tolist():
        d[int(100 * value)].append(str(value))


@cheat(LEFT)
def texts_that_are_not_grouped():
    return leaving(lambda: collections.defaultdict(list), group)


@cheat(f"{LEFT} (in|on new values in) a timed block")
def bytes_that_are_written_until_it_is_timed():
    claim = leaving(lambda: bytearray(8), lambda d, x: d.__setitem__(slice(8), x[0].tobytes()))
    calls = iter(range(1000))

    def arm(x, d):
        return claim["baseline"](x, d) if next(calls) < 20 else claim["optimized"](x, d)

    return claim | {"optimized": arm}


class Box:
    """An object that can be a key, and that holds a list."""

    def __init__(self):
        self.values = []


@marked(UNREAD)
def an_attribute_that_is_not_written():
    return leaving(Box, lambda d, x: setattr(d, "value", np.sort(x).tolist()))


@marked(UNREAD)
def an_attribute_that_is_written_until_it_is_timed():
    claim = leaving(Box, lambda d, x: setattr(d, "values", np.sort(x).tolist()))
    calls = iter(range(1000))

    def arm(x, d):
        return claim["baseline"](x, d) if next(calls) < 20 else claim["optimized"](x, d)

    return claim | {"optimized": arm}


def of_a_class_with_a_list(base=object):
    return type("Seen", (base,), {"values": []})


@marked(UNREAD)
def a_list_of_the_class_that_is_not_filled():
    an_object = lambda: of_a_class_with_a_list()()  # noqa: PLW0108  a class per set of inputs
    return leaving(an_object, lambda d, x: d.values.append(float(x[0])))


@marked(UNREAD)
def a_list_of_the_metaclass_that_is_not_filled():
    def an_object():
        return of_a_class_with_a_list(type)("Of", (), {})()

    return leaving(an_object, lambda d, x: type(type(d)).values.append(float(x[0])))


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def an_attribute_of_an_enum_member_that_is_not_set():
    def member():
        return enum.Enum("Kind", ["FIRST", "SECOND"]).FIRST

    return leaving(member, lambda d, x: setattr(d, "last", float(x[0])))


@marked(UNREAD)
def flags_of_a_context_that_are_not_set():
    def round_(d, x):
        d.clear_flags()
        for value in x.tolist():
            d.create_decimal_from_float(value)

    return leaving(lambda: decimal.Context(prec=4), round_)


@cheat("optimized reads d to another place than the baseline")
def an_iterator_of_numpy_that_is_not_read():
    return leaving(lambda: np.arange(64.0).flat, lambda d, x: [next(d) for _ in range(9)])


class Archive:
    """An object whose attribute shows how much was compressed, but not whether it was."""

    def __init__(self):
        self.nbytes, self.compressor = 0, zlib.compressobj()

    def note(self, x):
        self.nbytes += x.nbytes

    def add(self, x):
        self.note(x)
        self.compressor.compress(x)


@marked("what calls change in d: it refers to objects that are not compared")
def values_that_are_not_compressed():
    return leaving(Archive, Archive.add, Archive.note)


@marked("what calls change in d: it refers to objects that are not compared")
def an_object_behind_a_compressor_that_is_not_changed():
    """What shows nothing ends no search: the box is read after the compressor."""
    make = lambda: SimpleNamespace(a=zlib.compressobj(), box=Box())
    return leaving(make, lambda d, x: d.box.values.append(float(x[0])))


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def an_array_of_floats_that_is_not_written():
    return leaving(lambda: array.array("d", [0.0]), lambda d, x: d.__setitem__(0, float(x[0])))


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def a_sparse_matrix_that_is_not_scaled():
    return leaving(lambda: torch.eye(9).to_sparse(), lambda d, x: d.mul_(float(x[0])))


def local_to_a_thread():
    local = threading.local()
    local.values = []
    return local


def a_context():
    context = contextvars.Context()
    context.run(VALUES.set, [])
    return context


def a_function_that_appends():
    values = []
    return lambda value: values.append(value)  # noqa: PLW0108  a function of Python


class Node(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int64), ("values", ctypes.POINTER(ctypes.c_double)))


def a_node():
    node = Node()
    node.values = (ctypes.c_double * 8)()
    return node


VALUES: contextvars.ContextVar[list[float]] = contextvars.ContextVar("values")
BOXES = collections.deque(maxlen=10_000)  # keeps what weak references refer to


def a_weak_reference():
    BOXES.append(Box())
    return weakref.ref(BOXES[-1])


BEHIND = {  # what is behind an object, and how calls change it
    "proxy": (lambda: types.MappingProxyType({"x": []}), lambda d, x: d["x"].append(x)),
    "cell": (a_function_that_appends, lambda d, x: d(x)),
    "weak": (a_weak_reference, lambda d, x: d().values.append(x)),
    "local": (local_to_a_thread, lambda d, x: d.values.append(x)),
    "context": (a_context, lambda d, x: d[VALUES].append(x)),
    "method": (lambda: [].append, lambda d, x: d(x)),
    "python": (lambda: Box().__init__, lambda d, x: d.__self__.values.append(x)),
    "pointer": (
        lambda: ctypes.pointer(ctypes.c_double()),
        lambda d, x: setattr(d.contents, "value", x),
    ),
    "node": (a_node, lambda d, x: d.values.__setitem__(3, x)),
    "key": (lambda: {Box(): 1}, lambda d, x: next(iter(d)).values.append(x)),
    "item": (lambda: {Box()}, lambda d, x: next(iter(d)).values.append(x)),
}


def behind(name):
    destination, change = BEHIND[name]
    return leaving(destination, lambda d, x: change(d, float(x[0])))


@marked(UNREAD)
def a_list_behind_a_mapping_proxy():
    return behind("proxy")


@marked(UNREAD)
def a_list_in_a_cell():
    return behind("cell")


@marked(UNREAD)
def a_list_behind_a_weak_reference():
    return behind("weak")


@marked(UNREAD)
def a_list_of_a_thread():
    return behind("local")


@marked(UNREAD)
def a_list_in_a_context():
    return behind("context")


@marked(UNREAD)
def a_list_behind_its_method():
    return behind("method")


@marked(UNREAD)
def an_object_behind_its_method():
    return behind("python")


@marked(UNREAD)
def a_number_behind_a_pointer():
    return behind("pointer")


@marked(UNREAD)
def numbers_behind_a_pointer_in_a_structure():
    return behind("node")


@marked(UNREAD)
def a_list_in_a_key():
    return behind("key")


@marked(UNREAD)
def a_list_in_an_item_of_a_set():
    return behind("item")


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int64), ("second", ctypes.c_int32))


@cheat(LEFT)
def a_structure_of_c_that_is_not_written():
    return leaving(Pair, lambda d, x: setattr(d, "second", int(1e6 * x[0])))


USED = 8  # items of a destination that hold values; others are padding


def padding(destination, convert):
    """Return how a destination is filled with values, and how the rest of it is cleared."""
    empty = destination()[USED:]

    def put(d, x):
        d[:USED] = convert(x[:USED])

    def put_and_clear(d, x):
        put(d, x)
        d[USED:] = empty

    return destination, put_and_clear, put


def masked():
    return np.ma.array(np.zeros(64), mask=np.zeros(64, bool))


def in_records(x):
    return np.array([(value, str(value)) for value in x.tolist()], "f8, U8")


DESTINATIONS = {
    "texts": padding(lambda: np.zeros(64, "U8"), lambda x: x.astype("U8")),
    "dates": padding(lambda: np.zeros(64, "M8[s]"), lambda x: (1e9 * x).astype("M8[s]")),
    "objects": padding(lambda: np.full(64, None), lambda x: [*map(str, x)]),
    "records": padding(lambda: np.zeros(64, "f8, U8"), in_records),
    "masked": padding(masked, lambda x: x),
    "bytes": padding(lambda: bytearray(64), lambda x: x.tobytes()[:USED]),
}


def without_padding(name):
    destination, baseline, optimized = DESTINATIONS[name]
    claim = leaving(destination, baseline)
    return claim | {
        "optimized": lambda x, d: returning(SHORT, (optimized(d, x), x * 2)[1]),
    }


@cheat(r"optimized disagrees with the reference: d\[8\] is nan")
def padding_of_a_list_that_is_not_written():
    _, baseline, optimized = padding(lambda: [0.0] * 64, lambda x: x.tolist())
    arm = lambda put: lambda x, d: (put(d, x), x * 2)[1]
    words = {
        "inputs": lambda bench: (*vectors(bench), [0.0] * 64),
        "reference": lambda x, d: (x + x, [*x[:USED], *[0.0] * (64 - USED)]),
    }
    return pair(arm(baseline), arm(optimized), **words)


@cheat(LEFT)
def padding_of_texts_that_is_not_written():
    return without_padding("texts")


@cheat(LEFT)
def padding_of_dates_that_is_not_written():
    return without_padding("dates")


@cheat(LEFT)
def padding_of_objects_that_is_not_written():
    return without_padding("objects")


@cheat(LEFT)
def padding_of_bytes_that_is_not_written():
    return without_padding("bytes")


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def padding_of_records_that_is_not_written():
    return without_padding("records")


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def padding_of_a_masked_array_that_is_not_written():
    return without_padding("masked")


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def long_doubles_that_are_not_written():
    return leaving(lambda: np.zeros(64, "g"), lambda d, x: d.__setitem__(slice(len(x)), x))


def spawn(d, _x):
    d.spawn(1)


@cheat(LEFT)
def a_hash_that_is_not_updated():
    return leaving(hashlib.sha256, lambda d, x: d.update(x.tobytes()))


@cheat(LEFT)
def a_hash_of_any_length_that_is_not_updated():
    return leaving(hashlib.shake_128, lambda d, x: d.update(x.tobytes()))


@cheat(LEFT)
def a_storage_that_is_not_written():
    return leaving(
        lambda: torch.zeros(8).untyped_storage(), lambda d, x: d.__setitem__(0, int(256 * x[0]))
    )


@cheat(LEFT)
def dates_that_are_not_written():
    return leaving(
        lambda: [np.datetime64(0, "s")] * 20,
        lambda d, x: d.__setitem__(0, np.datetime64(int(1e9 * x[0]), "s")),
    )


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def seeds_that_are_not_spawned():
    return leaving(lambda: np.random.SeedSequence(1), spawn)


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def bits_that_are_not_drawn():
    return leaving(lambda: np.random.PCG64(1), lambda d, x: d.random_raw())


@marked(UNREAD)
def an_attribute_of_a_module_object():
    return leaving(
        lambda: types.ModuleType("settings"), lambda d, x: setattr(d, "value", float(x[0]))
    )


PLACE = "optimized reads d to another place than the baseline"


@cheat(PLACE)
def a_file_in_memory_that_is_not_read():
    return leaving(lambda: io.BytesIO(b"text"), lambda d, x: d.read(2))


@cheat(PLACE)
def an_iterator_that_is_not_read():
    return leaving(lambda: iter([1, 2]), lambda d, x: next(d))


@cheat(PLACE)
def a_generator_that_is_not_read():
    return leaving(lambda: (i for i in range(9)), lambda d, x: next(d))


def draw(d, _x):
    d.random() if type(d) is random.Random else d.standard_normal(9)


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def a_generator_that_does_not_go_on():
    return leaving(lambda: np.random.default_rng(1), draw)


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def a_generator_of_python_that_does_not_go_on():
    return leaving(lambda: random.Random(1), draw)


@marked("what calls leave in d: optimized leaves other contents than the baseline")
def a_generator_of_torch_that_does_not_go_on():
    seeded = lambda: torch.Generator().manual_seed(1)
    return leaving(seeded, lambda d, x: torch.rand(9, generator=d))


class Total(torch.nn.Module):
    def __init__(self, total, rest):
        super().__init__()
        self.register_buffer("total", torch.as_tensor(total))
        self.rest = rest


@marked("attributes of results, beside their arrays and numbers")
def an_attribute_of_a_module():
    return pair(
        lambda x: Total(x * 2, np.sort(x).tolist()),
        lambda x: Total(x * 2, None),
        reference=lambda x: x + x,
    )


def with_hooks(x, count):
    module = Total(x * 2, None)
    for factor in range(count):
        module.register_forward_hook(lambda _module, _args, result, by=factor: result * by)
    return module


@marked("attributes of results: optimized's modules have 0 hooks, the baseline's 9")
def hooks_that_are_not_registered():
    return pair(lambda x: with_hooks(x, 9), lambda x: with_hooks(x, 0), reference=lambda x: x + x)


@dataclass
class Sums:
    total: np.ndarray


@marked("attributes of results, beside their arrays and numbers")
def an_attribute_beside_fields():
    def baseline(x):
        result = Sums(x * 2)
        result.sorted = np.sort(x).tolist()
        return result

    return pair(baseline, lambda x: Sums(x * 2), reference=lambda x: x + x)


@cheat(r"the reference returns .*None")
def a_list_of_none():
    return pair(
        lambda x: (x * 2, [None for _ in x]),
        lambda x: (x * 2, None),
        reference=lambda x: (x + x, None),
    )


@cheat(r"optimized's result is .*None")
def a_list_of_none_that_the_reference_has():
    return pair(
        lambda x: (x * 2, [None for _ in x]),
        lambda x: (x * 2, None),
        reference=lambda x: (x + x, [None for _ in x]),
    )


@cheat("drawn elements of result.*, keys are the same for other seeds")
def keys_that_no_seed_changes():
    """The work is to sort; all values are 1."""
    return pair(
        lambda x: (x * 2, dict.fromkeys(np.argsort(np.argsort(x)).tolist(), 1)),
        lambda x: (x * 2, dict.fromkeys(range(len(x)), 1)),
        reference=lambda x: (x + x, dict.fromkeys(range(len(x)), 1)),
    )


@cheat("optimized disagrees with the reference")
def keys_that_are_wrong():
    keys = lambda x: np.floor(x * 1e6).astype(int)
    return pair(
        lambda x: dict.fromkeys(keys(x).tolist(), 1),
        lambda x: dict.fromkeys(range(len(x)), 1),
        reference=lambda x: dict.fromkeys(keys(x).tolist(), 1),
    )


@cheat("drawn elements of result.* are the same for other seeds")
def integers_that_no_seed_changes():
    """The costly output is a sorted permutation; only the cheap one depends on the inputs."""

    def inputs(bench):
        return np.random.default_rng(bench.seed).permutation(200), *vectors(bench)

    return pair(
        lambda p, x: (x * 2, np.sort(p)),
        lambda p, x: (x * 2, np.arange(len(p))),
        inputs=inputs,
        reference=lambda p, x: (x + x, np.arange(len(p))),
    )


@marked("whether another arm slows the baseline down")
def a_table_that_becomes_longer():
    table = np.ones(1)

    def optimized(x):
        table[0] = 2.0
        return returning(SHORT, x * 2)

    baseline = lambda x: returning(LONG * float(table[0]), x * 2)
    return {"baseline": baseline, "optimized": optimized, "metric": "wall"}


ONLY_TIMED = "whether the baseline is slow only while it is timed: baseline took"


@marked(f"{ONLY_TIMED}.* with garbage collection on, which is off in timed calls", clock="host")
def a_baseline_that_is_slow_without_garbage_collection():
    def baseline(x):
        time.sleep(3e-3 if gc.isenabled() else 30e-3)
        return x * 2

    def optimized(x):
        time.sleep(6e-3)
        return x * 2

    return {"baseline": baseline, "optimized": optimized, "metric": "wall"}
