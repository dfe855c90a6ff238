"""Where calmnb keeps what it fetched or compiled: one folder, which users can move or delete."""

from __future__ import annotations

import os
from pathlib import Path

from calmnb.errors import CalmnbError

__all__ = ["cache_folder"]


def cache_folder(*parts: str) -> Path:
    """Folder for models and compiled kernels: ``$CALMNB_CACHE``, else the user's cache folder for calmnb.

    Parameters
    ----------
    *parts
        A folder inside it.

    Returns
    -------
    Path
        It exists afterwards.

    Raises
    ------
    CalmnbError
        If it cannot be created.
    """
    given = os.environ.get("CALMNB_CACHE")
    if given:
        folder = Path(given).expanduser()
    else:
        import platformdirs

        folder = platformdirs.user_cache_path("calmnb", appauthor=False)
    folder = folder.joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalmnbError(
            f"the cache folder {folder} cannot be created ({error.strerror}); set CALMNB_CACHE to a folder you can write"
        ) from error
    return folder
