"""Tokens of the router's calls where there are keys: who may call what, on loopback and on a public address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories.servers.key_files import secret_of, write_keys
from penstock.common.errors import PermissionDenied
from penstock.router.config import RouterConfig
from penstock.router.frontend.forwarding import ADMIN_SERVICE, FACTS_METHOD, OPENING_METHODS
from penstock.router.frontend.key_scopes import key_token_files
from penstock.router.keys.key_ring import KeyRing
from penstock.serving.metrics_endpoint import METRICS_TOKENS

TEXT, FORWARD = "/penstock.v1.TextService/Generate", "/penstock.v1.ModelService/Forward"
CALLS = {"text": TEXT, "other": "", "admin": ADMIN_SERVICE, "facts": FACTS_METHOD, "opening": FORWARD}
CALLS |= {"metrics": METRICS_TOKENS}
KEYS = {scope: {"scopes": [scope]} for scope in ("generate", "admin", "model", "metrics")}


def allowed(folder: Path, token: str, *files: str, host: str = "127.0.0.1") -> set[str]:
    """Return the calls that a token may make. `files`: those that the router has, each with its own name as token."""
    settings: dict[str, Any] = {}
    for name in files:
        (folder / name).write_text(f"{name}\n")
        settings[name] = str(folder / name)
    path = write_keys(folder / "keys.toml", **KEYS)
    config = RouterConfig(keys_file=path, host=host, insecure_bind=True, **settings)
    tokens = key_token_files(config, KeyRing(path, 9), {})
    assert FORWARD in OPENING_METHODS
    found = set()
    for call, name in CALLS.items():
        try:
            if tokens[name].accepts(f"Bearer {token}"):
                found.add(call)
        except PermissionDenied:
            pass
    return found


@pytest.mark.parametrize(
    ("scope", "calls"),
    [
        ("generate", {"text", "other"}),
        ("admin", {"other", "admin", "facts"}),
        ("model", {"other", "facts", "opening"}),
        ("metrics", {"other", "metrics"}),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_key_may_call_what_its_scopes_say(scope: str, calls: set[str], host: str, tmp_path: Path) -> None:
    assert allowed(tmp_path, secret_of(scope), host=host) == calls


def test_other_tokens_keep_their_rights_and_get_no_more(tmp_path: Path) -> None:
    usual, admin, opening = "auth_token_file", "admin_token_file", "model_token_file"
    everything = set(CALLS)
    assert allowed(tmp_path, usual, usual) == everything
    assert allowed(tmp_path, usual, usual, host="0.0.0.0") == {"text", "other", "metrics"}
    assert allowed(tmp_path, usual, usual, admin, opening) == {"text", "other", "metrics"}
    assert allowed(tmp_path, admin, usual, admin, opening) == {"admin", "facts"}
    assert allowed(tmp_path, admin, admin, host="0.0.0.0") == {"admin", "facts"}
    assert allowed(tmp_path, opening, usual, admin, opening) == {"facts", "opening"}
