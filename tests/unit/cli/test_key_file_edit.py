"""Files of keys changed by `penstock keys`: comments and order stay, secrets are not in them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from penstock.cli.keys.file_edit import add_key, new_secret, revoke_key
from penstock.common.credentials import secret_digest
from penstock.common.errors import StartupError
from penstock.router.keys.keys_file import is_secret, read_keys

DIGEST = secret_digest(b"x" * 20).hex()
FILE = f"""# Ours.
[[keys]]
label = "a"  # the first
sha256 = "{DIGEST}"
revoked = false

  [[keys]]
  sha256 = "{DIGEST[::-1]}"
  label = 'b.c'
"""


def test_a_new_key_is_known_by_its_digest_alone(tmp_path: Path) -> None:
    path, secret = tmp_path / "keys.toml", new_secret()
    add_key(str(path), {"label": "a", "scopes": ["generate"], "tokens_per_day": 5, "expires": "2027-01-01"}, secret)
    assert is_secret(secret)
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (key,) = read_keys(str(path), 9)
    assert (key.label, key.digests, key.quotas.tokens_per_day) == ("a", (secret_digest(secret.encode()),), 5)
    assert key.expires is not None


def test_a_key_that_is_there_is_not_added_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    with pytest.raises(StartupError, match="label a is there twice"):
        add_key(str(path), {"label": "a"}, new_secret())
    assert path.read_text() == FILE


@pytest.mark.parametrize("label", ["a", "b.c"])
def test_a_key_is_revoked_and_all_else_stays(label: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    os.chmod(path, 0o640)
    revoke_key(str(path), label)
    assert {key.label: key.revoked for key in read_keys(str(path), 9)} == {"a": label == "a", "b.c": label == "b.c"}
    assert "# Ours." in path.read_text()
    assert "# the first" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    # Once more changes nothing.
    text = path.read_text()
    revoke_key(str(path), label)
    assert path.read_text() == text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_stays_its_owners_where_root_changes_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    os.chmod(path, 0o600)
    os.chown(path, 1234, 5678)
    add_key(str(path), {"label": "new"}, new_secret())
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 5678, 0o600)


def test_a_label_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    with pytest.raises(StartupError, match="no key has the label c"):
        revoke_key(str(path), "c")
    with pytest.raises(StartupError, match="keys-file"):
        revoke_key(str(tmp_path / "none"), "a")


def test_a_table_that_cannot_be_changed_safely_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    text = f'keys = [{{label = "a", sha256 = "{DIGEST}"}}]\n'
    path.write_text(text)
    with pytest.raises(StartupError, match="by hand"):
        revoke_key(str(path), "a")
    assert path.read_text() == text
