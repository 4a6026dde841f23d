"""Requests for a path without a variable part skip the table of routes; all others do not."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.gateway.fixed_paths import AsgiApp, FixedPaths


def named(name: str, calls: list[str]) -> AsgiApp:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(name)

    return app


@pytest.mark.parametrize(
    ("method", "path", "app"),
    [
        ("POST", "/v1/files", "create"),
        ("GET", "/v1/files", "list"),
        ("DELETE", "/v1/files", "others"),
        ("GET", "/v1/files/", "others"),
        ("GET", "/v1/files/one", "others"),
    ],
)
async def test_method_and_path_decide(method: str, path: str, app: str) -> None:
    calls: list[str] = []
    fixed = {("POST", "/v1/files"): named("create", calls), ("GET", "/v1/files"): named("list", calls)}
    await FixedPaths(fixed, named("others", calls))({"method": method, "path": path}, None, None)
    assert calls == [app]
