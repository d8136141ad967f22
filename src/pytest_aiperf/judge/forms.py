"""The forms in which people keep a problem and its solution, read as they are.

* KernelBench: ``Model``, ``get_inputs`` and ``get_init_inputs``, against ``ModelNew``.
* GPU MODE: ``generate_input``, ``ref_kernel`` and ``check_implementation`` of a ``reference.py``,
  with the shapes of a ``task.yml``, against ``custom_kernel``.
* plain: ``reference`` and ``inputs``, against ``solution``.

Each becomes cases, which have what a claim needs: inputs, two arms and a reference in fp64.
"""

import ast
import contextlib
import copy
import dataclasses
import inspect
import itertools
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, cast

import yaml

from pytest_aiperf.correctness import tensors
from pytest_aiperf.correctness.accuracy import ERROR_BUDGETS
from pytest_aiperf.device.device import seed_all
from pytest_aiperf.errors import AiperfError, UsageError
from pytest_aiperf.model import Bench, PrecisionName, Work

Form = Literal["KernelBench", "GPU MODE", "plain"]
Call = Callable[..., Any]

ENTRY: Final[Mapping[Form, str]] = {
    "KernelBench": "ModelNew", "GPU MODE": "custom_kernel", "plain": "solution",
}  # fmt: skip
"""Name that a solution of each form must define."""
REQUIRED: Final[Mapping[Form, Sequence[str]]] = {
    "KernelBench": ("Model", "get_inputs"),
    "GPU MODE": ("generate_input", "check_implementation", "ref_kernel"),
    "plain": ("reference", "inputs"),
}
"""Names that a problem of each form must define; the first name that is found decides the form."""
WIDENING: Final = sorted(ERROR_BUDGETS, key=lambda name: ERROR_BUDGETS[name])
"""Precisions by their error budget, the smallest first."""
SUBMISSION: Final = "@SUBMISSION@"  #: Source of the solution's own file in a ``task.yml``.
TASK: Final = "task.yml"
SEEDS: Final = 1 << 16
"""Seeds of GPU MODE are smaller than this: some problems use them as values, too."""


class FileError(UsageError):
    """A file cannot be judged; the message begins with its path and line."""


class SolutionError(AiperfError):
    """The solution cannot be loaded or called; the message begins with its path and line."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem on one kind of inputs, with its solution."""

    name: str  #: The parameters of the inputs; empty if the problem has one kind only.
    baseline: Call  #: The problem's own code, in its own precision.
    solution: Call  #: The code to judge.
    inputs: Callable[[Bench], Any]  #: Builds one set of inputs.
    reference: Call  #: The problem's code in fp64.
    weights: Sequence[Any] = ()  #: Arrays that a call reads beside its inputs.


@dataclasses.dataclass(frozen=True)
class Pair:
    """A problem and its solution, loaded."""

    cases: Sequence[Case]
    precision: PrecisionName | None = None  #: Precision in which a solution may compute.
    setup_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds to load the solution and to construct the models; no part of the speedup."""
    checks: Sequence[Callable[[], str]] = ()
    """Checks of the problem's own; each returns what is wrong, or an empty text."""
    notes: Sequence[str] = ()
    work: Callable[..., Work] | None = None  #: The work that the problem states.


class Problem:
    """A problem's file and its form."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            files = (path / name for name in ("reference.py", "problem.py"))
            path = next(filter(Path.is_file, files), path)
        elif path.name == TASK:
            path = path.with_name("reference.py")
        self.path = path
        names = _names(path, FileError)
        forms = [form for form, required in REQUIRED.items() if required[0] in names]
        if not forms:
            expected = ", or ".join(" and ".join(required) for required in REQUIRED.values())
            raise FileError(f"{path}:1: is no problem: it must define {expected}")
        self.form = forms[0]
        first, *others = REQUIRED[self.form]
        for name in others:
            if name not in names:
                raise FileError(
                    f"{path}:{names[first]}: a problem of the form {self.form} defines {name}, too"
                )
        task = path.with_name(TASK)
        self.result_kind: str | None = None
        """Dtype to which a baseline's results are converted, "" for none; None if not known yet."""
        self.task = _task(task) if self.form == "GPU MODE" and task.is_file() else {}

    def load(self) -> ModuleType:
        """Run the problem's file."""
        paths = [str(self.path.parent)]
        for entry in self.task.get("files") or ():
            name, source = Path(str(entry.get("name"))), str(entry.get("source"))
            at = (self.path.parent / source).resolve()
            if source != SUBMISSION and name.suffix == ".py" and at.is_file():
                paths.append(str(at.parent))
        sys.path[:0] = [p for p in dict.fromkeys(paths) if p not in sys.path]
        known_as = "reference" if self.form == "GPU MODE" else f"judged_problem_{self.path.stem}"
        try:
            return load(self.path, known_as)
        except Exception as error:
            raise FileError(located(self.path, error)) from error


def require_entry(form: Form, path: Path) -> None:
    """Raise SolutionError if a solution's file does not define what its form requires."""
    names = _names(path, SolutionError)
    if ENTRY[form] not in names and "*" not in names:
        raise SolutionError(
            f"{path}:1: defines no {ENTRY[form]}, which a solution of the form {form} must define"
        )


def _names(path: Path, kind: type[AiperfError]) -> dict[str, int]:
    """Return the names that a file defines at its top level, with their lines.

    A file that cannot be parsed raises an error of this kind.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise kind(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise kind(f"{path}: cannot be read: {why}") from None
    except (RecursionError, MemoryError):  # raised by the parser
        raise kind(f"{path}:1: is nested too deeply") from None
    names: dict[str, int] = {}
    for node in ast.walk(tree):  # a definition may stand inside "if" or "try"
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.setdefault(node.name, node.lineno)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                names.setdefault(alias.asname or alias.name, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, node.lineno)
    return names


def _task(path: Path) -> dict[str, Any]:
    try:
        task = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise FileError(f"{path}:{line}: {error.problem}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise FileError(f"{path}: cannot be read: {error}") from None
    if not isinstance(task, dict):
        raise FileError(f"{path}:1: is no task: it must have the keys tests and benchmarks")
    for key in ("tests", "benchmarks", "files"):
        entries = task.get(key) or []
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise FileError(f"{path}:1: {key} must be a list of parameters by name")
    return task


def load(path: Path, name: str) -> ModuleType:
    """Run a file as a module, in the folder of which imports are looked up, too."""
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileError(f"{path}:1: is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def located(path: Path, error: BaseException) -> str:
    """Describe an error in one sentence, with the last line of ``path`` that it passed through."""
    if isinstance(error, FileError):  # it names its place
        return str(error)
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    if line is None:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if _is_at(f.filename, path)), None)
    text = " ".join(str(error).split())[:500]
    return f"{path}:{line or 1}: {type(error).__name__}: {text}".removesuffix(": ")


def passes(path: Path, error: BaseException | None) -> bool:
    """Whether an error has passed through a file."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    return any(_is_at(frame.filename, path) for frame in frames)


def _is_at(filename: str, path: Path) -> bool:
    return Path(filename).name == path.name and Path(filename).resolve() == path.resolve()


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A problem and a solution whose files have run; :meth:`pair` makes cases of them."""

    problem: Problem
    module: ModuleType  #: The problem's module.
    solution: ModuleType
    path: Path  #: The solution's file.
    device: str
    seed: int

    def pair(self, precision: PrecisionName | None, cap: PrecisionName) -> Pair:
        """Return the cases.

        ``precision`` is what a solution may compute in if the problem states no ``tolerance``;
        without both, what a problem's own check accepts counts. None of them may exceed ``cap``.
        """
        builders = {"KernelBench": _kernelbench, "GPU MODE": _gpu_mode, "plain": _plain}
        pair = builders[self.problem.form](self)
        stated = getattr(self.module, "tolerance", None)
        if stated is not None:
            precision = precision_of(stated, str(self.problem.path))
        precision = precision or pair.precision
        notes, work = pair.notes, getattr(self.module, "work", None)
        if precision is not None and ERROR_BUDGETS[precision] > ERROR_BUDGETS[cap]:
            notes = [*notes, f"the tolerance {precision} is wider than the cap: {cap} counts"]
            precision = cap
        return dataclasses.replace(pair, precision=precision, notes=notes, work=work)

    def sample(self, inputs: Callable[[Bench], Any]) -> Any:
        """Return one set of inputs; an error names the problem's line."""
        seed_all(self.seed)
        try:
            return inputs(Bench(self.device, self.seed, full=True))
        except FileError:
            raise
        except Exception as error:
            raise FileError(located(self.problem.path, error)) from error


def rehearse(problem: Problem, module: ModuleType, device: str, seed: int) -> None:
    """Run a problem's own code once, without a solution.

    What it changes in the process, such as settings, is then no change of the solution's.
    """
    seed_all(seed)
    bench = Bench(device, seed, full=True)
    if problem.form == "KernelBench":
        model = _constructed(module.Model, _init_inputs(module, device), device)
        without_gradients(model)(*_model_inputs(problem, module, bench))
    elif problem.form == "GPU MODE":
        spec = (problem.task.get("tests") or problem.task.get("benchmarks") or [{}])[0]
        drawn = {"seed": seed % SEEDS} if _takes_seed(module) else {}
        data = _moved(module.generate_input(**{**drawn, **spec}), device)
        given = copies(data)
        module.check_implementation(given, module.ref_kernel(data))
    else:
        args = _plain_inputs(module, bench)
        getattr(module, "baseline", module.reference)(*copies(args))
        module.reference(*args)


def precision_of(tolerance: object, where: str) -> PrecisionName | None:
    """Return the widest precision whose error budget a tolerance covers; None for the dtype's."""
    if tolerance in ERROR_BUDGETS:
        return cast("PrecisionName", tolerance)
    if isinstance(tolerance, (int, float)) and 0 < tolerance < 1:
        covered = [name for name in WIDENING if ERROR_BUDGETS[name] <= tolerance]
        return covered[-1] if covered else None
    names = ", ".join(WIDENING)
    raise FileError(
        f"{where}:1: the tolerance {tolerance!r} is neither a relative error below 1 nor one of "
        f"{names}"
    )


def _kernelbench(loaded: Loaded) -> Pair:
    problem, module, device = loaded.problem.path, loaded.module, loaded.device
    seconds: dict[str, float] = {}

    def construct(kind: Any, name: str) -> Any:
        try:
            seed_all(loaded.seed)
            arguments = _init_inputs(module, device)
            seed_all(loaded.seed)
            begun = time.perf_counter()
            model = _constructed(kind, arguments, device)
        except Exception as error:
            if name == "solution" or passes(loaded.path, error):
                raise  # the caller finds out whose code it is
            raise FileError(located(problem, error)) from error
        seconds[name] = time.perf_counter() - begun
        return model

    inputs = partial(_model_inputs, loaded.problem, module)
    baseline = construct(module.Model, "baseline")
    double = construct(module.Model, "reference")
    new = construct(loaded.solution.ModelNew, "solution")
    del seconds["reference"]
    notes = _share_weights(baseline, new, loaded.path)
    if hasattr(double, "load_state_dict"):
        double.load_state_dict(baseline.state_dict())
    double = double.double() if hasattr(double, "double") else double
    baseline_call = without_gradients(baseline)
    args = loaded.sample(inputs)
    reference, more = oracle(without_gradients(double), baseline_call, args)
    weights = list(baseline.parameters()) if hasattr(baseline, "parameters") else []
    case = Case("", baseline_call, without_gradients(new), inputs, reference, weights)
    return Pair([case], setup_s=seconds, notes=[*notes, *more])


def _init_inputs(module: ModuleType, device: str) -> Any:
    return _moved(getattr(module, "get_init_inputs", list)(), device)


def _constructed(kind: Any, arguments: Any, device: str) -> Any:
    model = kind(**arguments) if isinstance(arguments, dict) else kind(*arguments)
    return model.to(device) if hasattr(model, "to") else model


def _model_inputs(problem: Problem, module: ModuleType, bench: Bench) -> tuple[Any, ...]:
    import torch

    with torch.device(bench.device):
        values = module.get_inputs()
    if not isinstance(values, (list, tuple)):
        line = inspect.getsourcelines(module.get_inputs)[1]
        raise FileError(
            f"{problem.path}:{line}: get_inputs must return a list, not {type(values).__name__}"
        )
    return tuple(_moved(list(values), bench.device))


def _share_weights(model: Any, new: Any, path: Path) -> list[str]:
    """Give the solution the model's weights; return a note if that is not possible by name."""
    import torch

    kind = torch.nn.Module
    ours = kind.state_dict(model) if isinstance(model, kind) else {}
    theirs = kind.state_dict(new) if isinstance(new, kind) else {}
    needed = [name for name, _ in model.named_parameters()] if ours else []
    same = {n: v for n, v in ours.items() if n in theirs and theirs[n].shape == v.shape}
    missing = [name for name in needed if name not in same]
    if not missing:
        kind.load_state_dict(new, same, strict=False) if same else None
        return []

    def values(state: Mapping[str, Any], names: Sequence[str]) -> Any:
        flat = [state[n].detach().double().reshape(-1) for n in names]
        return torch.cat(flat).sort().values if flat else None

    others = [n for n, v in theirs.items() if v.is_floating_point() and n not in same]
    mine, found = values(ours, missing), values(theirs, others)
    if found is not None and found.shape == mine.shape and torch.allclose(found, mine, rtol=1e-2):
        return ["the solution's weights have other names than the model's, and the same values"]
    names = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
    raise SolutionError(
        f"{path}:{_line(new)}: ModelNew has no weights {names} of Model's shapes, nor others with "
        "the values that the same seed gives Model's: name its weights as Model does"
    )


def _line(value: Any) -> int:
    try:
        return inspect.getsourcelines(type(value))[1]
    except (OSError, TypeError):
        return 1


def _gpu_mode(loaded: Loaded) -> Pair:
    problem, device, seed = loaded.problem, loaded.device, loaded.seed
    module, solution = loaded.module, loaded.solution.custom_kernel
    generate = module.generate_input
    tests = problem.task.get("tests") or ()
    timed = problem.task.get("benchmarks") or tests or [{}]
    _require_parameters(problem, generate, (*timed, *tests))

    def inputs(spec: Mapping[str, Any], bench: Bench) -> Any:
        drawn = {"seed": bench.seed % SEEDS} if _takes_seed(module) else {}
        data = _moved(generate(**{**spec, **drawn}), bench.device)
        return (_replaced(data, buffers, _zeros),)

    def accepts(data: Any, result: Any) -> bool:
        return is_accepted(module.check_implementation(data, result))[0]

    def own_check(spec: Mapping[str, Any]) -> str:
        seed_all(seed)
        data = _moved(generate(**{"seed": seed, **spec} if _takes_seed(module) else spec), device)
        given = copies(data)
        good, why = is_accepted(module.check_implementation(given, solution(data)))
        return "" if good else (
            f"check_implementation refuses the result for {_parameters(spec)}: {why}"
        )  # fmt: skip

    def with_buffers(function: Call) -> Call:
        """Allocate the memory for results that the reference leaves unused, as others do."""
        if not buffers:
            return _call(function)
        return lambda data: function(_replaced(data, buffers, _unset))

    buffers: frozenset[int] = frozenset()
    with contextlib.suppress(Exception):  # an error of the problem is raised again, just below
        bench = Bench(device, seed, full=True)
        buffers = _unused_buffers(lambda: inputs(timed[0], bench)[0], module.ref_kernel)
    baseline, notes = with_buffers(module.ref_kernel), list[str]()
    data = loaded.sample(partial(inputs, timed[0]))[0]
    result = module.ref_kernel(copies(data))
    if problem.result_kind is None:  # once: a solution that is loaded anew must not have run yet
        problem.result_kind = ""
        with contextlib.suppress(Exception):  # a solution that fails is found out later
            given = solution(copies(data))
            if accepts(data, given) and _kind(given) != _kind(result):
                problem.result_kind = _kind(given)
    if kind := problem.result_kind:
        baseline = _returning(kind, module.ref_kernel)
        notes.append(f"ref_kernel returns {_kind(result)}: the baseline converts it to {kind}")
    cases = []
    for spec in timed:
        shown = {name: value for name, value in spec.items() if name != "seed"}
        make = partial(inputs, shown)
        reference, more = oracle(module.ref_kernel, module.ref_kernel, loaded.sample(make))
        call = with_buffers(solution)
        cases.append(Case(_parameters(shown), baseline, call, make, reference))
        notes += [note for note in more if note not in notes]
    checks = [partial(own_check, spec) for spec in tests]
    return Pair(cases, _accepted(accepts, data, result), {}, checks, notes)


def _require_parameters(
    problem: Problem, generate: Call, specs: Sequence[Mapping[str, Any]]
) -> None:
    parameters = inspect.signature(generate).parameters
    required = {
        n for n, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }  # fmt: skip
    for spec in specs:
        if missing := sorted(required - {*spec, "seed"}):
            line = inspect.getsourcelines(generate)[1]
            raise FileError(
                f"{problem.path}:{line}: generate_input needs {', '.join(missing)}, which {TASK} "
                "beside it must state"
            )


def _unused_buffers(make: Callable[[], Any], reference: Call) -> frozenset[int]:
    """Return the numbers of the input's arrays that the problem's own code neither sets nor writes.

    Such an array is memory for a result, of which the reference makes no use. Its values are
    arbitrary, and a solution may write into it, so it is no input.
    """
    import torch

    was_on = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # in this mode torch fills memory that it allocates, with NaN or the largest integer
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            data = make()
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=warns_only)
    arrays: list[Any] = []

    def collect(array: Any) -> Any:
        arrays.append(array)
        return array

    _map(data, collect)

    def is_filled(array: Any) -> bool:
        if not isinstance(array, torch.Tensor) or not array.numel() or array.dtype == torch.bool:
            return False
        if array.is_floating_point():
            return bool(array.isnan().all())
        return not array.is_complex() and bool((array == torch.iinfo(array.dtype).max).all())

    unset = [number for number, array in enumerate(arrays) if is_filled(array)]
    if unset:
        reference(data)
    return frozenset(number for number in unset if is_filled(arrays[number]))


def _zeros(tensor: Any) -> Any:
    return tensor.new_zeros(tensor.shape)


def _unset(tensor: Any) -> Any:
    return tensor.new_empty(tensor.shape)


def _replaced(value: Any, numbers: Collection[int], make: Call) -> Any:
    """Replace some of the arrays in a value, by their numbers in the order of ``_map``."""
    if not numbers:
        return value
    counter = itertools.count()
    return _map(value, lambda x: make(x) if next(counter) in numbers else x)


def _takes_seed(module: ModuleType) -> bool:
    return "seed" in inspect.signature(module.generate_input).parameters


def _parameters(spec: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in spec.items())


def _kind(result: Any) -> str:
    """Return the dtype of the first floating-point array in a result; empty if there is none."""
    leaves = (x for _, x in tensors.walk(result, "result"))
    return next((tensors.dtype(x) for x in leaves if is_float(x)), "")


def _returning(kind: str, function: Call) -> Call:
    """Convert the floating-point arrays that a function returns to a dtype."""

    def call(*args: Any) -> Any:
        return changed(function(*args), lambda x: tensors.backend_of(x).cast(x, kind, x))

    return call


def is_accepted(found: Any) -> tuple[bool, str]:
    """Read what a ``check_implementation`` returns: whether all is well, or reasons, or both."""
    good, why = found if isinstance(found, tuple) else (found in (True, None, "", []), found)
    return bool(good), " ".join(str(why).split())[:200]


def _accepted(check: Callable[..., bool], data: Any, result: Any) -> PrecisionName | None:
    """Return the widest precision whose errors a problem's own check accepts; None for none."""
    import torch

    def disturbed(array: Any, error: float) -> Any:
        generator = torch.Generator(array.device).manual_seed(0)
        noise = torch.rand(array.shape, generator=generator, device=array.device)
        return (array.double() * (1 + error * (2 * noise.double() - 1))).to(array.dtype)

    if not _kind(result):
        return None
    for name in reversed(WIDENING):
        with contextlib.suppress(Exception):  # a check may raise for what it refuses
            if check(copies(data), changed(result, partial(disturbed, error=ERROR_BUDGETS[name]))):
                return name
    return None


def _plain(loaded: Loaded) -> Pair:
    module = loaded.module
    inputs = partial(_plain_inputs, module)
    baseline, reference, notes = getattr(module, "baseline", None), module.reference, list[str]()
    args = loaded.sample(inputs)
    if baseline is None:
        baseline = module.reference
        reference, notes = oracle(baseline, baseline, args)
    case = Case("", _call(baseline), _call(loaded.solution.solution), inputs, reference)
    return Pair([case], notes=notes)


def _plain_inputs(module: ModuleType, bench: Bench) -> tuple[Any, ...]:
    takes_bench = bool(inspect.signature(module.inputs).parameters)
    values = _moved(module.inputs(bench) if takes_bench else module.inputs(), bench.device)
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def oracle(double: Call, same: Call, args: Sequence[Any]) -> tuple[Call, list[str]]:
    """Return a reference: ``double`` on inputs in fp64 or, if that fails, the result of ``same``.

    It is tried on ``args``, which it does not change.
    """

    def in_double(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if torch := sys.modules.get("torch"):  # tensors that a model makes are fp64, too
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            return double(*_map(args, _to_double))

    def widened(*args: Any) -> Any:
        return _map(same(*args), _to_double)

    try:
        outputs = [x for _, x in tensors.walk(in_double(*copies(args)), "result")]
        kinds = {tensors.dtype(x) for x in outputs if tensors.backend_of(x) and _is_float(x)}
        why = f"it gives {min(kinds - {'float64'})}" if kinds - {"float64"} else ""
    except Exception as error:  # noqa: BLE001  any code may not be made for fp64
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if not why:
        return in_double, []
    note = f"the problem's code does not run in fp64 ({why}): its own result is the reference"
    return widened, [note]


def _call(function: Call) -> Call:
    """Wrap a function, so that no two arms are the same object."""

    def call(*args: Any) -> Any:
        return function(*args)

    return call


def without_gradients(function: Call) -> Call:
    """Call a model as KernelBench does, without recording what a backward pass would need."""
    import torch

    def call(*args: Any) -> Any:
        with torch.no_grad():
            return function(*args)

    return call


def _is_float(value: Any) -> bool:
    return bool(tensors.backend_of(value)) and not tensors.is_exact(value)


def is_float(value: Any) -> bool:
    """Whether a value is an array of real floating-point numbers."""
    return _is_float(value) and "complex" not in tensors.dtype(value)


def _to_double(value: Any) -> Any:
    if not _is_float(value):
        return value
    kind = "complex128" if "complex" in tensors.dtype(value) else "float64"
    return tensors.backend_of(value).cast(value, kind, value)


def _moved(value: Any, device: str) -> Any:
    return _map(value, lambda x: x.to(device) if hasattr(x, "to") else x)


def copies(value: Any) -> Any:
    """Copy a value with all its arrays."""
    return _map(value, lambda x: tensors.backend_of(x).copy(x) if tensors.backend_of(x) else x)


def changed(value: Any, function: Call) -> Any:
    """Apply a function to each array of real floating-point numbers in a value."""
    return _map(value, lambda x: function(x) if is_float(x) else x)


def _map(value: Any, function: Call) -> Any:
    """Apply a function to everything in tuples, lists, dicts and dataclasses."""
    torch = sys.modules.get("torch")
    if isinstance(value, tuple):
        items = [_map(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [_map(item, function) for item in value]
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        items_by_name = {name: _map(getattr(value, name), function) for name in names}
        return dataclasses.replace(value, **items_by_name)
    if torch and isinstance(value, torch.nn.Module):
        clone = copy.deepcopy(value)
        for parameter in (*clone.parameters(), *clone.buffers()):
            parameter.data = function(parameter.data)
        return clone
    return function(value)
