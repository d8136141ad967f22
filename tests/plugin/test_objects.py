"""Objects among the arguments after a call, and memory inside of them."""

import array
import collections
import functools
import io
import weakref
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytest_aiperf.correctness import agreement, contents, files, objects, reach, stored, tensors
from pytest_aiperf.correctness.argument_effects import ArgumentEffects
from pytest_aiperf.correctness.objects import Originals
from pytest_aiperf.correctness.tensors import Inputs


def state_after(call, *args):
    originals = Originals(args, range(len(args)))
    call(*args)
    return originals.state_after(args)


@pytest.mark.parametrize(
    "make",
    [lambda: bytearray(b"text"), lambda: array.array("d", [1.0, 2.0]), lambda: io.BytesIO(b"text")],
)
def test_a_locked_buffer_is_found_and_keeps_its_contents(make):
    buffer, views = make(), []
    assert not state_after(lambda b: None, buffer).locked
    view = buffer.getbuffer if isinstance(buffer, io.BytesIO) else lambda: memoryview(buffer)
    assert state_after(lambda b: views.append(view()), buffer).locked == {"args[0]"}
    contents = io.BytesIO.getvalue if isinstance(buffer, io.BytesIO) else bytes
    assert contents(buffer) == contents(make())


def test_a_result_may_lie_in_a_buffer():
    buffer, other = bytearray(8), bytearray(8)
    result = np.frombuffer(buffer, np.uint8)
    view = memoryview(other)
    state = Originals((buffer, other), ()).state_after((buffer, other), [result])
    assert state.locked == {"args[1]"}
    assert view.nbytes == 8


def test_empty_and_closed_buffers_are_not_locked():
    closed = io.BytesIO()
    closed.close()
    args = closed, bytearray(), array.array("d")
    assert not state_after(lambda *_: None, *args).locked


def test_an_item_is_stale_if_its_old_object_has_other_contents():
    changes = {
        "in place": lambda d: d["a"].append(2.0),
        "equal": lambda d: d.update(a=[1.0]),
        "other": lambda d: d.update(a=[2.0]),
        "gone": lambda d: d.pop("a"),
    }
    stale = {name for name, change in changes.items() if state_after(change, {"a": [1.0]}).stale}
    assert stale == {"other"}


@pytest.mark.parametrize(
    ("value", "repeats"),
    [(SimpleNamespace(x=1), 7), (Path("a"), 0), (object(), 0), (SimpleNamespace, 0), (print, 0)],
)
def test_objects_that_can_be_changed_count_as_often_as_they_appear(value, repeats):
    assert state_after(lambda d: d.extend([value] * 8), []).repeats == repeats


def inside():
    """Objects that hold an array, each with what reads it."""
    x = torch.arange(64.0)
    cached = functools.lru_cache(lambda: x)
    cached()
    bound = SimpleNamespace(x=x)
    objects_array = np.empty(1, object)
    objects_array[0] = x
    generator = (x for _ in range(1))
    return {
        "attribute": bound,
        "partial": functools.partial(print, x),
        "cache": cached,
        "method": collections.deque([x]).append,
        "default": lambda x=x: x,
        "array of objects": objects_array,
        "set": {(1, bound.__class__, id(x)), functools.partial(print, x)},
        "generator": generator,
        "weak reference": weakref.ref(x),
        "dict": {1: {"x": [x]}},
    }, x


@pytest.mark.parametrize("name", inside()[0])
def test_memory_is_found_inside_of_objects_of_many_kinds(name):
    holders, x = inside()
    hidden = reach.Hidden((holders[name],), lambda: (x.clone(),))
    assert hidden.is_viewed_by(x[8:])
    assert not hidden.is_viewed_by(x.clone())


def test_what_a_call_has_written_there_is_a_result_of_its_own():
    holder = SimpleNamespace(x=np.arange(64.0))
    hidden = reach.Hidden((holder,), lambda: (SimpleNamespace(x=np.arange(64.0)),))
    assert hidden.is_viewed_by(holder.x[1:])
    holder.x += 1
    assert not hidden.is_viewed_by(holder.x[1:])


def test_memory_of_a_gpu_is_found_inside_of_objects(monkeypatch):
    """Arrays that are said to be on a GPU are only compared as torch does it there."""
    monkeypatch.setattr(tensors, "on_host", lambda _: False)
    make = lambda: (SimpleNamespace(x=torch.arange(64.0), y=[torch.ones(64)]),)
    args = make()
    hidden = reach.Hidden(args, make)
    assert hidden.is_viewed_by(args[0].x[8:])
    assert hidden.is_viewed_by(args[0].y[0])
    assert not hidden.is_viewed_by(args[0].x[8:].clone())
    args[0].x[0] = 3
    assert not hidden.is_viewed_by(args[0].x[8:])
    assert not hidden.is_viewed_by(args[0].y[0][:8])  # less than is worth a look


def test_what_is_not_looked_at_is_told(monkeypatch):
    monkeypatch.setattr(reach, "MAX_OBJECTS", 10)
    make = lambda: Inputs((np.arange(64.0), [object() for _ in range(20)]), (), 0)
    double = lambda inputs: lambda x, d: x * 2
    arms = {"baseline": double, "optimized": double}
    unchecked = set()
    effects = ArgumentEffects(returned=1)
    agreement.agree(arms, make, lambda x, d: x + x, effects, unchecked=unchecked)
    assert sorted(text.partition(":")[0] for text in unchecked) == [
        f"whether {arm} returns views of memory inside its arguments" for arm in arms
    ]


def test_no_code_of_odd_objects_runs():
    class Meta(type):
        def __hash__(cls):
            raise AssertionError

        __eq__ = __instancecheck__ = __subclasscheck__ = __getattribute__ = __hash__

    class Odd(metaclass=Meta):
        def __getattribute__(self, name):
            raise AssertionError

        __hash__ = __eq__ = __iter__ = __len__ = __bool__ = __buffer__ = __getattribute__

    class Rows(list):
        def __iter__(self):
            raise AssertionError

        __len__ = __getitem__ = __eq__ = __iter__

    odd = object.__new__(Odd)
    loop = SimpleNamespace(odd=odd)
    loop.loop = loop
    args = ([odd, Rows([odd, [1.0]]), loop, Odd, Rows],)
    assert state_after(lambda d: None, *args) == objects.State(0, 0, *[frozenset()] * 6)
    assert contents.read(args) == contents.read(args)
    assert not reach.Hidden(args, lambda: args).is_viewed_by(np.arange(64.0))


def test_a_list_with_null_items_is_not_read():
    builder = ET.TreeBuilder()
    builder.start("a", {})
    assert stored.referents(builder) == []
    assert builder.end("a").tag == "a"


def test_a_text_that_no_file_can_have_as_its_name_is_no_path():
    assert files.read(("/half of a pair: \ud800", "/a\0b", "/" + "a" * 5000)) == {}
    assert files.read(("/half of a name: \udce9",)) == {"args[0]": files.NOTHING}
