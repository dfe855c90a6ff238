"""`KernelTable`: any table of a session, to sort, filter and copy."""

from __future__ import annotations

import html
import os
from typing import Any

import pandas as pd
import traitlets

from calmnb.errors import ConfigError
from calmnb.profile.events import EVENT_COLUMNS, STEP_COLUMNS
from calmnb.profile.report import html_table
from calmnb.profile.session import PeakChoice, Session
from calmnb.profile.tables import TABLE_COLUMNS
from calmnb.widgets.assets import bundle, static_text
from calmnb.widgets.columns import frame_columns, pack_columns
from calmnb.widgets.fallback import StaticFallback, wrap_static
from calmnb.widgets.profile_data import stage_looks
from calmnb.widgets.profile_view import open_session

__all__ = ["TABLES", "KernelTable"]

#: Tables of a session that can be shown, with what their columns mean.
TABLES: dict[str, dict[str, str]] = {**TABLE_COLUMNS, "events": EVENT_COLUMNS, "steps": STEP_COLUMNS}

_STATIC_ROWS = 20


class KernelTable(StaticFallback):
    """A table of a session: sort by a click on a title, filter by typing, copy as tab-separated text.

    Parameters
    ----------
    session : Session, or path of a saved one
    table : {"kernels", "layers", "stages", "tokens", "kv_cost", "events", "steps"}
        Which table of the session; "events" has a row for every kernel of every step.
    peak : {"user", "measured", "datasheet"}, number of GB/s, or None
        What percentages refer to; see `Session.peak`.
    height : int
        Height of the table in pixels, at least 120; longer tables scroll.

    Attributes
    ----------
    frame : DataFrame
        What is shown.

    Raises
    ------
    ConfigError
        If `session` is something else, there is no such table, or an option is out of range.
    FormatError
        If there is no session at the path.

    Notes
    -----
    Keys: arrows, Page Up and Down, Home and End move; Enter selects; ``/`` goes to the filter; Ctrl+C copies the selected
    row, or all that pass the filter, in the order shown.

    Examples
    --------
    >>> calmnb.KernelTable(session)  # doctest: +SKIP
    >>> calmnb.KernelTable("run.calmprof", "events")  # doctest: +SKIP
    """

    _esm = bundle("format.js", "charts.js", "theme.js", "columns.js", "filter.js", "table.js", "export.js", "kernel_table.js")
    _css = static_text("base.css") + static_text("profile.css")

    info = traitlets.Dict().tag(sync=True)
    data = traitlets.Bytes(b"").tag(sync=True)

    def __init__(
        self,
        session: Session | str | os.PathLike[str],
        table: str = "kernels",
        *,
        peak: PeakChoice = None,
        height: int = 420,
    ) -> None:
        if table not in TABLES:
            raise ConfigError(f"KernelTable: table is {table!r}; accepted are {', '.join(TABLES)}")
        if height < 120:
            raise ConfigError(f"height is {height}; it must be at least 120 pixels")
        opened = open_session(session, "KernelTable")
        self.frame = _table(opened, table, peak)
        columns, labels = frame_columns(self.frame)
        layout, data = pack_columns(columns)
        looks = stage_looks()
        super().__init__(
            data=data,
            info={
                "model": str(opened.meta.get("model", "unknown model")),
                "table": table,
                "rows": len(self.frame),
                "layout": layout,
                "labels": labels,
                "help": {name: text for name, text in TABLES[table].items() if name in columns},
                "colors": {look["name"]: look["color"] for look in looks},
                "height": height,
            },
        )
        self._static_id = f"calmnb-{self.model_id}"
        self.info = {**self.info, "static_id": self._static_id}

    def __repr__(self) -> str:
        return f"KernelTable({self.info['model']}, {self.info['table']}, {len(self.frame)} rows)"

    def static_html(self) -> str:
        """The first rows as static HTML: what a saved notebook shows without a kernel."""
        shown = self.frame.head(_STATIC_ROWS)
        rows = [[_text(value) for value in row] for row in shown.itertuples(index=False, name=None)]
        more = f"<p>{len(self.frame) - len(shown)} more rows</p>" if len(self.frame) > len(shown) else ""
        head = f"<b>{html.escape(str(self.info['model']))}</b>, {self.info['table']}"
        return wrap_static(f"<p>{head}</p>{html_table([str(name) for name in shown.columns], rows)}{more}", self._static_id)


def _table(session: Session, table: str, peak: PeakChoice) -> pd.DataFrame:
    if table in ("events", "steps"):
        frame: pd.DataFrame = getattr(session, table)
        return frame
    made: Any = getattr(session, table)
    if table == "kv_cost":
        return made()  # type: ignore[no-any-return]
    return made(peak=peak)  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value)
