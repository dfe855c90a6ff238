"""What MkDocs runs while it builds the site: adds the pages that are made of the program itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, so that its own calmnb is documented

from api_reference import api_nav, api_pages
from cli_reference import cli_page

__all__ = ["on_config", "on_files"]


def on_config(config: Any) -> Any:
    """Add the reference to the navigation."""
    config["nav"] = [
        {title: api_nav()} if pages == "generated" else {title: pages}
        for entry in config["nav"]
        for title, pages in entry.items()
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for path, text in {"cli.md": cli_page(), **api_pages()}.items():
        files.append(File.generated(config, path, content=text))
    return files
