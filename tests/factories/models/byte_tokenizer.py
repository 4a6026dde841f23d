"""A tokenizer of single bytes, for tiny checkpoints that read text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def save_byte_tokenizer(folder: Path, texts: Iterable[str] = ()) -> None:
    """Write tokenizer.json: 256 ids, no special token. `texts`: further tokens, which may be written and not read."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [*letters, *("".join(piece for piece, _ in level.pre_tokenize_str(text)) for text in texts)]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
