"""Configuration of the documentation site: ``make docs`` builds it into docs/_build/html."""

import sys
from pathlib import Path

from sphinx.ext.napoleon import GoogleDocstring

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "pytest-aiperf"
author = "pytest-aiperf developers"
copyright = author  # noqa: A001  the name that Sphinx reads
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "course",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "pytest-aiperf"
html_static_path = ["_static"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # [text](page.md#heading) links are checked
copybutton_exclude = ".linenos, .gp, .go"  # copy neither prompts nor output

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "separated"  # users call fixtures, never their constructors
autodoc_default_options = {"exclude-members": "__init__, __new__"}
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Types of libraries whose reference is not fetched, because nothing is downloaded at build time.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|pytest|pathlib|collections|typing)\..*"),
    ("py:class", r"pytest_aiperf\.model\.T"),
]

# Claims whose code has changed since they were measured; any other is an error.
course_unmeasured = []

# napoleon would read "GPU time: of a CUDA graph" as a type; only callables have sections to read.
napoleon_google_docstring = False
napoleon_numpy_docstring = False


def setup(app):  # noqa: ANN001, ANN201
    def read_sections(app, what, *described):  # noqa: ANN001, ANN002, ANN202
        if what in ("function", "method", "class", "exception"):
            *context, lines = described
            lines[:] = GoogleDocstring(list(lines), app.config, app, what, *context).lines()

    app.connect("autodoc-process-docstring", read_sections)
