"""Ids that stand for images, videos and sounds in a prompt. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaIds:
    """Ids without a meaning of their own: a token with one of `ids` enters the layers as one with `read_as` would,
    where nothing was put in its place. The head may draw them all the same."""

    ids: tuple[int, ...]
    read_as: int
