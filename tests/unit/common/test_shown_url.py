"""Addresses as messages show them."""

from __future__ import annotations

import pytest
from penstock.common.shown_url import shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host:5432/x", "postgresql://host:5432/x"),
        ("redis://host:6379/0?password=secret", "redis://host:6379/0"),
        ("redis://:se@cret@host/0#secret", "redis://host/0"),
        # Characters that a password must not have, but may.
        ("redis://:se/cret@host/0", "redis://host/0"),
        ("redis://:se?cret@host/0", "redis://…"),
        ("postgresql://host/x?password=se@cret", "postgresql://…"),
        ("http://me:secret@[::1]:80/v1", "http://[::1]:80/v1"),
        ("me:secret@host:80", "host:80"),
        ("host:80", "host:80"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert shown_url(url) == shown
    assert "cret" not in shown
