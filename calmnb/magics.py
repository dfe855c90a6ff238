"""IPython magics: ``%load_ext calmnb`` adds ``%calm_load``, ``%%calm_profile`` and ``%%calm_nsys``.

Thin shells over `calmnb.load`, `calmnb.profile` and `calmnb.read_nsys` with the options of the command line. What
goes wrong is a UsageError, which IPython shows as one line without a traceback.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# (IPython's decorators carry no types.)

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from calmnb.errors import CalmnbError

__all__ = ["CalmMagics", "load_ipython_extension"]


@magics_class
class CalmMagics(Magics):
    """The magics of calmnb.

    Attributes
    ----------
    last : str
        Variable that holds the model loaded last.
    """

    shell: Any
    last = ""

    @magic_arguments()
    @argument("path", help="A .calm file, or demo, demo:fp16, demo:fp8, demo:gf4.")
    @argument("-o", "--output", default="model", metavar="NAME", help="Variable for the model (default: model).")
    @argument("--device", default="auto", help="auto, cpu, cuda or reference.")
    @argument("--threads", type=int, help="CPU threads; all cores when left out.")
    @argument("-c", "--context", type=int, help="Context length in tokens; the model's, at most 4096.")
    @argument("--kv-dtype", default="fp16", help="KV cache storage: fp16 or fp8.")
    @argument("--on-full", default="stop", help="When the context is full: stop, or roll.")
    @line_magic
    def calm_load(self, line: str) -> None:
        """Load a model into a variable: ``%calm_load demo:fp8 -o model``."""
        given = _arguments(self.calm_load, line)
        _check_name(given.output)
        try:
            from calmnb.cli.common import load_model

            model = load_model(
                _unquoted(given.path),
                device=given.device,
                threads=given.threads,
                context=given.context,
                kv_dtype=given.kv_dtype,
                on_full=given.on_full,
            )
        except (CalmnbError, OSError) as error:
            raise UsageError(f"%calm_load: {error}") from None
        previous = self.shell.user_ns.get(given.output)
        self.shell.user_ns[given.output] = model
        self.last = given.output
        if previous is not model and type(previous) is type(model):
            previous.close()
        print(f"{given.output} = {model!r}")

    @magic_arguments()
    @argument("-m", "--model", metavar="NAME", help="Variable that holds the model; the one loaded last when left out.")
    @argument("-n", "--tokens", type=int, default=64, help="Tokens to decode (default: 64).")
    @argument("-o", "--output", metavar="NAME", help="Variable for the session.")
    @argument("-t", "--temperature", type=float, default=0.0, help="0 (default) is greedy.")
    @argument("-s", "--seed", type=int, help="Random seed.")
    @argument("--peak", type=float, metavar="GB/S", help="Bandwidth to compare with, instead of measuring it.")
    @argument("--raw", action="store_true", help="Continue the text as it stands, without the chat template.")
    @argument("--json", action="store_true", help="Print one JSON document instead of showing the session.")
    @cell_magic
    def calm_profile(self, line: str, cell: str) -> Any:
        """Answer the text of the cell with every kernel timed, and return the session: ``%%calm_profile -n 64 -o session``."""
        given = _arguments(self.calm_profile, line)
        if given.output:
            _check_name(given.output)
        prompt = cell.strip()
        if not prompt:
            raise UsageError("%%calm_profile: the cell is empty; write the prompt below the first line")
        model = self._model(given.model)
        try:
            from calmnb.profile import profile

            session = profile(
                model,
                prompt if given.raw else [{"role": "user", "content": prompt}],
                tokens=given.tokens,
                peak=given.peak,
                temperature=given.temperature,
                seed=given.seed,
            )
        except CalmnbError as error:
            raise UsageError(f"%%calm_profile: {error}") from None
        if given.output:
            self.shell.user_ns[given.output] = session
        if not given.json:
            return session
        stages = json.loads(session.stages().to_json(orient="records"))
        print(json.dumps({"summary": session.summary(), "meta": session.meta, "stages": stages}, indent=2))
        return None

    @magic_arguments()
    @argument("-o", "--output", metavar="NAME", help="Variable for the session.")
    @argument("--report", metavar="PATH", help="Keep Nsight Systems' own report and its SQLite export here.")
    @argument("--capture-range", action="store_true", help="Record only from cudaProfilerStart to cudaProfilerStop.")
    @cell_magic
    def calm_nsys(self, line: str, cell: str) -> Any:
        """Run the cell's code under NVIDIA Nsight Systems and return the session: ``%%calm_nsys -o session``.

        The code runs as a script in a process of its own, in this notebook's folder: it must import what it uses, and
        knows none of the notebook's variables. That is because Nsight Systems has to be there before a process first
        touches the GPU, so it cannot look into a kernel that is running; the alternative, to restart the kernel under
        it, would lose what the notebook has loaded.
        """
        given = _arguments(self.calm_nsys, line)
        if given.output:
            _check_name(given.output)
        if not cell.strip():
            raise UsageError("%%calm_nsys: the cell is empty; write the code to run below the first line")
        try:
            from calmnb.profile.nsight import nsys_script

            session = nsys_script(
                cell, report=_unquoted(given.report) if given.report else None, capture_range=given.capture_range
            )
        except (CalmnbError, OSError) as error:
            raise UsageError(f"%%calm_nsys: {error}") from None
        if given.output:
            self.shell.user_ns[given.output] = session
        return session

    def _model(self, name: str | None) -> Any:
        wanted = name or self.last or "model"
        model = self.shell.user_ns.get(wanted)
        if model is None:
            raise UsageError(f"%%calm_profile: there is no variable {wanted!r}; load a model first, as in: %calm_load demo:fp8")
        if not hasattr(model, "generate"):
            raise UsageError(f"%%calm_profile: {wanted!r} is a {type(model).__name__}; -m takes the name of a loaded model")
        return model


def _arguments(magic: Any, line: str) -> Namespace:
    parsed: Namespace = parse_argstring(magic, line)
    return parsed


def _unquoted(path: str) -> str:
    """`path` without the quotes that IPython leaves on arguments with blanks in them."""
    return path[1:-1] if len(path) > 1 and path[0] == path[-1] and path[0] in "'\"" else path


def _check_name(name: str) -> None:
    if not name.isidentifier():
        raise UsageError(f"-o takes the name of a variable, and {name!r} is none")


def load_ipython_extension(ipython: Any) -> None:
    """Add the magics; IPython calls this for ``%load_ext calmnb``."""
    ipython.register_magics(CalmMagics)
