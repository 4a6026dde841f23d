"""Refusal of a schema: the place in it, the keyword, and the reason."""

from __future__ import annotations

ONE_OF = (
    "is supported where no value can satisfy two of its schemas, as types, values of required keys or bounds "
    'show; "x-guidance": {"coerce_one_of": true} takes it as anyOf'
)
# Room for a path in a message.
_MAX_PATH = 120


class Refusal(Exception):
    """Error for a keyword that matters in its place and cannot be honoured. The message is for the caller."""

    def __init__(self, path: str, keyword: str, reason: str) -> None:
        """`path`: JSON pointer of the schema that has the keyword, as `#/properties/name`."""
        super().__init__(describe(path, keyword, reason))


def describe(path: str, keyword: str, reason: str) -> str:
    """Return the message about a keyword; an empty one stands for the schema as a whole."""
    if len(path) > _MAX_PATH:
        path = f"{path[: _MAX_PATH // 2]}…{path[-_MAX_PATH // 2 :]}"
    # A name may contain anything: the message stays one line of text.
    path = "".join(each if each.isprintable() else "…" for each in path)
    return f"at {path}: {f'`{keyword}` ' if keyword else ''}{reason}"


def step(path: str, *names: object) -> str:
    """Return the path of a part."""
    return "/".join((path, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)))
