"""One decode step under Nsight Compute: bytes by hardware counters beside the bytes that calmnb declares.

The step runs in a process of its own, with random weights of the model's sizes: bytes do not depend on what they say. Layers
are alike, so a few of them stand for all; ncu runs every kernel several times and flushes the caches in between.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from calmnb.config import ModelConfig
from calmnb.profile.describe import config_from_dict, config_to_dict
from calmnb.profile.nsight import run_ncu

if TYPE_CHECKING:
    import pandas as pd

    from calmnb.profile.session import Session

__all__ = ["LAYERS", "measure_step"]

#: Layers that are measured unless the caller says otherwise.
LAYERS = 4
_MODULE = "calmnb.profile.ncu_step"


def measure_step(
    config: ModelConfig,
    *,
    is_tied: bool = False,
    kv_dtype: str = "fp16",
    context: int = 0,
    layers: int | None = LAYERS,
    name: str = "",
    output: Callable[[str], object] = print,
) -> tuple[Session, pd.DataFrame, str]:
    """Run one greedy decode step of a model's sizes under Nsight Compute.

    Parameters
    ----------
    config
        The model's sizes; its weights are made up on the GPU.
    is_tied
        Whether the output matrix is the embedding.
    kv_dtype
        KV-cache storage.
    context
        Positions cached before the step.
    layers
        Layers to run, at most the model's; None for all of them.
    name
        What the session calls the model.
    output
        Receives each line that program and tool print.

    Returns
    -------
    session : Session
        A few steps of the same model at the same position, timed by stamps outside of ncu's range, with declared bytes.
    launches : DataFrame
        As `calmnb.profile.ncu.read_ncu_csv`: one row a kernel of the step.
    text : str
        ncu's own CSV.

    Raises
    ------
    CalmnbError
        If ncu is missing, may not read the counters, or the step fails.
    """
    from calmnb.profile.ncu import read_ncu_csv
    from calmnb.profile.session import Session

    n_layers = config.n_layers if layers is None else min(layers, config.n_layers)
    with tempfile.TemporaryDirectory(prefix="calmnb-ncu-") as folder:
        task, saved = Path(folder) / "task.json", Path(folder) / "session.calmprof"
        about = {
            "config": config_to_dict(config.replace(n_layers=n_layers)),
            "is_tied": is_tied,
            "kv_dtype": kv_dtype,
            "context": context,
            "name": name or config.arch,
            "session": str(saved),
        }
        task.write_text(json.dumps(about), encoding="utf-8")
        command = [sys.executable, "-m", _MODULE, str(task)]
        # Five kernels a layer (six with experts), and what goes before and after: more than this the step cannot have.
        text = run_ncu(command, count=6 * n_layers + 8, in_range=True, output=output)
        return Session.load(saved), read_ncu_csv(text + "\n"), text


def run_task(about: dict[str, Any]) -> None:
    """What the process under ncu does: a few recorded steps, then one step between cudaProfilerStart and Stop."""
    from calmnb.engine.cuda import open_random_engine
    from calmnb.profile.recorder import SessionRecorder

    config, context = config_from_dict(about["config"]), about["context"]
    kv_dtype: Any = about["kv_dtype"]
    with open_random_engine(config, is_tied=about["is_tied"], seq_len=context + 16, kv_dtype=kv_dtype) as engine:
        engine.pretend_cached(context)
        recorder = SessionRecorder(SimpleNamespace(engine=engine), model=about["name"], settings={"warmup": 1})
        engine.recorder = recorder
        for _ in engine.decode_many(1, context, 4):
            pass
        engine.recorder = None
        recorder.session().save(about["session"])
        for _ in engine.decode_many(1, context, 1):  # the graph without stamps is made outside the range
            pass
        engine.gpu.profiler(True)
        for _ in engine.decode_many(1, context, 1):
            pass
        engine.gpu.profiler(False)


def main() -> None:
    """Entry point of the process under ncu."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description="One decode step for Nsight Compute.")
    parser.add_argument("task", type=Path, help="JSON file that says what to run")
    run_task(json.loads(parser.parse_args().task.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
