"""The guides leave out nothing of the public API, and the README's syllabus is that of the site."""

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

import pytest_aiperf
from pytest_aiperf import Compare, cli, evidence, model, options, scores
from pytest_aiperf.correctness.accuracy import ERROR_BUDGETS, RMS_BUDGETS
from pytest_aiperf.machine import requirements

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
API = (DOCS / "api.md").read_text(encoding="utf-8")
WRITING = (DOCS / "writing.md").read_text(encoding="utf-8")
COMMANDS = (DOCS / "commands.md").read_text(encoding="utf-8")
PIECES = [name for name, _ in inspect.getmembers(evidence, inspect.isfunction)
          if inspect.signature(getattr(evidence, name)).return_annotation is model.Evidence
          and not name.startswith("_")]  # fmt: skip
FIGURES = [name for name, function in inspect.getmembers(scores, inspect.isfunction)
           if function.__module__ == scores.__name__ and not name.startswith("_")]  # fmt: skip
KEYWORDS = [name for name in inspect.signature(Compare.__call__).parameters if name != "self"]
WORDS = [
    f'"{word}"'
    for words in (model.MetricName, model.AgainstName, model.CacheName)
    for word in get_args(words)
]
FIXTURES = sorted(requirements.FIXTURES)
MARKERS = ["pytest.mark.host", "pytest.mark.gpu(", "features=", *requirements.ARCH_MARKS]


@pytest.mark.parametrize(
    "name", sorted({*pytest_aiperf.__all__} - {"__version__", "evidence", "scores"})
)
def test_the_reference_has_each_exported_name(name):
    assert re.search(rf"(?m)^\.\. auto\w+:: {name}$", API)


@pytest.mark.parametrize("name", PIECES)
def test_each_kind_of_evidence_is_in_the_reference_and_has_an_example(name):
    assert re.search(rf"(?m)^\.\. autofunction:: pytest_aiperf::evidence\.{name}$", API)
    assert f" evidence.{name}(" in WRITING


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_is_in_the_reference_and_in_the_guide(name):
    assert re.search(rf"(?m)^\.\. autofunction:: pytest_aiperf::scores\.{name}$", API)
    assert f"`scores.{name}(" in WRITING


@pytest.mark.parametrize("arch", requirements.ARCH_MARKS)
def test_the_guides_table_of_features_is_that_of_the_code(arch):
    section = WRITING.partition("### Features")[2].partition("###")[0]
    rows = re.findall(r"(?m)^\| `\"(\w+)\"` \|[^|]+\| ([^|]+) \|$", section)
    assert [name for name, _ in rows] == [*model.FEATURES]
    gpu = model.Gpu("", "", "", arch, 1, 1, 1, "")
    assert [name for name, archs in rows if f"`{arch}`" in archs] == [*gpu.features]


@pytest.mark.parametrize("word", [*KEYWORDS, *WORDS, *FIXTURES, *MARKERS])
def test_the_guide_explains_each_argument_word_fixture_and_marker(word):
    assert re.search(rf"`[^`\n]*{re.escape(word)}[^`\n]*`", WRITING)


@pytest.mark.parametrize("name", ERROR_BUDGETS)
def test_the_table_of_tolerances_is_that_of_the_code(name):
    row = re.search(rf"(?m)^\| {name}\b[^|]*\| ([^|]+) \| ([^|]+) \|$", WRITING)
    percents = [cell.endswith("%") for cell in row.groups()]
    cells = [float(cell.removesuffix(" %")) for cell in row.groups()]
    figures = [
        cell / 100 if percent else cell for cell, percent in zip(cells, percents, strict=True)
    ]
    assert figures == pytest.approx([ERROR_BUDGETS[name], RMS_BUDGETS[name]], rel=0.04, abs=0)


@pytest.mark.parametrize("name", options._OPTIONS)
def test_the_page_of_commands_has_each_option_of_pytest(name):
    assert re.search(rf"(?m)^\| `[^`\n]*--{name}\b[^`\n]*` \|", COMMANDS)


def test_the_page_of_commands_has_each_command_on_files():
    [subcommands] = cli._parser("")[0]._subparsers._group_actions
    section = COMMANDS.partition("## python -m pytest_aiperf")[2]
    assert [name for name in subcommands.choices if f"`{name}" not in section] == []


@pytest.mark.parametrize("chapter", sorted(DOCS.glob("course/ch*.md")), ids=lambda p: p.stem)
def test_the_readme_names_each_chapter_as_the_site_does(chapter):
    title = chapter.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| [{title}](docs/course/{chapter.name}) |" in readme
