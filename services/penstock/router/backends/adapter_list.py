"""Adapters that one backend has, as it told: by its list, and by answers that came since."""

from __future__ import annotations

from penstock.v1 import admin_pb2

# Changes that are remembered until a list has them; an older one is in every list by then.
_MOST_CHANGES = 64


class AdapterList:
    """Names and paths of a backend's adapters. A version is the process's count of changes."""

    def __init__(self) -> None:
        # Name -> path below the backend's root; empty: not known.
        self._paths: dict[str, str] = {}
        # That of the last list, and changes that were told one by one since: version, name, path or None.
        self._version = 0
        self._changes: list[tuple[int, str, str | None]] = []
        # True once the process of this connection has told its adapters, or did not when it was asked.
        self.is_known = False

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    @property
    def names(self) -> tuple[str, ...]:
        """Names, in the backend's order."""
        return tuple(self._paths)

    def path_of(self, name: str) -> str:
        """Return the path below the backend's root; empty when that is not known."""
        return self._paths.get(name, "")

    def connect(self) -> None:
        """Begin anew: the process may be another one. Until it tells its adapters, they are as before."""
        self._version, self.is_known = 0, False
        self._changes.clear()

    def note_version(self, version: int) -> bool:
        """Take the version of a report; True when the list must be asked for."""
        if not version and not self.is_known:
            # It never had any.
            self._paths.clear()
            self.is_known = True
        return version > self._version

    def give_up(self) -> None:
        """Go on with what was known: the process did not tell its adapters when it was asked."""
        self.is_known = True

    def take(self, found: admin_pb2.ListAdaptersResponse) -> None:
        """Take the whole list, and what was told since it was made."""
        self._paths = {one.name: one.path for one in found.adapters}
        self._version = max(self._version, found.version)
        self._changes = [change for change in self._changes if change[0] > found.version]
        for _, name, path in self._changes:
            self._apply(name, path)
        self.is_known = True

    def add(self, adapter: admin_pb2.Adapter, version: int) -> None:
        """Add an adapter that was loaded. `version`: after that; 0 when it is not known."""
        self._change(version, adapter.name, adapter.path)

    def remove(self, name: str, version: int) -> None:
        """Remove an adapter that is not there. `version`: since then; 0 when it is not known.

        In that case `note_version` asks for the list: the name may be there again already.
        """
        self._change(version, name, None)
        if not version:
            # Also what a process before this one told: its versions may be higher.
            self._changes = [change for change in self._changes if change[1] != name]
            self._version = 0

    def _change(self, version: int, name: str, path: str | None) -> None:
        self._apply(name, path)
        if version:
            self._changes = [*self._changes, (version, name, path)][-_MOST_CHANGES:]

    def _apply(self, name: str, path: str | None) -> None:
        if path is None:
            self._paths.pop(name, None)
        else:
            self._paths[name] = path
