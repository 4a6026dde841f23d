"""Tokenizer of a process without a tokenizer service: by that service's settings in the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from penstock.common.errors import StartupError
from penstock.tokenizer import local_bundle


async def test_the_settings_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    async def load(folder: Path, *, timeout_seconds: float, cache: Any) -> str:
        asked.append((folder, timeout_seconds, cache))
        return "bundle"

    monkeypatch.setattr(local_bundle, "load_bundle", load)
    monkeypatch.setattr(local_bundle, "usual_cache", lambda most: f"{most} tokenizers")
    assert await local_bundle.load_local_bundle(tmp_path) == "bundle"
    monkeypatch.setenv("PENSTOCK_LOAD_TIMEOUT_SECONDS", "7.5")
    monkeypatch.setenv("PENSTOCK_CACHED_TOKENIZERS", "0")
    await local_bundle.load_local_bundle(tmp_path)
    assert asked == [(tmp_path, 120.0, "8 tokenizers"), (tmp_path, 7.5, "0 tokenizers")]
    monkeypatch.setenv("PENSTOCK_LOAD_TIMEOUT_SECONDS", "soon")
    with pytest.raises(StartupError, match="PENSTOCK_LOAD_TIMEOUT_SECONDS"):
        await local_bundle.load_local_bundle(tmp_path)
