"""File of keys: what it may say, and what it must not."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from factories.servers.key_files import keys_text, secret_of
from penstock.common.credentials import secret_digest
from penstock.common.errors import StartupError, Unauthenticated
from penstock.router.config import RouterConfig
from penstock.router.keys.api_key import KeyScope
from penstock.router.keys.key_ring import KeyRing
from penstock.router.keys.keys_file import parse_keys

HEX = secret_digest(b"x" * 20).hex()
GOOD = f"[[keys]]\nlabel = 'a'\nsha256 = '{HEX}'\n"


def test_everything_of_a_key() -> None:
    (key,) = parse_keys(
        GOOD + "tenant='t'\nscopes=['jobs']\nmodels=['m']\nadapters=[]\nrequests_per_minute=1\ntokens_per_minute=2\n"
        "concurrent_requests=3\ntokens_per_day=4_000\nexpires=2027-01-01\nrevoked=true\n", "f", 9,
    )  # fmt: skip
    assert (key.label, key.tenant, key.scopes) == ("a", "t", {KeyScope.JOBS})
    assert (key.models, key.adapters) == ({"m"}, frozenset())
    assert key.may_use("m")
    assert not key.may_use("m", "adapter")
    assert not key.may_use("n")
    assert (key.quotas.requests_per_minute, key.quotas.tokens_per_minute) == (1, 2)
    assert (key.quotas.concurrent_requests, key.quotas.tokens_per_day) == (3, 4000)
    assert key.expires == datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    assert key.revoked


def test_what_is_not_said_has_no_bound() -> None:
    (key,) = parse_keys(GOOD, "f", 9)
    assert key.scopes == {KeyScope.GENERATE, KeyScope.EMBED}
    assert key.may_use("any", "adapter")
    assert key.expires is key.quotas.tokens_per_day is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[keys]]\nsha256='" + HEX + "'\n", r"keys\[0\].label: must be 1 to 64"),
        ("[[keys]]\nlabel='a b'\n", "label: must be"),
        ("[[keys]]\nlabel='a'\n", "sha256: or `secret` must be set"),
        ("[[keys]]\nlabel='a'\nsha256='abc'\n", "sha256: must be 64 hex digits"),
        ("[[keys]]\nlabel='a'\nsecret='hunter2'\n", "secret: must be 16 to 512"),
        ("[[keys]]\nlabel='a'\nsecret=['hunter2 with blanks']\n", "secret: must be 16 to 512"),
        (GOOD + "scopes=['everything']\n", "scopes: must be some of generate, embed, jobs, admin, model, metrics"),
        (GOOD + "models=['a b']\n", "models: must be names"),
        (GOOD + "tokens_per_day=0\n", "tokens_per_day: must be a whole number"),
        (GOOD + "tokens_per_day=true\n", "tokens_per_day: must be a whole number"),
        (GOOD + "expires='soon'\n", "expires: must be a time"),
        (GOOD + "tokens_per_hour=5\n", "tokens_per_hour: is unknown"),
        (GOOD + GOOD, "the label a is there twice"),
        (GOOD + GOOD.replace("'a'", "'b'"), "a and b have the same secret"),
        ("default = 'a'\n" + GOOD, "default: is unknown"),
        ("keys = 5\n", r"must be tables"),
        ("[[keys]\nsecret='hunter2'", "is not TOML"),
        (GOOD + GOOD.replace("'a'", "'b'") + GOOD.replace("'a'", "'c'"), "are 3, and --max-keys allows 2"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_by_the_field_and_without_secrets(text: str, told: str) -> None:
    with pytest.raises(StartupError, match=told) as caught:
        parse_keys(text, "keys.toml", 2)
    assert caught.value.flag == "--keys-file"
    assert "hunter2" not in caught.value.message


def ring_of(path: Path, text: str, now: float = 0.0) -> KeyRing:
    path.write_text(text)
    return KeyRing(str(path), 9, clock=lambda: now)


def test_two_secrets_stand_for_a_key_while_one_replaces_the_other(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "k", "[[keys]]\nlabel='a'\nsecret=['the-old-secret-of-a','the-new-secret-of-a']\n")
    for secret in ("the-old-secret-of-a", "the-new-secret-of-a"):
        assert ring.find(f"Bearer {secret}") is ring.keys[0]
    assert ring.find("Bearer the-secret-of-nobody") is None
    assert ring.find(None) is ring.find("Basic x") is ring.find("Bearer ") is None


def test_processes_with_a_ledger_each_are_refused() -> None:
    with pytest.raises(StartupError, match="--ledger"):
        RouterConfig(keys_file="keys.toml", processes=2).validate()
    RouterConfig(keys_file="keys.toml", processes=2, ledger="ledger").validate()


def test_a_digest_is_no_secret(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "k", GOOD)
    assert ring.find(f"Bearer {HEX}") is None
    assert ring.find(b"bearer " + b"x" * 20) is ring.keys[0]


def test_a_key_expires(tmp_path: Path) -> None:
    text = keys_text({"a": {"expires": "1970-01-01T00:01:00Z"}})
    authorization = f"Bearer {secret_of('a')}"
    assert ring_of(tmp_path / "k", text, 59.0).find(authorization) is not None
    with pytest.raises(Unauthenticated, match="expired"):
        ring_of(tmp_path / "k", text, 60.0).find(authorization)


def test_a_file_is_read_when_it_changes_and_kept_while_it_is_wrong_or_away(tmp_path: Path) -> None:
    path = tmp_path / "k"
    ring = ring_of(path, keys_text({"a": {}}))
    assert not ring.refresh()
    path.write_text("[[keys]]\n")
    assert not ring.refresh()
    path.unlink()
    assert not ring.refresh()
    assert [key.label for key in ring.keys] == ["a"]
    path.write_text(keys_text({"b": {}}))
    assert ring.refresh()
    assert [key.label for key in ring.keys] == ["b"]
