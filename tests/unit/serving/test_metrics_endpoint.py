"""Pages of the metrics port: what a caller without a token is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories.servers.key_files import write_keys
from penstock.common.credentials import TokenFile
from penstock.router.config import RouterConfig
from penstock.router.frontend.key_scopes import metrics_tokens
from penstock.router.keys.key_ring import KeyRing
from penstock.serving.metrics_endpoint import _pages

FILE, KEY = "a bearer token of --auth-token-file", "a key with the scope metrics"


@pytest.mark.parametrize(
    ("has_file", "has_keys", "wanted"), [(True, False, FILE), (False, True, KEY), (True, True, f"{FILE}, or {KEY}")]
)
def test_a_caller_without_a_token_is_told_what_there_is(
    tmp_path: Path, has_file: bool, has_keys: bool, wanted: str
) -> None:
    file = tmp_path / "tokens"
    file.write_text("right\n")
    if has_keys:
        keys = write_keys(tmp_path / "keys.toml", a={})
        config = RouterConfig(keys_file=keys, auth_token_file=str(file) if has_file else None)
        tokens: Any = metrics_tokens(config, KeyRing(keys, 9))
    else:
        tokens = TokenFile(str(file), "--auth-token-file")
    told: list[str] = []
    pages = _pages(lambda *_: [b"figures"], lambda: True, tokens)
    answer = pages({"PATH_INFO": "/metrics"}, lambda status, headers: told.append(status))  # type: ignore[arg-type]
    assert (told, b"".join(answer).decode()) == (["401 Unauthorized"], f"/metrics needs {wanted}\n")
