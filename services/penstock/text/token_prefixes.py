"""Which tokens begin with another token's text: for token healing."""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from penstock.text.token_bytes import TokenBytes


class TokenPrefixes:
    """The tokens of a table sorted by their bytes (4 bytes a token), so that those with a common beginning are
    neighbours. Immutable once made, which takes a fraction of a second for a large vocabulary."""

    def __init__(self, table: TokenBytes) -> None:
        """Only whole text takes part: no special tokens, and none that begin or end inside a character."""
        self._bytes_of = table.bytes_of
        whole = array("I", (token_id for token_id, data in table.texts() if _is_text(data)))
        self._ids = _sorted(np.frombuffer(whole, dtype=np.uint32), table)

    def extensions(self, token_id: int) -> frozenset[int]:
        """Ids whose text begins with that of `token_id`, itself included; none where that is no whole text."""
        beginning = self._bytes_of(token_id)
        if not _is_text(beginning):
            return frozenset()
        # The next string that does not begin so: no byte of UTF-8 is 0xff.
        end = beginning[:-1] + bytes([beginning[-1] + 1])
        first = bisect_left(self._ids, beginning, key=self._bytes_of)
        return frozenset(self._ids[first : bisect_left(self._ids, end, lo=first, key=self._bytes_of)])

    def added_text(self, token_id: int, extension: int) -> str:
        """What the text of `extension`, one of the extensions of `token_id`, has beyond that of `token_id`."""
        return self._bytes_of(extension)[len(self._bytes_of(token_id)) :].decode()


def _sorted(ids: npt.NDArray[np.uint32], table: TokenBytes) -> array[int]:
    """By their bytes, without an object for each of them: those would take megabytes of the process, once and for all.

    The first eight bytes as one number decide nearly everything."""
    first_bytes = table.first_bytes(ids)
    order = np.argsort(first_bytes, kind="stable")
    result = array("I", ids[order].tobytes())
    is_tie = np.diff(first_bytes[order]) == 0
    # Where runs of equal numbers begin, and end.
    edges = np.flatnonzero(np.diff(is_tie, prepend=False, append=False)).reshape(-1, 2)
    for first, last in edges.tolist():
        result[first : last + 1] = array("I", sorted(result[first : last + 1], key=table.bytes_of))
    return result


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False
