"""A text as documents of token ids, which are read each by itself."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from penstock.common.errors import StartupError

_FILE = "tokenizer.json"


def documents_of(folder: Path, text: str, tokens: int, context: int) -> list[list[int]]:
    """Return the first `tokens` tokens of a text in documents of at most `context`. Each begins with the tokens that
    begin a text, where the tokenizer adds some. Raises StartupError without a tokenizer, or a text of two tokens."""
    if not (folder / _FILE).is_file():
        raise StartupError(f"MODEL {folder} has no {_FILE}: the text cannot become tokens", flag="MODEL")
    tokenizer = Tokenizer.from_file(str(folder / _FILE))
    first = tokenizer.encode("").ids
    step = context - len(first)
    if step < 1:
        raise StartupError(
            f"--context {context}: each document begins with {len(first)} tokens of the tokenizer's own",
            flag="--context",
        )
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:tokens]
    found = [first + ids[at : at + step] for at in range(0, len(ids), step)]
    # The first token of a document is read, and not expected.
    found = [document for document in found if len(document) > 1]
    if not found:
        raise StartupError(
            f"--text-file has {len(ids)} tokens: too few to expect one after another", flag="--text-file"
        )
    return found
