"""Names of models in an error: a caller that asks for another one learns the existing names."""

from __future__ import annotations

from collections.abc import Iterable

# Names that one message lists.
_MOST = 16


def those_there_are(names: Iterable[str]) -> str:
    """Return a list of names as text, each once; a long list ends with the number of the rest."""
    known = list(dict.fromkeys(name for name in names if name))
    if not known:
        return "none is served now"
    more = f" and {len(known) - _MOST} more" if len(known) > _MOST else ""
    return f"there {'is' if len(known) == 1 else 'are'}: {', '.join(known[:_MOST])}{more}"
