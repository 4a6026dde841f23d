"""Calls that count for another key: who may make them, and the rights that hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factories.servers.key_files import bearer, secret_of, write_keys
from penstock.common.acting_for import ACTING_FOR_KEY
from penstock.common.credentials import TokenFile, secret_digest
from penstock.common.errors import InvalidArgument, PenstockError, PermissionDenied, Unauthenticated
from penstock.router.key_options import KeyOptions
from penstock.router.keys.key_desk import KeyDesk
from prometheus_client import CollectorRegistry

KEYS: dict[str, dict[str, Any]] = {
    "owner": {"scopes": ["generate"]},
    "gateway": {"scopes": ["delegate"]},
    "plain": {"scopes": ["generate", "admin"]},
    "old": {"expires": "2020-01-01"},
    "gone": {"revoked": True},
}
SERVICE = "a-service-of-ours"


@pytest.fixture
def desk(tmp_path: Path) -> KeyDesk:
    (tmp_path / "services").write_text(f"{SERVICE}\n")
    options = KeyOptions(keys_file=write_keys(tmp_path / "keys.toml", **KEYS))
    return KeyDesk(options, CollectorRegistry(), TokenFile(str(tmp_path / "services"), "--auth-token-file"))


def call(token: str, secret: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with a token that counts for the key of a secret."""
    return (("authorization", f"Bearer {token}"), (ACTING_FOR_KEY, secret_digest(secret.encode()).hex()))


def refusal(desk: KeyDesk, token: str, secret: str, method: str = "Generate") -> PenstockError:
    with pytest.raises(PenstockError) as caught:
        desk.find(call(token, secret), method)
    return caught.value


@pytest.mark.parametrize("token", [SERVICE, secret_of("gateway"), secret_of("owner")])
def test_services_a_delegate_and_the_key_itself_act_for_a_key(desk: KeyDesk, token: str) -> None:
    found = desk.find(call(token, secret_of("owner")), "Chat")
    assert found is not None
    assert found.label == "owner"


def test_no_other_key_acts_for_a_key(desk: KeyDesk) -> None:
    error = refusal(desk, secret_of("plain"), secret_of("owner"))
    assert (type(error), error.reason, error.metadata) == (PermissionDenied, "SCOPE_MISSING", {"scope": "delegate"})


def test_the_rights_of_the_key_hold_and_not_those_of_the_caller(desk: KeyDesk) -> None:
    error = refusal(desk, SERVICE, secret_of("owner"), "Embed")
    assert (type(error), error.reason) == (PermissionDenied, "SCOPE_MISSING")
    # A gateway must not take it for a fault of its own key.
    assert error.metadata == {"scope": "embed", "key": "owner"}
    assert desk.find(call(SERVICE, secret_of("owner")), "Tokenize") is not None


@pytest.mark.parametrize(
    ("secret", "reason"),
    [(secret_of("old"), "KEY_EXPIRED"), (secret_of("gone"), "KEY_REVOKED"), (secret_of("nobody"), "KEY_GONE")],
)
def test_a_key_that_is_not_valid_any_more_is_told(desk: KeyDesk, secret: str, reason: str) -> None:
    error = refusal(desk, SERVICE, secret)
    assert (type(error), error.reason) == (PermissionDenied, reason)


def test_a_token_without_a_key_counts_for_nobody(desk: KeyDesk) -> None:
    assert desk.find(call(secret_of("gateway"), SERVICE), "Generate") is None


def test_without_a_valid_token_nothing_is_found(desk: KeyDesk) -> None:
    with pytest.raises(Unauthenticated):
        desk.find(call("sk-of-nobody-at-all", secret_of("owner")), "Generate")


def test_what_is_no_digest_is_refused_by_its_name(desk: KeyDesk) -> None:
    with pytest.raises(InvalidArgument, match=ACTING_FOR_KEY):
        desk.find((*bearer("gateway"), (ACTING_FOR_KEY, "owner")), "Generate")
