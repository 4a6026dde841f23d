"""A conversation as the clients and Generator take it."""

from __future__ import annotations


def user(text: str) -> list[dict[str, str]]:
    """Return the conversation of one message of a user."""
    return [{"role": "user", "content": text}]
