"""View of a model's vocabulary for llguidance: the bytes of every token, and the control tokens.

The tokenizer gets one id more than the model has, the end of output. Its bit in a mask says whether the output may end,
for any end-of-sequence ids of a request, and a grammar may still name the model's own control tokens.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from penstock.generation.grammar.plain_tokens import PlainTokens
from penstock.generation.grammar.written_keys import KeyTokens
from penstock.text.token_bytes import TokenBytes
from penstock.text.tokenizer_json import read_tokenizer_json


class GrammarTokenizer:
    """Tokenizer that all grammars share. Immutable. Building it takes about a second for 150 000 tokens."""

    def __init__(self, folder: Path, vocab_size: int, table: TokenBytes | None = None) -> None:
        """`table` is the folder's own, if it is loaded already.

        Raises UnsupportedTokenizer, or the error of reading a broken file.
        """
        self.vocab_size = vocab_size
        table = table or TokenBytes.from_folder(folder, vocab_size)
        self.keys = KeyTokens(table, vocab_size)
        vocabulary = _Vocabulary(folder, vocab_size, table)
        wrapper = TokenizerWrapper(vocabulary)
        self.native = vocabulary.native = LLTokenizer(wrapper)
        self._control = frozenset(vocabulary.special_token_ids) - {vocab_size}
        # LLTokenizer has its own copy now, and keeps the wrapper for its `__call__`.
        wrapper.tokens = vocabulary.tokens = []

    @cached_property
    def plain(self) -> PlainTokens:
        """Sets of tokens that begin and end nothing. The first use takes a second for 150 000 tokens."""
        return PlainTokens(self.keys, self.vocab_size, self._control)


def words_of(vocab_size: int) -> int:
    """Return the number of 32-bit words that hold a bit per id."""
    return -(-vocab_size // 32)


class _Vocabulary:
    """Vocabulary with the attributes that TokenizerWrapper reads."""

    bos_token_id = None
    native: LLTokenizer | None = None

    def __init__(self, folder: Path, vocab_size: int, table: TokenBytes) -> None:
        self.eos_token_id = vocab_size
        # Tokens without rows in the model are left out; one of them may have the number of the end of output.
        control = _control_tokens(folder / "tokenizer.json")
        names = {token_id: text for token_id, text in control.items() if token_id < vocab_size}
        # Control tokens keep their names: a grammar refers to them by name. Other text never matches them.
        self.tokens = [
            names[token_id].encode() if token_id in names else table.bytes_of(token_id, skip_special=False)
            for token_id in range(vocab_size)
        ]
        self.tokens.append(b"<end of output>")
        self.special_token_ids = [*names, vocab_size]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return some ids of a text. llguidance calls this to force a spelling; our grammars switch that off."""
        if self.native is None:
            return []
        return self.native.greedy_tokenize(text.decode() if isinstance(text, bytes) else text)


def _control_tokens(path: Path) -> dict[int, str]:
    """Return added tokens that are not plain text: special tokens, and tokens written like markup (`<think>`)."""
    added = read_tokenizer_json(path).get("added_tokens", ())
    return {entry["id"]: entry["content"] for entry in added if entry.get("special") or _is_markup(entry["content"])}


def _is_markup(text: str) -> bool:
    return len(text) > 2 and text[0] in "<[" and text[-1] in ">]"
