"""docs/validity.md names tests that exist, and each fault once."""

import ast
import re
from pathlib import Path

import pytest

import pytest_aiperf
from tests.cheats import dishonest, honest, on_gpu
from tests.cheats.test_guards_off import GUARDS

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "validity.md").read_text().splitlines()
    if re.match(r"\| [VEDS]\d\d \|", line)
]
ENTRIES = {
    "cheat": dishonest.CHEATS,
    "honest": honest.HONEST,
    "gpu cheat": on_gpu.CHEATS,
    "gpu honest": on_gpu.HONEST,
    "guard": GUARDS,
}
FOLDERS = {"gpu": "gpu/test_*_on_gpu.py gpu/test_noise.py", "cheats": "cheats/test_*.py"}


def functions(files):
    found = set()
    for pattern in files.split():
        for file in (ROOT / "tests").glob(pattern):
            found |= {n.name for n in ast.parse(file.read_text()).body if hasattr(n, "name")}
    return found


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


def test_all_faults_are_there():
    ids = [row[0].removeprefix("| ") for row in ROWS]
    counts = {"V": 49, "E": 34, "D": 24, "S": 15}
    assert ids == [f"{kind}{n:02d}" for kind, last in counts.items() for n in range(1, last + 1)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].removeprefix("| "))
def test_what_proves_it_exists(row):
    proofs = re.findall(r"`([^`]+)`", row[-1])
    assert proofs
    assert [proof for proof in proofs if not exists(proof)] == []


# what is not there cannot go wrong


def calls():
    """Name each call in the plugin by its last two parts, with its keywords."""
    for file in Path(pytest_aiperf.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                words = {k.arg: ast.unparse(k.value) for k in node.keywords}
                yield f"{file.name}:{node.lineno}", ast.unparse(node.func), words, node


def test_no_shell_is_started():
    found = [at for at, name, words, _ in calls() if words.get("shell", "False") != "False"]
    found += [at for at, name, *_ in calls() if name in ("os.system", "os.popen")]
    assert found == []


def test_nothing_is_unpickled_or_evaluated():
    known = ("eval", "exec", "pickle.load", "pickle.loads", "marshal.loads", "torch.load")
    assert [
        at for at, name, *_ in calls() if name in (*known, "yaml.load", "yaml.unsafe_load")
    ] == []


def test_no_archive_is_opened():
    known = ("tarfile.open", "zipfile.ZipFile", "shutil.unpack_archive")
    reading = [
        at
        for at, name, _, node in calls()
        if name in known and not any("'w" in ast.unparse(a) for a in node.args)
    ]
    assert reading == []


def test_no_git_is_run():
    assert [at for at, _, _, node in calls() if re.search(r"\[\s*'git'", ast.unparse(node))] == []
