"""The API reference: which modules have a page, and the Markdown that mkdocstrings turns into it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

__all__ = ["PAGES", "api_nav", "api_pages", "documented_as", "module_file", "public_names"]

ROOT = Path(__file__).resolve().parents[2]

#: Modules with a page of their own, by section. What is not here is how calmnb works inside, and may change without notice.
PAGES: dict[str, tuple[str, ...]] = {
    "Models and text": (
        "calmnb.model",
        "calmnb.generate",
        "calmnb.sampler",
        "calmnb.tokenizer",
        "calmnb.chat",
        "calmnb.perplexity",
        "calmnb.errors",
    ),
    "Files": (
        "calmnb.checkpoint",
        "calmnb.config",
        "calmnb.convert",
        "calmnb.download",
        "calmnb.info",
        "calmnb.quant",
        "calmnb.shapes",
        "calmnb.cache",
    ),
    "Profiling": (
        "calmnb.profile",
        "calmnb.profile.capture",
        "calmnb.profile.session",
        "calmnb.profile.events",
        "calmnb.profile.tables",
        "calmnb.profile.pivot",
        "calmnb.profile.compare",
        "calmnb.profile.waterfall",
        "calmnb.profile.kv",
        "calmnb.profile.speed_of_light",
        "calmnb.profile.bandwidth",
        "calmnb.profile.device",
        "calmnb.profile.recorder",
        "calmnb.profile.shape",
        "calmnb.profile.launches",
        "calmnb.profile.telemetry",
        "calmnb.profile.nsys",
        "calmnb.profile.ncu",
        "calmnb.profile.nsight",
        "calmnb.profile.cupti",
        "calmnb.profile.verify",
        "calmnb.profile.attribution",
        "calmnb.profile.palette",
    ),
    "Benchmarks and lessons": ("calmnb.bench", "calmnb.one_kernel"),
    "Figures and widgets": ("calmnb.plots", "calmnb.widgets", "calmnb.magics"),
    "Engines": (
        "calmnb.engine",
        "calmnb.engine.stages",
        "calmnb.engine.reference",
        "calmnb.engine.cuda",
        "calmnb.kernels",
    ),
    "Installation": ("calmnb.doctor",),
}


def module_file(module: str) -> Path:
    """Source file of `module`."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def public_names(module: str) -> tuple[str, ...]:
    """Return the names in ``__all__`` of `module`, without importing it."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return tuple(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__, so it has no public names; give it one or take it out of PAGES")


def documented_as(path: str) -> str:
    """Identifier under which the site documents a dotted name, or that of its class; empty if it does not."""
    listed = {page for section in PAGES.values() for page in section}
    if path in listed:
        return path
    words = path.split(".")
    for i in range(len(words) - 1, 0, -1):
        module, name = ".".join(words[:i]), words[i]
        if module_file(module).is_file() and "__all__" in module_file(module).read_text(encoding="utf-8"):
            known = name in public_names(module) and (module in listed or _home(module, name) in listed)
            return f"{_definition(module, name)}.{name}" if known else ""
    return ""


def api_pages() -> dict[str, str]:
    """Markdown of every page by its path under docs/."""
    pages = {"api/index.md": _overview()}
    for section in PAGES.values():
        pages |= {_path(module): _page(module) for module in section}
    return pages


def api_nav() -> list[dict[str, object]]:
    """Entries of the navigation, in the form of mkdocs.yml."""
    sections = [{title: [{module: _path(module)} for module in modules]} for title, modules in PAGES.items()]
    return [{"The calmnb package": "api/index.md"}, {"Columns of every table": "api/columns.md"}, *sections]


def _path(module: str) -> str:
    return f"api/{module}.md"


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(module_file(module).read_text(encoding="utf-8"))


@cache
def _homes(module: str) -> dict[str, str]:
    """Module that each name of `module` comes from: by its imports, also those for type checkers, or by its table ``_HOME``."""
    found = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("calmnb"):
            found |= {alias.asname or alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_HOME":
            table: dict[str, str] = ast.literal_eval(node.value)
            found |= {name: home if home.startswith("calmnb") else f"{module}.{home}" for name, home in table.items()}
    return found


def _definition(module: str, name: str) -> str:
    """Module that defines `name` of `module`."""
    while name in _homes(module):
        module = _homes(module)[name]
    return module


def _home(module: str, name: str) -> str:
    """Module whose page documents `name` of `module`: where it is defined, or the last on the way there that has a page."""
    listed = {page for section in PAGES.values() for page in section}
    home = module
    while name in _homes(module):
        module = _homes(module)[name]
        home = module if module in listed else home
    return home


def _page(module: str) -> str:
    own = [name for name in public_names(module) if _definition(module, name) == module]
    here = [name for name in public_names(module) if name not in own and _home(module, name) == module]
    elsewhere = [name for name in public_names(module) if name not in own and name not in here]
    text = f"# {module} {{ #{module} }}\n\n::: {module}\n    options:\n      members: {own or 'false'}\n"
    shown = "    options: {show_root_heading: true, show_root_toc_entry: true}\n"
    for name in here:
        text += f"\n::: {_definition(module, name)}.{name}\n{shown}"
    if elsewhere:
        text += "\n## Also importable from here\n\n" + _table(module, elsewhere)
    return text


_BEFORE = """# The calmnb package

`import calmnb` is light: it loads no engine, no pandas and no matplotlib. Each name below loads on first use.
`calmnb.plots` holds the figures.

"""
_AFTER = """
The pages beside this one document each public module: the names in its `__all__`. Times are seconds and sizes are bytes
unless a name says otherwise. GB is 10⁹ bytes. Modules without a page are how calmnb works inside, and may change.
"""


def _overview() -> str:
    return _BEFORE + _table("calmnb", public_names("calmnb")) + _AFTER


def _table(module: str, names: tuple[str, ...] | list[str]) -> str:
    rows = [
        f"| [`{name}`][{_definition(module, name)}.{name}] | {_summary(_definition(module, name), name)} |" for name in names
    ]
    return "\n".join(["| name | |", "|---|---|", *rows, ""])


def _summary(module: str, name: str) -> str:
    """First sentence of the docstring of `name`; empty for a constant."""
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
            return " ".join(paragraph.split()).replace("``", "`").replace("|", "\\|")
    return ""
