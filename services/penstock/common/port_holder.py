"""Process that listens on a port of this machine, by name: for the error of one that wanted the port, too."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
# State of a socket in /proc/net/tcp.
_LISTENS = "0A"
# How `penstock` is run as a module.
_MODULES = ("penstock", "penstock.cli.main")
# Words of its command that are shown: no flag, which may hold a secret.
_WORDS = 2


def port_holder(port: int) -> str | None:
    """Return the name of the process that listens, `nginx (process 123)`; None where it is not found.

    Linux only. Processes of other users are found by root alone.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    if not sockets:
        return None
    for folder in sorted((one for one in _entries(_PROC) if one.name.isdigit()), key=lambda one: int(one.name)):
        if any(_target(descriptor) in sockets for descriptor in _entries(folder / "fd")):
            return f"{_name(folder)} (process {folder.name})"
    return None


def _listening(port: int) -> list[str]:
    """List the inodes of sockets that listen on the port, at any address."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in _read(_PROC / "net" / table).splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                found.append(words[9])
    return found


def _name(folder: Path) -> str:
    """Return the name of a process; of Penstock's the command."""
    arguments = _read(folder / "cmdline").split("\0")
    for index, argument in enumerate(arguments):
        if argument in _MODULES or Path(argument).name == "penstock":
            words = arguments[index + 1 : index + 1 + _WORDS]
            plain = next((number for number, word in enumerate(words) if word.startswith("-")), _WORDS)
            return " ".join(["penstock", *filter(None, words[:plain])])
    return _read(folder / "comm").strip() or "a program"


def _entries(folder: Path) -> list[Path]:
    """List a folder of /proc: a process may end meanwhile, or be another user's."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
