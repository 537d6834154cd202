"""How the site is made of the documents; `sphinx-build -c docs . site`, in the repository's root.

The sources lie where GitHub shows them, so that a link leads to the same place there and here.
"""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.parsers import Parser
from sphinx.pycode import ModuleAnalyzer

import kubetorch

project = "Kubetorch"
root_doc = "docs/index"
include_patterns = ["docs/**", "examples/**", "*.md"]
exclude_patterns = ["docs/conf.py", "**/__pycache__"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
highlight_language = "none"
add_module_names = False
autodoc_member_order = "bysource"
default_role = "code"  # of what stands in backticks in a docstring
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"Kubetorch {kubetorch.__version__}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
html_show_copyright = False
html_domain_indices = False


class _ExampleParser(Parser):
    """A program of `examples/` is a page with its source."""

    supported = ("example",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        path = Path(document.settings.env.doc2path(document.settings.env.docname))
        self.setup_parse(inputstring, document)
        section = nodes.section(ids=[path.stem])
        document.note_implicit_target(section)
        source = nodes.literal_block(inputstring, inputstring)
        source["language"] = "python" if path.suffix == ".py" else "shell"
        section += [nodes.title("", path.name), source]
        document += section
        self.finish_parse()


#: Nobody makes these: they are there.
_GIVEN = {"kubetorch.sdk.calls.caller.Caller", "kubetorch.config.settings.KubetorchConfig"}


#: Parameters that no user writes.
_INTERNAL = re.compile(r"(_\w+: bool = False|\*\*unknown: \w+)(, )?")


def _signature(
    _app: Sphinx, _what: str, name: str, _of: object, _options: object, args: str, result: str
) -> tuple[str, str] | None:
    if name in _GIVEN:
        return "", ""
    if not args:
        return None
    return _INTERNAL.sub("", args).replace(", )", ")"), result


class _Docstrings:
    """Docstrings as their authors meant them.

    Those of modules are for people who read the code. Those of attributes are no `type: text`,
    for which napoleon, whose priority lies between those of these two, takes them.
    """

    def __init__(self) -> None:
        self._kept: list[str] = []

    def keep(
        self, _app: Sphinx, what: str, name: str, _of: object, _options: object, lines: list[str]
    ) -> None:
        if what == "module":
            lines.clear()
        if name in _GIVEN and "Args:" in lines:
            del lines[lines.index("Args:") :]
        self._kept = list(lines)

    def restore(
        self, _app: Sphinx, what: str, _name: str, _of: object, _options: object, lines: list[str]
    ) -> None:
        if what in ("attribute", "data", "property"):
            lines[:] = self._kept


def _forget_overloads(_app: Sphinx) -> None:
    """Show one signature of each function; the others are for type checkers."""
    owners = {getattr(getattr(kubetorch, name), "__module__", None) for name in kubetorch.__all__}
    for name in owners - {None}:
        analyzer = ModuleAnalyzer.for_module(name)
        analyzer.analyze()
        analyzer.overloads.clear()


def _lead_to_start(app: Sphinx, _error: Exception | None) -> None:
    """Have the root of the site lead to its first page."""
    there = '<meta http-equiv="refresh" content="0; url=docs/index.html">\n'
    Path(app.outdir, "index.html").write_text(there, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Take examples as pages, and docstrings as they are."""
    app.add_source_suffix(".py", "example")
    app.add_source_suffix(".sh", "example")
    app.add_source_parser(_ExampleParser)
    docstrings = _Docstrings()
    app.connect("autodoc-process-docstring", docstrings.keep, priority=400)
    app.connect("autodoc-process-docstring", docstrings.restore, priority=600)
    app.connect("autodoc-process-signature", _signature)
    app.connect("builder-inited", _forget_overloads)
    app.connect("build-finished", _lead_to_start)
