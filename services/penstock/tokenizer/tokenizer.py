"""Encoding and decoding of text, with transformers' results.

There is one TextTokenizer per thread: truncation is a setting of the tokenizer itself, which refuses changes while
others use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Encoding, Tokenizer

from penstock.common.errors import InvalidArgument
from penstock.tokenizer.bundle import TokenizerBundle
from penstock.tokenizer.control_tokens import ControlMarks, content_tokenizer, control_tokens_of, copy_tokenizer

SideName = Literal["left", "right"]
# Most padded positions of one request. In an answer below 4 MiB each takes at least one byte of id, one of mask and
# perhaps two of an offset.
MAX_PADDED_IDS = 2 << 20
# Most control tokens that are reported for one text.
_MOST_SPELLED = 4
# Characters of a control token that a text is searched for.
_FIRST = 2


@dataclass(frozen=True)
class EncodeOptions:
    """Options of transformers' `tokenizer(...)`; None and "" are transformers' defaults."""

    add_special_tokens: bool = True
    truncation: bool | None = None
    max_length: int | None = None
    truncation_side: SideName | None = None
    padding: Literal["", "longest", "max_length"] = ""
    padding_side: SideName | None = None
    return_offsets: bool = False
    # False: a control token that is spelled out stays text.
    parse_special_tokens: bool = True


@dataclass(frozen=True)
class Encoded:
    """Ids; the mask if padded; (start, end) offsets in code points if asked for."""

    ids: list[int]
    attention_mask: list[int] | None = None
    offsets: list[tuple[int, int]] | None = None
    # Control tokens that the text spells out, if they stay text.
    spelled: tuple[str, ...] = ()


class SpelledTokens:
    """Search of a text for the longest of some tokens at each place, one behind the other.

    By their first characters, and then their lengths: Gemma 3 has 6,249 of them, and a regular expression of all takes
    longer to compile than the rest of the control tokens' work.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        """Take the tokens; an empty one is none."""
        self._tokens = frozenset(filter(None, tokens))
        lengths: dict[str, set[int]] = {}
        for token in self._tokens:
            lengths.setdefault(token[:_FIRST], set()).add(len(token))
        self._lengths = {first: sorted(each, reverse=True) for first, each in lengths.items()}
        firsts = sorted(lengths, key=len, reverse=True)
        self._first = re.compile("|".join(map(re.escape, firsts))) if firsts else None

    def find(self, text: str) -> Iterator[str]:
        """Make the tokens that are in a text, in order."""
        place = 0
        while self._first is not None and (match := self._first.search(text, place)) is not None:
            place = match.start() + 1
            firsts = (match[0][:size] for size in range(len(match[0]), 0, -1))
            sizes = (size for first in firsts for size in self._lengths.get(first, ()))
            for token in (text[match.start() : match.start() + size] for size in sizes):
                if token in self._tokens:
                    yield token
                    place = match.start() + len(token)
                    break


class Vocabulary:
    """State shared by all threads: the loaded tokenizer, which never changes again, and its special ids."""

    def __init__(self, bundle: TokenizerBundle, nonce: str | None = None) -> None:
        """Make it. Raises ValueError when control tokens cannot be kept apart from text."""
        self.bundle = bundle
        self.tokenizer = Tokenizer.from_str(bundle.backend)
        self.tokenizer.encode_special_tokens = bundle.split_special_tokens
        self.marks = ControlMarks(control_tokens_of(self.tokenizer), nonce)
        self.content_tokenizer = content_tokenizer(self.tokenizer, self.marks)
        self._spelling = SpelledTokens(self.marks.control_tokens.values())

    def spelled_in(self, text: str) -> tuple[str, ...]:
        """Return the first few control tokens that a text spells out."""
        found: dict[str, None] = {}
        for token in self._spelling.find(text):
            found[token] = None
            if len(found) >= _MOST_SPELLED:
                break
        return tuple(found)

    @property
    def size(self) -> int:
        """Number of entries, added tokens included."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def special_ids(self) -> list[int]:
        """All ids that skip_special_tokens skips, in order.

        tokenizers compares an id's text with the special tokens as they were added. The text of a token added with
        normalized=True is normalized; if that changes it, the token is not skipped, as in transformers.
        """
        added = self.tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        return sorted(index for index in added if self.tokenizer.id_to_token(index) in special)

    def special_id(self, name: str) -> int | None:
        """Return the id of bos_token, pad_token and so on; None when the tokenizer has none."""
        token = self.bundle.special_tokens.get(name)
        index: int | None = self.tokenizer.token_to_id(token) if token is not None else None
        return index

    @property
    def eos_ids(self) -> list[int]:
        """End-of-sequence ids: the tokenizer's first, then those of generation_config.json."""
        own = self.special_id("eos_token")
        found = ([] if own is None else [own]) + self.bundle.generation_eos_token_ids
        return list(dict.fromkeys(found))


def _encoded(run: Callable[..., list[Encoding]], text: str, field: str, *, add_special_tokens: bool) -> Encoding:
    """Encode one text. Raises InvalidArgument where the vocabulary has neither its parts nor an unknown token."""
    try:
        return run([text], add_special_tokens=add_special_tokens)[0]
    except Exception as error:
        # The tokenizers library has no class of its own for its errors.
        if type(error) is not Exception:
            raise
        raise InvalidArgument(field, "has text for which the model's tokenizer has no ids") from error


class TextTokenizer:
    """Encodes and decodes in one thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bundle = vocabulary.bundle
        self._plain = copy_tokenizer(vocabulary.tokenizer)
        self._content = vocabulary.content_tokenizer.copy()
        self._nonce = vocabulary.marks.nonce

    def encode(self, texts: Sequence[str], options: EncodeOptions) -> list[Encoded]:
        """Encode texts, one Encoded each. Raises InvalidArgument for options that the tokenizer cannot honour,
        and for text that it has no ids for."""
        # Texts with marks are refused; without marks the content tokenizer makes no ids of its own.
        tokenizer = self._plain if options.parse_special_tokens else self._content.tokenizer
        if not options.parse_special_tokens and any(self._nonce in text for text in texts):
            raise InvalidArgument("texts", "must not have reserved characters")
        self._set_truncation(tokenizer, options)
        # encode_batch lets other threads run meanwhile, encode does not. One text at a time, since a batch would spread
        # over every core. The fast form leaves out offsets.
        run = tokenizer.encode_batch if options.return_offsets else tokenizer.encode_batch_fast
        encodings = [
            _encoded(run, text, f"texts[{number}]", add_special_tokens=options.add_special_tokens)
            for number, text in enumerate(texts)
        ]
        padded = self._pad(encodings, options)
        return [
            Encoded(
                encoding.ids,
                encoding.attention_mask if padded else None,
                encoding.offsets if options.return_offsets else None,
                () if options.parse_special_tokens else self._vocabulary.spelled_in(text),
            )
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def encode_rendered(self, text: str, marked: str | None) -> list[int]:
        """Encode a rendered chat. With `marked`, only its marks become control ids; without it, `text` is parsed."""
        tokenizer = self._plain if marked is None else self._content.tokenizer
        tokenizer.no_truncation()
        run = tokenizer.encode_batch_fast
        encoding = _encoded(run, text if marked is None else marked, "messages", add_special_tokens=False)
        ids: list[int] = encoding.ids if marked is None else self._content.ids_of(encoding)
        return ids

    def decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """Decode sequences as transformers does. Raises InvalidArgument for ids outside the vocabulary."""
        limit = self._bundle.id_limit
        for number, ids in enumerate(sequences):
            if ids and max(ids) >= limit:
                raise InvalidArgument(f"sequences[{number}].ids", f"ids must be below {limit}")
        texts = [self._plain.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0] for ids in sequences]
        return [clean_up(text) for text in texts] if self._bundle.clean_up_tokenization_spaces else texts

    def _set_truncation(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        wanted = options.truncation
        if wanted is None:  # as in transformers, a max_length alone truncates
            wanted = options.max_length is not None and not options.padding
        length = options.max_length if options.max_length is not None else self._bundle.model_max_length
        if not wanted or length is None:
            tokenizer.no_truncation()
            return
        if options.add_special_tokens and length < tokenizer.num_special_tokens_to_add(False):
            raise InvalidArgument("max_length", "leaves no room for the added special tokens")
        side = options.truncation_side or self._bundle.truncation_side
        tokenizer.enable_truncation(length, stride=0, strategy="longest_first", direction=side)

    def _pad(self, encodings: Sequence[Encoding], options: EncodeOptions) -> bool:
        """Pad in place; False when there was nothing to do."""
        if not options.padding:
            return False
        if options.padding == "longest":
            length: int | None = max((len(encoding.ids) for encoding in encodings), default=0)
        else:
            length = options.max_length if options.max_length is not None else self._bundle.model_max_length
        if length is None:
            return False
        pad_id = self._vocabulary.special_id("pad_token")
        if pad_id is None:
            raise InvalidArgument("padding", "this tokenizer has no padding token")
        most = MAX_PADDED_IDS // 2 if options.return_offsets else MAX_PADDED_IDS
        if len(encodings) * length > most:  # refused before the memory is allocated
            raise InvalidArgument("padding", f"must make at most {most} ids together", reason="TOO_LARGE")
        for encoding in encodings:
            encoding.pad(
                length,
                direction=options.padding_side or self._bundle.padding_side,
                pad_id=pad_id,
                pad_type_id=self._bundle.pad_token_type_id,
                pad_token=self._bundle.special_tokens["pad_token"],
            )
        return True


def clean_up(text: str) -> str:
    """Remove the spaces before punctuation that word-piece decoders leave, like transformers' clean_up_tokenization."""
    for spaced, joined in CLEAN_UPS:
        text = text.replace(spaced, joined)
    return text


CLEAN_UPS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"),
    (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
