"""docs/validity.md lists each fault once and names only tests that exist."""

import ast
import re
from pathlib import Path

import pytest

import pytest_aiperf
from tests.cheats import on_gpu, test_dishonest, test_honest
from tests.cheats.test_guards_off import GUARDS

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "validity.md").read_text().splitlines()
    if re.match(r"\| [VEDS]\d+ \|", line)
]
ENTRIES = {
    "cheat": test_dishonest.CHEATS,
    "marked": test_dishonest.MARKED,
    "honest": test_honest.HONEST,
    "gpu cheat": on_gpu.CHEATS,
    "gpu honest": on_gpu.HONEST,
    "guard": GUARDS,
}
FOLDERS = {
    "gpu": "gpu/test_*_on_gpu.py gpu/test_noise.py",
    "cheats": "cheats/test_*.py",
    "prove": "selfcheck/test_prove.py",
    "stack": "cheats/test_stack.py",
}


def functions(files):
    names = set()
    for pattern in files.split():
        for file in (ROOT / "tests").glob(pattern):
            names |= {n.name for n in ast.parse(file.read_text()).body if hasattr(n, "name")}
    return names


def exists(proof):
    kind, _, name = proof.rpartition(" ") if "::" in proof else proof.partition(" ")
    if kind == "gpu":
        kind, _, name = name.partition(" ")
        kind = f"gpu {kind}"
    if kind in ENTRIES:
        return name in ENTRIES[kind]
    room, _, test = proof.partition("::")
    room = room.removesuffix(".py") if room.endswith(".py") else FOLDERS.get(room, room)
    return test in functions(room if "/" in room else f"plugin/test_{room}.py")


def test_all_faults_are_listed():
    """A row that was split from another stands behind it, so the order of ids does not matter."""
    ids = [row[0].removeprefix("| ") for row in ROWS]
    counts = {"V": 125, "E": 35, "D": 25, "S": 15}
    expected = [f"{kind}{n:02d}" for kind, last in counts.items() for n in range(1, last + 1)]
    assert sorted(ids) == sorted(expected)


def test_each_row_has_four_cells():
    assert [row[0] for row in ROWS if len(row) != 4] == []


def test_rows_refer_to_rows_that_exist():
    ids = [row[0].removeprefix("| ") for row in ROWS]
    named = re.findall(r"\b[VEDS]\d\d+\b", (ROOT / "docs" / "validity.md").read_text())
    assert sorted(set(named) - set(ids)) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].removeprefix("| "))
def test_the_tests_of_a_row_exist(row):
    proofs = re.findall(r"`([^`]+)`", row[-1])
    assert proofs
    assert [proof for proof in proofs if not exists(proof)] == []


# faults that cannot occur: the package never makes the call that would cause them


def calls():
    """Yield each call in the package as (place, function, keyword arguments, node)."""
    package = Path(pytest_aiperf.__file__).parent
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                place = f"{file.relative_to(package)}:{node.lineno}"
                yield place, ast.unparse(node.func), keywords, node


def test_no_shell_is_started():
    shells = [place for place, _, kw, _ in calls() if kw.get("shell", "False") != "False"]
    shells += [place for place, name, *_ in calls() if name in ("os.system", "os.popen")]
    assert shells == []


def test_nothing_is_unpickled_or_evaluated():
    unsafe = ("eval", "exec", "pickle.load", "pickle.loads", "marshal.loads", "torch.load")
    unsafe += ("yaml.load", "yaml.unsafe_load")
    assert [place for place, name, *_ in calls() if name in unsafe] == []


def test_no_archive_is_opened():
    archives = ("tarfile.open", "zipfile.ZipFile", "shutil.unpack_archive")
    reads = [
        place
        for place, name, _, node in calls()
        if name in archives and not any("'w" in ast.unparse(a) for a in node.args)
    ]
    assert reads == []


def test_only_reports_run_git():
    package, commands = Path(pytest_aiperf.__file__).parent, []
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            words = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
            if words and isinstance(words[0], ast.Constant) and words[0].value == "git":
                commands.append(str(file.relative_to(package)))
    assert {*commands} == {"report/source_code.py"}
    arguments = [ast.unparse(node) for _, name, _, node in calls() if name == "_git"]
    assert arguments == [
        "_git(root, 'rev-parse', '--show-prefix')",
        "_git(root, 'remote', 'get-url', 'origin')",
    ]
