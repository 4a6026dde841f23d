"""Changes of a file of keys as text, so that comments and order stay. A changed file is checked, then written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.common.credentials import secret_digest
from penstock.common.errors import StartupError
from penstock.router.keys.api_key import ApiKey
from penstock.router.keys.keys_file import FLAG, parse_keys

_SECRET_BYTES = 32
_HEAD = "# Keys of callers: docs/guide/keys.md. Secrets are not here, only their SHA-256.\n"
# A file that is edited by hand may have any number.
_MOST_KEYS = 1 << 20
Value = str | int | bool | Sequence[str]


def new_secret() -> str:
    """Make a secret that nobody can guess."""
    return f"sk-{secrets.token_urlsafe(_SECRET_BYTES)}"


def add_key(path: str, fields: Mapping[str, Value], secret: str) -> None:
    """Append a key, known by the digest of its secret. Raises StartupError naming --keys-file."""
    text = _text(path, may_be_new=True) or _HEAD
    lines = {**fields, "sha256": secret_digest(secret.encode()).hex()}
    table = "\n".join(["[[keys]]", *(f"{name} = {_toml(value)}" for name, value in lines.items())])
    changed = f"{text.rstrip()}\n\n{table}\n"
    parse_keys(changed, path, _MOST_KEYS)
    _write(path, changed)


def revoke_key(path: str, label: str) -> None:
    """Set `revoked = true` for a key. Raises StartupError naming --keys-file."""
    text = _text(path)
    before = parse_keys(text, path, _MOST_KEYS)
    if label not in [key.label for key in before]:
        raise StartupError(f"{FLAG} {path}: no key has the label {label}", flag=FLAG)
    # The label's own line is the one place that is known to be in the table of the key.
    line = re.compile(rf"^([ \t]*)(['\"]?label['\"]?[ \t]*=[ \t]*['\"]{re.escape(label)}['\"].*)$", re.MULTILINE)
    changed = line.sub(r"\1\2\n\1revoked = true", _without_false(text, before, label))
    wanted = [replace(key, revoked=True) if key.label == label else key for key in before]
    try:
        is_right = list(parse_keys(changed, path, _MOST_KEYS)) == wanted
    except StartupError:
        is_right = False
    if not is_right and not any(key.label == label and key.revoked for key in before):
        raise StartupError(f"{FLAG} {path}: set `revoked = true` for {label} by hand", flag=FLAG)
    if is_right:
        _write(path, changed)


def _without_false(text: str, keys: Sequence[ApiKey], label: str) -> str:
    """Remove `revoked = false` from the table of a key."""
    tables = re.split(r"(?m)^(?=[ \t]*\[\[)", text)
    if len(tables) < len(keys):
        return text
    place = [key.label for key in keys].index(label) + len(tables) - len(keys)
    tables[place] = re.sub(r"(?m)^[ \t]*revoked[ \t]*=[ \t]*false[^\n]*\n", "", tables[place])
    return "".join(tables)


def _text(path: str, *, may_be_new: bool = False) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if may_be_new:
            return ""
        raise StartupError(f"{FLAG} {path}: {error.strerror}", flag=FLAG) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise StartupError(f"{FLAG} {path}: {why}", flag=FLAG) from error


def _write(path: str, text: str) -> None:
    """Replace the file at once: a router never reads a part of it. A new one is its owner's alone."""
    target = Path(path).expanduser()
    # The file itself, where the path is a link to it.
    target = target.resolve()
    try:
        before = target.stat() if target.exists() else None
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            if before is not None:
                # The router reads it as another user than root, who may write it. Only root may give files away.
                with contextlib.suppress(PermissionError):
                    os.chown(name, before.st_uid, before.st_gid)
            os.chmod(name, 0o600 if before is None else before.st_mode & 0o777)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise StartupError(f"{FLAG} {path}: {error.strerror}", flag=FLAG) from error


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    # A text of JSON without characters beyond ASCII is one of TOML; lists of texts as well.
    return json.dumps(value if isinstance(value, str) else list(value))
