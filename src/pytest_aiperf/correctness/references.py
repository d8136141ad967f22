"""Finds what the code of an arm refers to: globals, closures, attributes of modules and classes.

The values of context variables count like those of closures, and cached functions like others. In
these places, an arm may change values that the baseline uses, hold memory, or use a function that
the test has replaced. Only names in the code are looked up: state that an object keeps in C++ is
not visible.
"""

import builtins
import collections
import contextlib
import contextvars
import dis
import functools
import gc
import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_aiperf.model import Prepared
from pytest_aiperf.rules import validity

from . import stored, tensors

MAX_FUNCTIONS = 16  #: Most functions whose code is read: each may lead to many more.
MAX_ITEMS = 64  #: Most items of a container that are compared, along with its length.
_PLAIN = (int, float, complex, bool, str, type(None))
_PLAIN_IDS = {*map(id, _PLAIN)}
_VALUES = (*_PLAIN, bytes)
_CACHED = type(functools.cache(len))  # functions that keep their results in C
_VARIABLE = contextvars.ContextVar
_UNSET = types.CellType()  # a cell that is not set is equal to it
_CODE = (type, types.ModuleType, types.FunctionType)  # these lead to all objects there are
_vars = type.__dict__["__dict__"].__get__  # of a class, whatever its metaclass defines
_flags = type.__dict__["__flags__"].__get__
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_ITEM_IDS = {*map(id, (*_CONTAINERS, *_DICTS))}

_INSPECTED = (
    "builtins", "collections", "copy", "functools", "io", "itertools", "json", "math", "numpy",
    "os", "pathlib", "pickle", "random", "re", "struct", "time", "torch", "weakref", "zlib",
)  # fmt: skip
_INSPECTED_OF_TORCH = "torch._tensor", "torch.functional", "torch.nn.functional"
"""Packages and modules in which :func:`replaced_functions` looks: all would take 0.1 s."""

Place = tuple[int, str]  #: The id of a dict, cell or context variable, and a name in it.
State = tuple[Any, ...]
Kept = Sequence[tuple[Any, object]]  #: Arrays, containers and buffers, with samples of each.


_OF_ASSERTS = "@pytest_ar"  # a module that assert statements use once pytest has rewritten them


class References:
    """The places that the code of a callable refers to, directly or through other functions."""

    def __init__(self, call: object) -> None:
        self._places: dict[Place, tuple[str, Any]] = {}
        self.replaced: set[str] = set()
        """Names of library functions that were replaced by functions from elsewhere."""
        self.asserting: set[str] = set()
        """Names of functions with assert statements that pytest has rewritten: they take longer."""
        self._setups: set[int] = set()  # ids of functions that run before their arm is timed
        if not _is_installed(call):
            self._hold("its own code", call)
        self._read(call)
        self._first = self._held()  # before the first call
        self._spans = _spans(self._first.values())
        arrays = self._arrays()
        self.nbytes = {
            on_host: tensors.nbytes(tuple(a for a in arrays if tensors.on_host(a) is on_host))
            for on_host in (False, True)
        }
        """Bytes of arrays at the places before the first call, by whether they are on the host."""

    def states(self, but: Collection[Place] = ()) -> dict[Place, State]:
        """Return the comparable state of the value at each place except those in ``but``."""
        return {place: _state(value) for place, value in self._values() if place not in but}

    def label(self, place: Place) -> str:
        """Return how the code refers to a place; an empty text if it does not."""
        return self._places[place][0] if place in self._places else ""

    def replaced_since(self, before: Mapping[Place, State]) -> list[str]:
        """Label the places whose value, or whose container's items, differ from ``before``.

        New items, new attributes and values instead of None are left out, because caches fill up.
        """
        return [
            self.label(place)
            for place, value in self._values()
            if place in before and _is_replaced_state(value, before[place], _state(value))
        ]

    def _values(self) -> Iterator[tuple[Place, Any]]:
        for place, (_, scope) in self._places.items():
            if type(scope) is types.CellType:
                if scope != _UNSET:  # does not look into cells that are set
                    yield place, scope.cell_contents
            elif type(scope) is _VARIABLE:
                with contextlib.suppress(LookupError):  # it is not set
                    yield place, scope.get()
            elif place[1] in scope:
                yield place, scope[place[1]]

    def kept(self) -> Kept:
        """Return the objects that the code refers to now but did not before the first call."""
        held = self._held()
        return [(held[i], _sample(held[i])) for i in held.keys() - self._first.keys()]

    def holds(self, result: object, kept: Kept = ()) -> bool:
        """Whether arrays or containers in a result are, in part, objects that the code refers to.

        Only objects count that existed before the first call, or that existed before this call and
        were not changed by it: a table that the first call makes, but no buffer that each call
        writes.
        """
        lists = tensors.containers(result).keys()
        leaves = tensors.walk(result, "result", is_result=True)
        arrays = [leaf for _, leaf in leaves if tensors.backend_of(leaf)]
        unchanged = [value for value, sample in kept if _sample(value) == sample]
        if lists & {*self._first, *map(id, unchanged)}:
            return True
        spans = self._spans, _spans(unchanged)
        # reading the address of a lazy copy would make it
        arrays = [array for array in arrays if not tensors.is_lazy_copy(array)]
        return any(tensors.overlaps(a, where) for a in arrays for where in spans)

    def _arrays(self) -> tuple[Any, ...]:
        return tuple(value for value in self._first.values() if tensors.backend_of(value))

    def _held(self) -> dict[int, Any]:
        """Return the arrays, containers and buffers that the code refers to now, by id."""
        values = [value for _, value in self._values() if not issubclass(type(value), _CODE)]
        rest = [*values, *itertools.chain.from_iterable(map(_kept, values))]
        held: dict[int, Any] = {}
        while rest:
            value = rest.pop()
            items = _items(value) if id(value) not in held else None
            if items is not None:
                held[id(value)] = value
                rest += _without_numbers(items)
        return held

    def _read(self, call: object) -> None:
        todo = collections.deque([call])
        seen: dict[int, object] = {}
        functions = 0
        while todo and functions < MAX_FUNCTIONS:
            value = todo.popleft()
            # the internal state of a library or a launcher changes with any call
            if id(value) not in seen and not _is_installed(value):
                functions += type(value) is types.FunctionType
                todo.extend(self._behind(value))
            seen[id(value)] = value

    def _behind(self, value: Any) -> Iterator[object]:
        """Note the places of a function or another object; yield objects that may lead to more."""
        if type(value) is types.FunctionType:
            yield from self._function(value)
        elif type(value) is Prepared:
            make: Any = value.make
            self._setups.add(id(make.func if type(make) is functools.partial else make))
            yield make
        elif type(value) is _VARIABLE:
            self._places[id(value), value.name] = value.name, value
            with contextlib.suppress(LookupError):
                yield value.get()
        elif issubclass(type(value), _CACHED):
            self._hold("cached function", value)
            yield stored.attributes(value).get("__wrapped__")
        elif type(value) is functools.partial:
            self._hold("partial", (value.args, value.keywords))
            yield from (value.func, *value.args, *value.keywords.values())
        elif type(value) is types.MethodType:
            self._hold("self", value.__self__)
            yield value.__func__
        elif type(value) is types.BuiltinFunctionType:  # self is the module if it is no method
            if not issubclass(type(value.__self__), _CODE):
                self._hold("self", value.__self__)
                yield value.__self__
        elif "__call__" in _vars(type(value)) and not _is_library_class(type(value)):
            self._hold("self", value)
            yield _vars(type(value))["__call__"]

    def _hold(self, name: str, value: object) -> None:
        scope = {name: value}
        self._places[id(scope), name] = name, scope

    def _function(self, function: types.FunctionType) -> Iterator[object]:
        """Note the places that a function refers to; yield the functions there."""
        names = {*_names(function.__code__)}
        timed = [function.__code__]
        if id(function) in self._setups:  # only the functions that it defines are timed
            timed = [each for each in timed[0].co_consts if type(each) is types.CodeType]
        if any(_OF_ASSERTS in _names(code) for code in timed):
            self.asserting.add(function.__qualname__)
        scopes = function.__globals__, vars(builtins)
        for name in sorted(names):
            scope = next((scope for scope in scopes if name in scope), None)
            if scope is not None:
                yield from self._note(scope, name, name, names)
        for name in _globals(function.__code__):  # a call may define it, also over a builtin
            self._places.setdefault((id(scopes[0]), name), (name, scopes[0]))
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._places[id(cell), name] = name, cell
            with contextlib.suppress(ValueError):
                yield from self._inside(cell.cell_contents, name, names)
        for value in function.__defaults__ or ():
            self._hold("default", value)
            yield value
        for name in function.__kwdefaults__ or {}:
            yield from self._note(function.__kwdefaults__, name, name, names)

    def _note(self, scope: Any, name: str, label: str, names: set[str]) -> Iterator[object]:
        if (id(scope), name) not in self._places:
            self._places[id(scope), name] = label, scope
            yield from self._inside(scope[name], label, names)

    def _inside(self, value: Any, label: str, names: set[str]) -> Iterator[object]:
        """Note the attributes of a module or class that the code of a function names."""
        if issubclass(type(value), (types.ModuleType, type)):
            space = _vars(value) if issubclass(type(value), type) else vars(value)
            for name in sorted(names & space.keys()):
                if issubclass(type(value), types.ModuleType) and _is_replaced(value, space[name]):
                    self.replaced.add(f"{value.__name__}.{name}")
                yield from self._note(space, name, f"{label}.{name}", names)
        else:
            yield value


def _kept(value: Any) -> list[Any]:
    """Return what an object keeps: attributes, cached results, the values of a context, ..."""
    is_context = type(value) is contextvars.Context
    return _without_numbers(value.values() if is_context else stored.referents(value))


def _items(value: Any) -> Iterable[Any] | None:
    """Return the items of a container, and none of an array or a buffer; None for other objects."""
    if id(type(value)) in _ITEM_IDS:
        return gc.get_referents(value)  # in C: a cache may have a million items
    if tensors.backend_of(value) or _is_buffer(value):
        return ()
    children = tensors.children(value)
    return None if children is None else children.values()


def _spans(values: Iterable[Any]) -> Sequence[tuple[int, int]]:
    """Return the address ranges of arrays and buffers."""
    memory = (value for value in values if tensors.backend_of(value) or _is_buffer(value))
    return tensors.memory_of(tuple(memory)).spans


def _sample(value: Any) -> object:
    """Return a sample of an array, container or buffer that shows whether a call writes to it."""
    if id(type(value)) in _ITEM_IDS:
        return _state(value)
    # as text, in which NaN equals NaN
    return [str(tensors.sample(array, 0)) for array in tensors.memory_of((value,)).arrays]


def _without_numbers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if id(type(value)) not in _PLAIN_IDS]


def _is_buffer(value: Any) -> bool:
    return stored.is_one_of(type(value), (bytes, *stored.BUFFERS))


def _is_installed(value: object) -> bool:
    """Whether a function is defined in an installed library, or an object's class by the plugin."""
    if type(value) is types.FunctionType:
        return value.__code__.co_filename.startswith(validity.LIBRARIES)
    return _is_of_plugin(type(value)) and type(value) is not Prepared


def _is_of_plugin(kind: type) -> bool:
    return _home(kind).startswith("pytest_aiperf.")


def _home(kind: type) -> str:
    """Return the name of the module that defines a class."""
    return str(type.__dict__["__module__"].__get__(kind))


def _is_library_class(kind: type) -> bool:
    """Whether an installed library, Python or the plugin defines a class."""
    if not _flags(kind) & stored.HEAP_TYPE:
        return True
    file = getattr(sys.modules.get(_home(kind)), "__file__", None)
    return _is_of_plugin(kind) or bool(file and file.startswith(validity.LIBRARIES))


def _is_replaced(module: types.ModuleType, value: object) -> bool:
    """Whether a module of an installed library has a function that is defined elsewhere."""
    home = getattr(module, "__file__", None)  # None for modules in C
    is_library = home is None or home.startswith(validity.LIBRARIES)
    return is_library and type(value) is types.FunctionType and validity.is_foreign(value)


def replaced_functions() -> set[str]:
    """Name the functions and methods of some libraries that code from elsewhere has replaced.

    Such code may run unnoticed: when the harness copies a result, when inputs() draws values, or
    inside the library functions that the baseline calls.
    """
    found: set[str] = set()
    for name, module in tuple(sys.modules.items()):
        if type(module) is not types.ModuleType or name.partition(".")[0] not in _INSPECTED:
            continue
        if name.startswith("torch.") and name not in _INSPECTED_OF_TORCH:
            continue
        functions = [(f"{name}.{key}", value) for key, value in tuple(vars(module).items())]
        for path, value in tuple(functions):
            if issubclass(type(value), type) and vars(value).get("__module__") == name:
                functions += [(f"{path}.{key}", method) for key, method in vars(value).items()]
        found |= {path for path, value in functions if _is_replaced(module, value)}
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _names(constant)


def _globals(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code looks up, and not those of attributes."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _globals(constant)


def _state(value: Any) -> State:
    kind = type(value)
    known = _READERS.get(id(kind)) or _READERS.setdefault(id(kind), (kind, _reader(kind)))
    return known[1](value)


_READERS: dict[int, tuple[type, Callable[[Any], State]]] = {}
"""Cache of the function that reads the state of a class's objects, by the id of the class, as in
:data:`stored._DECLARED`. Inspecting the class each time would take most of the time between
blocks."""


def _reader(kind: type) -> Callable[[Any], State]:
    if stored.is_one_of(kind, _CONTAINERS):
        return lambda value: (id(value), len(value), *map(_key, _first(value)))
    if stored.is_one_of(kind, _DICTS):
        return lambda value: (id(value), len(value), *map(_key, _first(dict.values(value))))
    if kind is types.FunctionType:
        return _state_of_function
    if stored.is_one_of(kind, _VALUES):
        return lambda value: (value,)
    if issubclass(kind, (type, types.ModuleType)) or kind is types.BuiltinFunctionType:
        return lambda value: (id(value),)
    return _state_of_library if _is_library_class(kind) else _state_of_object


def _state_of_function(value: types.FunctionType) -> State:
    if _is_installed(
        value
    ):  # torch wraps some of its functions when it compiles for the first time
        return value.__module__, value.__qualname__
    own = stored.attributes(value)
    code = id(value.__code__), id(value.__defaults__), id(value.__kwdefaults__)
    return id(value), code, *((name, _state_of_attribute(item)) for name, item in own.items())


def _state_of_library(value: Any) -> State:
    return (id(value), tensors.layout(value)) if tensors.backend_of(value) else (id(value),)


def _state_of_object(value: Any) -> State:
    own = stored.attributes(value) | stored.slots(value)
    return id(value), *((name, _state_of_attribute(item)) for name, item in own.items())


def _is_replaced_state(value: Any, before: State, now: State) -> bool:
    kind = type(value)
    if before[0] != now[0]:
        return before != (None,)
    if stored.is_one_of(kind, (set, frozenset)):
        return False  # their items have no order
    if stored.is_one_of(kind, (*_CONTAINERS, *_DICTS)):
        return now[1] < before[1] or before[2:] != now[2 : len(before)]
    if kind is types.FunctionType:
        return bool(before[1] != now[1])
    if tensors.backend_of(value) or len(before) < 2:
        return before != now
    own = dict(now[1:])
    return any(was != (None,) and own.get(name) != was for name, was in before[1:])


def _state_of_attribute(value: Any) -> State:
    if stored.is_one_of(type(value), (*_CONTAINERS, *_DICTS)):
        return id(value), len(value)
    return (_key(value),)


def _first(items: Iterable[Any]) -> tuple[Any, ...]:
    # in C, so that no other thread changes the container meanwhile
    return tuple(itertools.islice(items, MAX_ITEMS))


def _key(value: Any) -> Any:
    """Return numbers and texts as they are, and what identifies other objects."""
    return value if stored.is_one_of(type(value), _VALUES) else id(value)
