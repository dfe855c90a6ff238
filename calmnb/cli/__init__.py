"""The ``calmnb`` command: thin shells over the public API.

Every command prints results on stdout and everything else (progress, notes) on stderr; ``--json`` prints one JSON
document and nothing more. A mistake of the user's ends in one line and exit status 1, Ctrl-C in status 130.
"""

from __future__ import annotations

import os
import sys

from calmnb.cli import compare, environment, measure, models, text, tools, verify
from calmnb.cli.common import app, error_console

__all__ = ["app", "main"]

_REGISTERED = (models, text, measure, compare, environment, tools, verify)


def main() -> None:
    """Entry point of the ``calmnb`` command."""
    from calmnb.errors import CalmnbError

    try:
        app()
    except CalmnbError as error:
        error_console().print(f"[bold red]error:[/] {_escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        error_console().print("\ninterrupted", highlight=False)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe went away (`calmnb info x | head`): end quietly, as other commands do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
