"""What a longer context costs, in time and in memory: from which length attention is felt, and which lengths fit at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from calmnb.config import DTYPE_BITS, KV_DTYPES, WEIGHT_DTYPES, ModelConfig
from calmnb.errors import ConfigError
from calmnb.profile.device import Device, get_device
from calmnb.profile.speed_of_light import RESERVE_BYTES, total_params

if TYPE_CHECKING:
    from calmnb.profile.session import Session

__all__ = ["LIMIT_COLUMNS", "MILESTONE_COLUMNS", "context_limits", "kv_milestones"]

#: Columns of `kv_milestones`.
MILESTONE_COLUMNS: dict[str, str] = {
    "growth_percent": "how much longer a token takes than at the shortest context that was recorded",
    "kv_len": "context at which it does, positions; nan if it never does",
    "kv_bytes": "KV cache a token reads there",
    "attention_ms": "attention there, all layers, milliseconds",
    "source": '"measured": between two recorded contexts; "extrapolated": beyond the longest, along the line of the last two',
}

#: Columns of `context_limits`.
LIMIT_COLUMNS: dict[str, str] = {
    "dtype": "storage of the weights",
    "kv_dtype": "storage of the KV cache",
    "weights_bytes": "weights and embedding",
    "kv_bytes_per_token": "KV cache of one position",
    "context": "positions that fit beside the weights and 500 MiB for everything else; 0 if the weights do not fit",
    "trained_context": "positions the model is made for",
    "fits": "whether all of those fit",
}

_FLAT = 1e-9  # part of a token's time a position: less is rounding
GROWTHS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)


def kv_milestones(session: Session, growths: Sequence[float] = GROWTHS) -> pd.DataFrame:
    """At which contexts attention makes a token noticeably slower: where it stops being free.

    Parameters
    ----------
    session
        Decoded tokens at two contexts or more.
    growths
        Parts of the time of a token at the shortest context, > 0.

    Returns
    -------
    DataFrame
        Columns of `MILESTONE_COLUMNS`, a row for each of `growths`. Only attention grows with the context, so its growth is
        what counts: noise of the other stages stays out of it.

    Raises
    ------
    ConfigError
        If the session has fewer than two contexts, or a growth is not positive.
    """
    if not growths or min(growths) <= 0:
        raise ConfigError(f"kv_milestones: growths are {list(growths)}; they must be positive, e.g. 0.1 for a tenth more time")
    table = session.kv_cost()
    if len(table) < 2:
        raise ConfigError(
            f"kv_milestones: the session has {len(table)} context{'s' if len(table) != 1 else ''}; record at two or more"
        )
    x, attention = table["kv_len"].to_numpy(float), table["attention_ms"].to_numpy(float)
    grown = np.maximum.accumulate(attention - attention[0]) / float(table["token_ms"].iloc[0])
    per_token = float((table["kv_bytes"] / table["kv_len"]).iloc[-1])
    slope = (grown[-1] - grown[-2]) / (x[-1] - x[-2])
    rows = []
    for growth in growths:
        inside = growth <= grown[-1]
        if inside:
            at = float(np.interp(growth, grown, x))
        else:
            at = float(x[-1] + (growth - grown[-1]) / slope) if slope > _FLAT else math.nan
        rows.append(
            {
                "growth_percent": 100.0 * growth,
                "kv_len": at,
                "kv_bytes": at * per_token,
                "attention_ms": float(attention[0]) + growth * float(table["token_ms"].iloc[0]),
                "source": "measured" if inside else "extrapolated",
            }
        )
    return pd.DataFrame(rows, columns=list(MILESTONE_COLUMNS))


def context_limits(
    config: ModelConfig,
    device: str | Device | float,
    *,
    dtypes: Sequence[str] = WEIGHT_DTYPES,
    kv_dtypes: Sequence[str] = KV_DTYPES,
    is_tied: bool = False,
) -> pd.DataFrame:
    """Which context fits in a GPU's memory, for every storage of weights and KV cache.

    Parameters
    ----------
    config
        The model.
    device
        A name of `calmnb.profile.device.DEVICES`, a `Device`, or memory in GiB (2**30 bytes).
    dtypes, kv_dtypes
        Storages to list.
    is_tied
        Whether the output matrix is the embedding.

    Returns
    -------
    DataFrame
        Columns of `LIMIT_COLUMNS`, a row for each pair.

    Raises
    ------
    ConfigError
        If the device is not known, its memory is not, or a storage is not one of those accepted.

    Examples
    --------
    >>> context_limits(shape_config("mistral-7b"), "RTX 4090", dtypes=["fp16"])["context"].tolist()  # doctest: +SKIP
    """
    total = device_memory(device)
    for name, given, accepted in (("dtypes", dtypes, WEIGHT_DTYPES), ("kv_dtypes", kv_dtypes, KV_DTYPES)):
        unknown = [each for each in given if each not in accepted]
        if unknown:
            raise ConfigError(f"context_limits: {name} has {', '.join(unknown)}; accepted are {', '.join(accepted)}")
    rows = []
    for dtype in dtypes:
        weights = total_params(config, is_tied=is_tied) * DTYPE_BITS[dtype] // 8
        for kv_dtype in kv_dtypes:
            per_token = config.kv_bytes_per_token(kv_dtype)
            context = max(total - weights - RESERVE_BYTES, 0) // per_token
            rows.append(
                {
                    "dtype": dtype,
                    "kv_dtype": kv_dtype,
                    "weights_bytes": weights,
                    "kv_bytes_per_token": per_token,
                    "context": context,
                    "trained_context": config.max_seq_len,
                    "fits": context >= config.max_seq_len,
                }
            )
    return pd.DataFrame(rows, columns=list(LIMIT_COLUMNS))


def device_memory(device: str | Device | float) -> int:
    """Memory of a device in bytes; parameters and errors as for `context_limits`."""
    if isinstance(device, int | float):
        if not device > 0:
            raise ConfigError(f"context_limits: the memory is {device} GiB; it must be positive")
        return int(device * 2**30)
    found = get_device(device) if isinstance(device, str) else device
    if not found.memory_gb:
        raise ConfigError(f"context_limits: the memory of {found.name} is not known; pass it in GiB")
    return int(found.memory_gb * 2**30)
