"""The hash of a claim's source code ignores comments and docstrings."""

import importlib.util
import shutil
import sys
import types
from pathlib import Path

import pytest

from pytest_aiperf.sources import source_hash

PYTHON = '''"""A lesson."""

def arm(x):  # doubles
    """Return
    its double."""
    return f"# {x}" + "//" + """kept"""
'''
CUDA = """// A lesson, long.
extern "C" void copy(const float* a) { /* all
of it */ const char* s = "// kept"; char c = '"'; int n = 1'000; }  // the end
"""


def identity(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return source_hash.identity([tmp_path / name])


@pytest.mark.parametrize(
    ("name", "text", "was", "now"),
    [
        ("a.py", PYTHON, '"""A lesson."""\n', '"""Another,\nlonger."""\n# and a remark\n\n'),
        ("a.py", PYTHON, "  # doubles", ""),
        ("a.py", PYTHON, '"""Return\n    its double."""', '"""Ä"""'),
        ("a.cu", CUDA, "// A lesson, long.\n", ""),
        ("a.cu", CUDA, "/* all\nof it */", "/* no */"),
        ("a.cu", CUDA, "  // the end", "\n\n"),
    ],
)
def test_comments_and_docstrings_do_not_change_the_hash(tmp_path, name, text, was, now):
    assert was in text
    assert identity(tmp_path, name, text) == identity(tmp_path, name, text.replace(was, now))


@pytest.mark.parametrize(
    ("name", "text", "was", "now"),
    [
        ("a.py", PYTHON, "# {x}", "#{x}"),
        ("a.py", PYTHON, '"//"', '"/"'),
        ("a.py", PYTHON, '"""kept"""', '"""lost"""'),
        ("a.py", PYTHON, "    return", "    yield"),
        ("a.cu", CUDA, '"// kept"', '"// lost"'),
        ("a.cu", CUDA, "1'000", "2'000"),
        ("a.cu", CUDA, "const float", "float"),
    ],
)
def test_code_changes_the_hash(tmp_path, name, text, was, now):
    assert was in text
    assert identity(tmp_path, name, text) != identity(tmp_path, name, text.replace(was, now))


@pytest.mark.parametrize(
    ("encoding", "head"),
    [
        ("utf-8-sig", ""),
        ("latin-1", "# coding: latin-1\n"),
        ("utf-8", "\f\n"),
        ("utf-8", "a = '\u2028'\n"),
    ],
)
def test_every_text_that_python_reads_has_a_hash(tmp_path, encoding, head):
    def write(text):
        (tmp_path / "a.py").write_text(head + text, encoding=encoding)
        return source_hash.identity([tmp_path / "a.py"])

    text = 'def größe():\n    """Größe."""\n    return 1  # Größe\n'
    assert write(text) == write(text.replace("  # Größe", "")) == write(text.replace('ße."', 's."'))
    assert write(text) != write(text.replace("return 1", "return 2"))
    assert write(text) != write(text.replace("größe()", "größe(x)"))


def test_names_of_files_change_the_hash_and_their_order_does_not(tmp_path):
    assert identity(tmp_path, "a.h", "int a;") != identity(tmp_path, "b.h", "int a;")
    paths = [tmp_path / "a.h", tmp_path / "b.h"]
    assert source_hash.identity(paths) == source_hash.identity(paths[::-1])


def test_bytes_that_are_no_text_change_the_hash(tmp_path):
    (tmp_path / "a.h").write_bytes(b"\xe9")
    assert source_hash.identity([tmp_path / "a.h"])


def imported(tmp_path, text):
    """Return a module with this text, which is not in sys.modules."""
    (tmp_path / "test_of_code.py").write_text(text)
    spec = importlib.util.spec_from_file_location("test_of_code", tmp_path / "test_of_code.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_imports_of_imported_modules_are_followed(tmp_path, monkeypatch):
    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path / f"{name}.py"

    monkeypatch.syspath_prepend(tmp_path)
    ring = write("ring_of_code", "import link_of_code\n")
    link = write("link_of_code", "from table_of_code import SIZE\nimport ring_of_code\n")
    table = write("table_of_code", "SIZE = 4\n")
    module = imported(tmp_path, "import json, pytest_aiperf, ring_of_code\n")
    test = Path(module.__file__)
    # monkeypatch removes them after this test
    for name in ("ring_of_code", "link_of_code", "table_of_code"):
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))
    assert set(source_hash.files(module, tmp_path)) == {test, ring, link, table}
    assert source_hash.files(module, tmp_path / "elsewhere") == []
    assert source_hash.files(None, tmp_path) == []


def test_a_compiled_module_of_the_project_is_no_source(tmp_path):
    module = imported(tmp_path, "import numpy.linalg._umath_linalg as extension\n")
    compiled = tmp_path / Path(module.extension.__file__).name
    shutil.copy(module.extension.__file__, compiled)
    module.extension = types.ModuleType("extension_of_code")
    module.extension.__file__ = str(compiled)
    assert source_hash.files(module, tmp_path) == [tmp_path / "test_of_code.py"]


def test_modules_of_python_itself_are_left_out_where_the_project_has_them(tmp_path):
    module = imported(tmp_path, "import json, _json\n")
    assert source_hash.files(module, Path("/")) == [tmp_path / "test_of_code.py"]


def test_a_module_outside_of_a_package_may_try_a_relative_import(tmp_path):
    text = "try:\n    from . import table\nexcept ImportError:\n    table = None\n"
    module = imported(tmp_path, text)
    assert source_hash.files(module, tmp_path) == [tmp_path / "test_of_code.py"]
