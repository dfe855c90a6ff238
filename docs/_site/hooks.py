"""What MkDocs runs while it builds the site: adds the pages that are made of the program itself."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, so that its own calmnb is documented

from api_reference import api_nav, api_pages
from cli_reference import cli_page
from columns_reference import columns_page
from figures import figure_files
from notebook_pages import notebook_files

__all__ = ["on_config", "on_files"]


_FIGURES = "kernels/figures.md"
_figures, _notebooks = cache(figure_files), cache(notebook_files)


def on_config(config: Any) -> Any:
    """Add what is generated to the navigation; the figures only where there are recordings."""
    nav = []
    for entry in config["nav"]:
        for title, pages in entry.items():
            if pages == "generated: api":
                pages = api_nav()
            elif pages == "generated: notebooks":
                pages = [page for page in _notebooks() if page.endswith(".md")]
            elif isinstance(pages, list) and not _figures():
                pages = [page for page in pages if _FIGURES not in page.values()]
            nav.append({title: pages})
    config["nav"] = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages: dict[str, str | bytes] = {"cli.md": cli_page(), "api/columns.md": columns_page(), **api_pages()}
    for path, content in {**pages, **_figures(), **_notebooks()}.items():
        files.append(File.generated(config, path, content=content))
    return files
