"""What the code of an arm refers to."""

import contextvars
import dataclasses
import functools
import json
import types

import numpy as np
import pytest
import torch

from pytest_aiperf import prepared
from pytest_aiperf.correctness.references import References

TABLE = {0: 1.0}


def scaled(x):
    return x * TABLE[0]


def labels(references):
    return {references.label(place) for place in references.states()}


def test_a_changed_global_is_seen(monkeypatch):
    references = References(scaled)
    before = references.states()
    monkeypatch.setitem(TABLE, 0, 2.0)
    after = references.states()
    assert [references.label(p) for p in before if before[p] != after[p]] == ["TABLE"]


class Own:
    def __init__(self):
        self.kept, self.used = None, 1


@pytest.mark.parametrize(
    ("value", "change", "is_replaced"),
    [
        ([1, 2], lambda x: x.append(3), False),
        ([1, 2], lambda x: x.insert(0, 3), True),
        ([1, 2], lambda x: x.pop(), True),
        ({"a": 1}, lambda x: x.update(b=2), False),
        ({"a": 1}, lambda x: x.update(a=2), True),
        ({1, 2}, lambda x: x.add(0), False),
        (Own(), lambda x: setattr(x, "kept", 1), False),
        (Own(), lambda x: setattr(x, "more", 1), False),
        (Own(), lambda x: setattr(x, "used", 2), True),
    ],
)
def test_a_value_that_grows_is_not_replaced(value, change, is_replaced):
    references = References(lambda x: (value, x))
    before = references.states()
    assert references.replaced_since(before) == []
    change(value)
    assert references.replaced_since(before) == ["value"] * is_replaced


@pytest.mark.parametrize(("first", "is_replaced"), [(1, True), (None, False)])
def test_a_name_with_another_value_is_replaced_unless_it_had_none(first, is_replaced):
    value = first
    references = References(lambda x: (value, x))
    before = references.states()
    value = 2
    assert references.replaced_since(before) == ["value"] * is_replaced


def test_memory_in_caches_generators_methods_and_slots_counts():
    class Slots:
        __slots__ = ("table",)

    slots, cached = Slots(), functools.cache(lambda: np.ones(1))
    slots.table, generator = np.ones(2), (table for table in [np.ones(4)])
    get = {"table": np.ones(8)}.get
    cached()
    assert References(lambda: (slots, cached, generator, get)).nbytes[True] >= 8 * (1 + 2 + 8)
    assert References(cached).holds(cached())


def test_a_context_variable_counts_with_its_default_and_what_is_set():
    variable = contextvars.ContextVar("variable", default=(np.ones(4),))
    for call in (variable.get, lambda: variable.get()[0]):
        references = References(call)
        before = references.states()
        assert labels(references) >= {"its own code", "variable"}
        assert references.holds(variable.get()[0][1:])
        variable.set((np.ones(4),))
        assert references.states() != before
        assert references.holds(variable.get()[0][1:], references.kept())


def test_a_table_beside_a_list_that_contains_itself_is_found():
    table = [np.ones(4)]
    table.append(table)
    assert References(lambda: table).holds(table[0][1:])


def test_a_table_behind_many_numbers_is_found():
    numbers = tuple(float(i) for i in range(40))
    table = np.ones(4)

    def window():
        return table[1:]

    call = functools.partial(lambda *_: window(), *numbers)
    assert References(call).holds(window())


def test_an_object_whose_class_refuses_to_be_looked_at_is_left_alone():
    class Refusing(type):
        def __getattribute__(cls, name):
            raise RuntimeError(name)

    class Odd(metaclass=Refusing):
        pass

    odd = object.__new__(Odd)
    references = References(lambda: odd)
    assert references.states().keys()
    assert not references.holds([np.ones(1)], references.kept())


def replacing_code(call):
    call.__code__ = (lambda x, *, scale=1: x).__code__


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (replacing_code, "its own code"),
        (lambda call: setattr(call, "__defaults__", (1,)), "its own code"),
        (lambda call: setattr(call, "easy", True), "its own code"),
        (lambda call: call.__kwdefaults__.update(scale=2), "scale"),
        (lambda call: call.__globals__.update(sorted=list), "sorted"),
        (lambda call: call.__globals__.update(later=1), "later"),
    ],
)
def test_each_way_to_change_a_function_is_seen(change, changed):
    names = {}
    exec("def call(x, *, scale=1): return sorted(later * x)", names)
    references = References(names["call"])
    before = references.states()
    change(names["call"])
    after = references.states()
    places = before.keys() | after.keys()
    assert {references.label(p) for p in places if before.get(p) != after.get(p)} == {changed}


def test_an_attribute_of_the_name_of_a_later_global_is_another_name():
    names = {}
    exec("def call(x): return x.later", names)
    references = References(names["call"])
    names["later"] = 1
    assert "later" not in labels(references)


def test_a_library_may_wrap_its_functions(monkeypatch):
    """As torch does when it compiles for the first time."""
    references = References(lambda x: json.dumps(x))  # noqa: PLW0108  refers to the module
    before = references.states()
    again = types.FunctionType(json.dumps.__code__, vars(json), "dumps")
    again.__qualname__, again.__module__ = "dumps", "json"
    monkeypatch.setattr(json, "dumps", again)
    assert references.states() == before
    monkeypatch.setattr(json, "dumps", json.loads)
    assert references.states() != before


def test_what_libraries_refer_to_is_left_out():
    assert labels(References(json.loads)) == set()
    assert labels(References(lambda x: torch.cdist(x, x) * TABLE[0])) >= {"torch", "TABLE"}
    assert "sys.modules" not in labels(References(lambda x: torch.cdist(x, x)))


def test_what_a_launcher_of_the_plugin_keeps_is_left_out():
    class Launcher:
        def __call__(self, x):
            self.loaded = True

    launcher = Launcher()
    assert labels(References(launcher)) >= {"self"}
    Launcher.__module__ = "pytest_aiperf.build.nvcc"
    assert labels(References(launcher)) == set()


def test_what_an_object_of_a_library_keeps_is_left_out():
    """A cache of compiled kernels grows with calls of other arms, which slows none down."""

    class Own:
        cached = None

    library, own = torch.nn.Identity(), Own()
    references = References(lambda x: (library, own, x))
    before = references.states()
    library.cached = own.cached = 1
    after = references.states()
    assert [references.label(p) for p in before if before[p] != after[p]] == ["own"]


def test_assert_statements_of_a_setup_take_no_time_of_a_call():
    def asserting(factor):
        assert factor  # pytest rewrites this one
        return lambda x: x * factor

    def returning(factor):
        def call(x):
            assert factor
            return x * factor

        return call

    for arm in (asserting, prepared(returning)):
        assert len(References(arm).asserting) == 1
    for setup in (asserting, functools.partial(asserting, 2)):
        assert not References(prepared(setup)).asserting


def test_a_setup_may_be_an_object_without_a_hash():
    @dataclasses.dataclass
    class Factor:
        value: float

        def __call__(self, x):
            return lambda x: x * self.value

    assert Factor.__hash__ is None
    references = References(prepared(Factor(2.0)))
    assert any(references.label(place) == "self" for place in references.states())
