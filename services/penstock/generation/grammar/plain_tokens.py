"""Tokens of a vocabulary that begin and end nothing: words and digits, with blanks before them or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.generation.grammar.written_keys import KeyTokens

if TYPE_CHECKING:
    import numpy.typing as npt

# Words of a mask with tokens, beyond which a text is free, mostly; tokens that are tried there first.
_MANY, _FURTHEST = 512, 4096
# What begins or ends parts of JSON, of tags and of lines.
_STRUCTURE = b"\"{}[]<>()\\,:;|`=/'\n\r\t"
# Values that are whole.
_EMPTY = (b'""', b"[]", b"{}")
# How far a token goes: what ends a tag, words, empty values, and all that begins no further part.
_TAG_END, _WORD, _EMPTY_VALUE, _PART = 4000, 3000, 2000, 1000


class PlainTokens:
    """Sets of tokens, with a bit for each id as in a mask. Immutable."""

    def __init__(self, keys: KeyTokens, vocab_size: int, control: frozenset[int]) -> None:
        """`control`: control tokens, which are no text. O(vocabulary)."""
        others = {*keys.ids_with(_STRUCTURE), *control}
        # The end of output has a bit, too.
        is_plain = np.ones((vocab_size // 32 + 1) * 32, dtype=bool)
        is_plain[vocab_size:] = False
        is_plain[list(others)] = False
        # Blanks alone lead nowhere: a model would write them to the last token.
        is_plain[[one for one in keys.ids_with(b" ") if not keys.bytes_of(one).strip()]] = False
        self.words_W = np.packbits(is_plain, bitorder="little").view(np.uint32)
        # (V) how far a token goes towards the end of a text of some length: words first. 0: it is no text.
        self.progress_V = np.array([self._progress(keys.bytes_of(one)) for one in range(vocab_size)], dtype=np.int32)
        self.progress_V[list(control)] = 0
        self._furthest: list[int] = np.argsort(-self.progress_V, kind="stable")[:_FURTHEST].tolist()

    def furthest(self, mask_W: npt.NDArray[np.uint32]) -> int | None:
        """Return the token of a mask that goes furthest; None: the mask has no text."""
        words_W = mask_W[: len(self.words_W)]
        places_P = np.flatnonzero(words_W)
        if len(places_P) > _MANY:
            for one in self._furthest:
                if int(words_W[one >> 5]) >> (one & 31) & 1:
                    return one
            # Not a free text, but a pattern that many short tokens of a large vocabulary fit.
        bits_P32 = np.unpackbits(words_W[places_P].view(np.uint8), bitorder="little").reshape(-1, 32)
        ids_N = (places_P[:, None] * 32 + np.arange(32))[bits_P32 == 1]
        ids_N = ids_N[ids_N < len(self.progress_V)]
        if not len(ids_N) or not self.progress_V[ids_N].any():
            return None
        return int(ids_N[self.progress_V[ids_N].argmax()])

    @staticmethod
    def _progress(text: bytes) -> int:
        if b"\n" in text:
            # What stands on the next line may be another part.
            return 1
        if b"," in text:
            # So may what follows a comma: an object could go on until it has the most keys.
            return 1 + len(text)
        # A repeated character, as of a ruled line, is no word. A tag that ends something goes before one that begins.
        is_word = text.isalnum() and len(set(text)) * 2 > len(text)
        is_end, is_empty = text.startswith((b"/", b"</")), text.strip() in _EMPTY
        return len(text) + (_TAG_END if is_end else _WORD if is_word else _EMPTY_VALUE if is_empty else _PART)
