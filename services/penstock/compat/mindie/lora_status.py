"""Adapters by MindIE's calls: load_lora and unload_lora answer with a status where name, folder or room is at fault."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.common.errors import InvalidArgument, NotFound, ResourceExhausted
from penstock.generation.adapters.store import AdapterStore


class LoraStatus(enum.Enum):
    """Answer of load_lora and unload_lora."""

    SUCCESS = 0
    SLOTS_FULL = 1
    DUPLICATED_LORA_ID = 2
    INVALID_LORA_ID = 3
    INVALID_LORA_PATH = 4
    INVALID_LORA_RANK = 5
    UNSUPPORTED = 6


# Reasons of the store -> their status.
_STATUS = {
    "ADAPTER_EXISTS": LoraStatus.DUPLICATED_LORA_ID,
    "ADAPTER_PATH": LoraStatus.INVALID_LORA_PATH,
    "ADAPTER_BROKEN": LoraStatus.INVALID_LORA_PATH,
    "ADAPTER_RANK": LoraStatus.INVALID_LORA_RANK,
    "ADAPTER_UNSUPPORTED": LoraStatus.UNSUPPORTED,
}


def load_lora(store: AdapterStore, name: str, path: str | Path) -> LoraStatus:
    """Load the PEFT folder `path` as adapter `name`. Raises Unavailable where the engine has failed or stops."""
    if not name:
        return LoraStatus.INVALID_LORA_ID
    return _status(lambda: store.load(name, Path(path)))


def unload_lora(store: AdapterStore, name: str) -> LoraStatus:
    """Forget adapter `name`; requests that have it go on to their end."""
    return _status(lambda: store.unload(name))


def _status(call: Callable[[], Any]) -> LoraStatus:
    try:
        call()
    except NotFound:
        return LoraStatus.INVALID_LORA_ID
    except ResourceExhausted:
        return LoraStatus.SLOTS_FULL
    except InvalidArgument as error:
        # A name that is too long, or the model's.
        status = _STATUS.get(error.reason, LoraStatus.INVALID_LORA_ID if error.field == "name" else None)
        if status is None:
            raise
        return status
    return LoraStatus.SUCCESS
