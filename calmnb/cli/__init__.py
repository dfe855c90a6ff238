"""The ``calmnb`` command: thin shells over the public API.

Every command prints results on stdout and everything else (progress, notes) on stderr; ``--json`` prints one JSON
document and nothing more. A mistake of the user's ends in one line and exit status 1, Ctrl-C in status 130, SIGTERM in 143.
"""

from __future__ import annotations

import io
import os
import signal
import sys

from calmnb.cli import compare, environment, measure, models, text, tools, verify
from calmnb.cli.common import app, error_console

__all__ = ["app", "main"]

_REGISTERED = (models, text, measure, compare, environment, tools, verify)


def main() -> None:
    """Entry point of the ``calmnb`` command."""
    from calmnb.errors import CalmnbError

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal's encoding has what a model may say
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that temporary files go
    try:
        app()
    except CalmnbError as error:
        _print_error(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        error_console().print("\ninterrupted", highlight=False)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe went away (`calmnb info x | head`): end quietly, as other commands do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a path that nothing looked at before, or a full disk
        where = f"{error.filename}: " if error.filename else ""
        _print_error(f"{where}{error.strerror or error}")
        sys.exit(1)


def _print_error(text: str) -> None:
    from rich.markup import escape

    error_console().print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
