"""URLs in messages: without what may be a secret."""

from __future__ import annotations

import re


def shown_url(url: str) -> str:
    """Return a URL for messages: without user, password, query and fragment: each may hold a secret.

    A URL that cannot be told apart from its password, for it has characters that it must not have, is its scheme alone.
    """
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    if "@" in rest[len(place) :]:
        return f"{scheme}{mark}…"
    return f"{scheme}{mark}{place.rpartition('@')[2]}"
