"""DRAM bytes by hardware counters: reading Nsight Compute's CSV, and setting it beside the bytes that calmnb declares.

``bytes_measured`` is the third kind of bytes (`calmnb.engine.stages`): if it disagrees with ``bytes_counted`` for a kernel that
reads weights, the formula is wrong. Durations under this tool are inflated: kernels run alone, from cold caches.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from calmnb.errors import ConfigError, FormatError
from calmnb.profile.attribution import find_steps, kernel_name

if TYPE_CHECKING:
    from calmnb.profile.session import Session

__all__ = ["MEASURED_COLUMNS", "NCU_COLUMNS", "add_measured", "attach_measured", "measured_rows", "ncu_stages", "read_ncu_csv"]

#: Columns of `read_ncu_csv`.
NCU_COLUMNS = {
    "id": "ncu's number of the launch within its process",
    "process": "process id",
    "kernel": "name, without its argument list",
    "duration_s": "gpu__time_duration, seconds, inflated by the tool; nan if not measured",
    "bytes_read": "dram__bytes_read, bytes; nan if not measured",
    "bytes_written": "dram__bytes_write, bytes; nan if not measured",
    "bytes_measured": "bytes_read + bytes_written",
}

#: Columns of `attach_measured`.
MEASURED_COLUMNS = {
    "kernel": "the engine's name of the code that ran",
    "stage": "stage it works for",
    "calls": "launches in the step",
    "bytes_min": "bytes that must move, the step's launches together",
    "bytes_counted": "bytes this code touches, the step's launches together",
    "bytes_measured": "DRAM bytes by hardware counters, the step's launches together",
    "measured_to_counted": "bytes_measured / bytes_counted; nan where nothing is counted",
    "ncu_us": "duration under ncu, microseconds, the step's launches together",
}

_HEADER = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
_METRICS = {
    "gpu__time_duration.sum": "duration_s",
    "dram__bytes_read.sum": "bytes_read",
    "dram__bytes_write.sum": "bytes_written",
}
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {
    "n": 1e-9, "ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "s": 1.0, "second": 1.0,
}  # fmt: skip
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")


def read_ncu_csv(source: str | Path) -> pd.DataFrame:
    """Read what ``ncu --csv`` prints, one row a kernel and metric; other lines among it are passed over.

    Parameters
    ----------
    source
        A file, or the text itself (anything with a line break).

    Returns
    -------
    DataFrame
        One row a kernel launch, in launch order; columns in `NCU_COLUMNS`. Bytes and seconds, whatever units ncu chose.

    Raises
    ------
    FormatError
        If there is no such file, no table in it, or a line, number or unit cannot be read.
    """
    where, text = _load(source)
    launches: dict[tuple[str, str], dict[str, Any]] = {}
    for record in _records(text, where):
        key = (record.get("Process ID", ""), record["ID"])
        launch = launches.get(key)
        if launch is None:
            launch = launches[key] = {
                "id": _whole(key[1], "ID", where),
                "process": _whole(key[0] or "-1", "Process ID", where),
                "kernel": kernel_name(record["Kernel Name"]),
            }
        column = _METRICS.get(record["Metric Name"])
        if column:
            launch[column] = _quantity(record["Metric Value"], record["Metric Unit"], column == "duration_s", where)
    if not launches:
        raise FormatError(
            f"{where}: ncu measured no kernel; name a command that runs some, without --launch-skip beyond the last"
        )
    table = pd.DataFrame(list(launches.values()))
    for column in _METRICS.values():
        table[column] = table[column].astype(float) if column in table else math.nan
    table["bytes_measured"] = table["bytes_read"] + table["bytes_written"]
    return table[list(NCU_COLUMNS)]


def _load(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and "\n" in source:
        return "the output of ncu", source
    path = Path(source).expanduser()
    try:
        return str(path), path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error}); give the file that holds ncu's CSV") from error


def _records(text: str, where: str) -> Iterator[dict[str, str]]:
    """Rows of the table as dicts. A program's output may stand before a row in its line, if it ended in no line break."""
    header: list[str] | None = None
    for line in text.splitlines():
        if '"ID",' in line:
            cells = _cells(line[line.index('"ID",') :], where)
            if any("__" in cell for cell in cells) or not set(_HEADER) <= set(cells):
                lacks = ", ".join(name for name in _HEADER if name not in cells)
                raise FormatError(
                    f"{where}: this is the wide form of ncu's CSV (no column {lacks}); leave out --page raw, which makes it"
                )
            header = cells
            continue
        if header is None:
            continue
        start = re.search(r'"\d+","', line)
        cells = _cells(line[start.start() :], where) if start else []
        if len(cells) == len(header):
            yield dict(zip(header, cells, strict=True))
    if header is None:
        raise FormatError(f"{where}: holds no table of ncu's; make one with: ncu --csv --metrics ... COMMAND, or calmnb ncu")


def _cells(line: str, where: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error as error:
        raise FormatError(f"{where}: the line {line[:60]!r}... is not CSV of ncu's ({error}); measure again") from error


def _whole(text: str, column: str, where: str) -> int:
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise FormatError(f"{where}: {column} is {text[:40]!r}; it must be a whole number below 10**18; measure again")
    return int(text)


def _quantity(value: str, unit: str, is_time: bool, where: str) -> float:
    """`value` in seconds or bytes; nan for what ncu calls n/a."""
    text = value.strip()
    if text.lower() in {"", "n/a", "nan", "-"}:
        return math.nan
    plain = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    try:
        number = float(plain)
    except ValueError:
        raise FormatError(f"{where}: {value!r} is not a number; run ncu with LC_ALL=C, so that it writes 1,234.5") from None
    name = unit.strip().lower()
    if is_time:
        factor = _TIMES.get(name)
    else:
        match = re.fullmatch(r"([kmgt]?)(?:byte|bytes|b)", name)
        factor = _PREFIXES[match[1]] if match else None
    if factor is None:
        raise FormatError(f"{where}: unknown unit {unit!r}; run ncu with --print-units base")
    return number * factor


def ncu_stages(table: pd.DataFrame) -> pd.DataFrame:
    """`table` with the columns ``step``, ``stage`` and ``layer``: what each launch is, as far as order and names tell.

    Parameters
    ----------
    table
        What `read_ncu_csv` returns.

    Returns
    -------
    DataFrame
        A copy. ``step`` counts calmnb's steps from 0 and is -1 for launches outside of them, whose stage is "other".
    """
    out = table.reset_index(drop=True).assign(step=-1, stage="other", layer=-1)
    for number, step in enumerate(find_steps(list(table["kernel"]))):
        index = np.arange(step.first, step.first + len(step.rows))
        out.loc[index, "step"] = number
        out.loc[index, "stage"] = [row.stage for row in step.rows]
        out.loc[index, "layer"] = [row.layer for row in step.rows]
    return out


def attach_measured(session: Session, table: pd.DataFrame, *, step: int | None = None) -> pd.DataFrame:
    """Set measured DRAM bytes beside declared ones, a row a kernel and stage.

    Parameters
    ----------
    session
        A recording on the same kind of GPU of the model that ncu ran.
    table
        What `read_ncu_csv` returns. Steps of calmnb's in it are found by name; without any, all of it counts as one step.
        Of several steps with the same launches, the median is taken.
    step
        Row of ``session.steps`` to compare with; the first decode step of as many launches when left out. Attention's bytes
        grow with the context, so compare steps at the same position.

    Returns
    -------
    DataFrame
        Columns in `MEASURED_COLUMNS`, most bytes first.

    Raises
    ------
    ConfigError
        If launches of `table` and rows of the step do not match, one to one and in order.
    """
    rows = measured_rows(session, table, step=step)
    sums = ["bytes_min", "bytes_counted", "bytes_measured", "ncu_us"]
    by = rows.groupby(["kernel", "stage"], observed=True, sort=False)
    out = by[sums].sum(min_count=1).assign(calls=by.size()).reset_index()
    out["measured_to_counted"] = out["bytes_measured"] / out["bytes_counted"].where(out["bytes_counted"] > 0)
    return out.sort_values("bytes_measured", ascending=False, kind="stable", ignore_index=True)[list(MEASURED_COLUMNS)]


def measured_rows(session: Session, table: pd.DataFrame, *, step: int | None = None) -> pd.DataFrame:
    """As `attach_measured`, but a row a launch, in launch order, with its ``layer``; same parameters and errors.

    The index is that of the launches in ``session.events``.
    """
    sequences = _sequences(table)
    # The host's choice of a token, and what moves time stamps, are not launches of the step.
    events = session.events[session.events["stage"] != "gap"]
    launched = events[~events["kernel"].isin(["sample", "collect_stamps"])]
    sizes = launched.groupby("step").size()
    if step is None:
        step = _matching_step(session, sizes, [len(each) for each in sequences])
    elif step not in sizes.index:
        raise ConfigError(f"step is {step}; the session's steps with kernels are {_range(list(sizes.index))}")
    rows = launched[launched["step"] == step]
    fitting = [each for each in sequences if len(each) == len(rows)]
    if not fitting:
        seen = ", ".join(str(n) for n in sorted({len(each) for each in sequences}))
        raise ConfigError(
            f"step {step} of the session has {len(rows)} kernels, ncu saw {seen} launches a step; measure a step that ends in "
            "the same way (logits only, greedy, or drawn), of the same model, with no kernel filtered out"
        )
    for each in fitting:
        for i, (mine, theirs) in enumerate(zip(rows["stage"], each["stage"], strict=True)):
            if "other" not in (mine, theirs) and mine != theirs:
                raise ConfigError(
                    f"launch {i}: the session has {rows['kernel'].iloc[i]} of {mine}, ncu saw {each['kernel'].iloc[i]} of "
                    f"{theirs}; these are different steps or models"
                )
    out = rows[["layer", "stage", "kernel", "bytes_min", "bytes_counted"]].copy()
    out["bytes_measured"] = np.median([each["bytes_measured"] for each in fitting], axis=0)
    out["ncu_us"] = np.median([each["duration_s"] for each in fitting], axis=0) * 1e6
    return out


def add_measured(session: Session, table: pd.DataFrame, *, step: int | None = None) -> Session:
    """The step that was measured, with one column more in its events: ``bytes_measured``.

    Parameters and errors as for `attach_measured`.

    Returns
    -------
    Session
        Of that step alone, numbered 0; DRAM bytes of every launch, 0 where nothing was launched (the gap). Pivots and
        comparisons take the column as they take ``bytes_min``.
    """
    from calmnb.profile.session import Session

    rows = measured_rows(session, table, step=step)
    number = int(session.events.loc[rows.index[0], "step"])
    events = session.events[session.events["step"] == number].assign(step=0, bytes_measured=0.0)
    events.loc[rows.index, "bytes_measured"] = rows["bytes_measured"]
    steps = session.steps[session.steps["step"] == number].assign(step=0, warmup=False)
    return Session(events.reset_index(drop=True), steps.reset_index(drop=True), session.meta)


def _sequences(table: pd.DataFrame) -> list[pd.DataFrame]:
    """The steps in `table`, without the kernel that only moves time stamps."""
    known = ncu_stages(table)
    steps = [part for number, part in known.groupby("step") if int(str(number)) >= 0]
    return [part[part["kernel"] != "collect_stamps"] for part in steps] or [known]


def _matching_step(session: Session, sizes: pd.Series[int], wanted: Sequence[int]) -> int:
    steps = session.steps[(session.steps["phase"] == "decode") & (session.steps["n_tokens"] > 0)]
    steps = steps.sort_values("warmup", kind="stable")  # settled ones first
    counts = sizes.reindex(steps["step"], fill_value=0)
    for number, size in counts.items():
        if size in wanted:
            return int(str(number))
    mine = ", ".join(map(str, sorted(set(counts)))) or "no"
    raise ConfigError(
        f"the session's decode steps have {mine} kernels, ncu saw {', '.join(map(str, sorted(set(wanted))))} launches; "
        "measure whole decode steps of the same model, with no kernel filtered out"
    )


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
