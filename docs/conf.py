"""How the documents of this folder become a site: ``make docs`` writes it to build/docs."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from odc import __version__

_DOCS = Path(__file__).parent
_ROOT = _DOCS.parent

project = "ODC"
author = "the ODC authors"
release = version = __version__
html_title = f"ODC {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
smartquotes_action = "D"  # dashes; quotes stay as they are typed

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # as GitHub makes them

# The reference: signatures as they are written, one argument a line, members in the order of the source.
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_type_aliases = {
    name: name.rpartition(".")[2]
    for name in ("npt.ArrayLike", "npt.NDArray", "FloatArray", "IntArray", "Items", "Parts", "Routes", "Lengths")
}
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_use_rtype = False
napoleon_preprocess_types = False

# What is named but has no entry: other packages' types (no inventories: the build needs no network), and odc's own
# rooms, to which docstrings point for readers of the source. What is public must resolve.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!odc\.).*|odc\.(balance|trainers)"),
    (r"py:.*", r"odc\.(trainers\.|balance\.)?[a-z_]+\..*"),
]

html_theme = "furo"  # with its own colours of code: a comment of an example is text to read
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["paste.js", "page.js"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db5f0", "color-brand-content": "#7db5f0"},
}

# Files outside this folder that have a page here, which includes them.
_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "odc/minibatch/PROTOCOL.md": "protocol.md",
    "odc/items/PROTOCOL.md": "items_protocol.md",
    "bench/results/UNPROVEN.md": "unproven.md",
}
_INCLUDE = re.compile(r"^```\{include\} (\S+)\n```$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    """A page that includes a file has the file's text; links that are right beside it on GitHub are right here too."""
    folder = (_DOCS / name).parent

    def include(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        app.env.note_dependency(str(path))
        return _with_links(path.read_text(), path.parent, folder)

    source[0] = _INCLUDE.sub(include, _with_links(source[0], folder, folder))


def _with_links(text: str, written_in: Path, folder: Path) -> str:
    """``text`` of a file in ``written_in``, for a page in ``folder``: its links to files, outside of code."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(lambda match: _link(match, written_in, folder), text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(lambda match: _link(match, written_in, folder), text[end:])])


def _link(match: re.Match[str], written_in: Path, folder: Path) -> str:
    label, path, anchor = match[1], match[2], match[3] or ""
    target = (written_in / path).resolve()
    page = _PAGES.get(os.path.relpath(target, _ROOT))
    if page is not None:
        target = _DOCS / page
    elif target.is_dir():  # a folder of the source has no page
        return label
    return f"[{label}]({os.path.relpath(target, folder)}{anchor})"


def _wrap(app: Sphinx, document: nodes.document) -> None:
    """Commands and messages may go on in the next line of a narrow screen. Code and tables keep their columns."""
    for block in document.findall(nodes.literal_block):
        text, language = block.astext(), block.get("language")
        if (language in ("bash", "sh") and "<<" not in text) or (language == "text" and "  " not in text):
            block["classes"].append("wrap")


_PROSE = 25  # characters of a cell, on average: a table of sentences has more, one of numbers fewer
_ROW = 105  # characters of a row, on average: more cannot be read in three columns of a narrow screen


def _mark_prose(app: Sphinx, document: nodes.document) -> None:
    """Tables of sentences, for site.css: their names may be broken, and a narrow screen shows long rows as cards."""
    for table in document.findall(nodes.table):
        cells = [entry.astext() for body in table.findall(nodes.tbody) for entry in body.findall(nodes.entry)]
        columns = sum(1 for _ in table.findall(nodes.colspec))
        mean = sum(map(len, cells)) / len(cells)
        if mean > _PROSE:
            table["classes"] += ["prose", "cards"] if columns > 2 and mean * columns > _ROW else ["prose"]


def _link_names(app: Sphinx, document: nodes.document) -> None:
    """In the list of the API's pages, a name leads to its entry."""
    if app.env.docname != "api/index":
        return
    modules = [importlib.import_module(name) for name in ("odc", "odc.balance", "odc.trainers")]
    for table in document.findall(nodes.table):
        for literal in list(table.findall(nodes.literal)):
            name = literal.astext()
            module = next(module for module in modules if name in module.__all__)
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=f"{module.__name__}.{name}", refwarn=True
            )
            literal.replace_self(link)
            link += literal


_ALIAS = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")


def _with_aliases(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """An alias of a type by its name, also where it is a part of a union."""
    return _ALIAS.sub(r"\1", signature or "") or None, _ALIAS.sub(r"\1", returns or "") or None


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)
    app.connect("doctree-read", _wrap)
    app.connect("doctree-read", _mark_prose)
    app.connect("doctree-read", _link_names)
    app.connect("autodoc-process-signature", _with_aliases)
