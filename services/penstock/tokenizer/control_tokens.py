"""Control tokens that no request can spell.

Every control token gets a *mark*: a short run of private-use characters with 64 random bits, made when the process
starts. The template's own control tokens are replaced with their marks before it is rendered, and a second tokenizer
knows the control tokens only by their marks. So a control id can only come from the template, whatever it does with a
message: trim it, upper-case it, split it or join two of them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.models import BPE, Model

_FIRST_INDEX = 0xF0000
_MAX_MARKS = 0xFFFE
# Roles from which a template may build a control token, as in '<|' + message.role + '|>'.
TRUSTED_ROLES = (
    "system", "user", "assistant", "tool", "developer", "function", "observation", "ipython", "model", "environment",
    "document", "documents", "context", "tools",
)  # fmt: skip


class ControlMarks:
    """Marks of a fixed list of literals: the control tokens first, then the parts from which templates build them."""

    def __init__(self, control_tokens: dict[int, str], nonce: str | None = None) -> None:
        """Make marks for `control_tokens` by id. A nonce is four private-use characters; tests pass their own."""
        self.control_tokens = dict(control_tokens)
        self.nonce = nonce or "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in range(4))
        self._literals: list[str] = []
        self._index: dict[str, int] = {}
        for token in control_tokens.values():
            self.add(token)
        self._mark = re.compile(f"{self.nonce}(.)", re.DOTALL)

    def add(self, literal: str) -> str:
        """Return the mark of `literal`, made on first use. Raises ValueError past 65534 of them."""
        if literal not in self._index:
            if len(self._literals) >= _MAX_MARKS:
                raise ValueError("too many control tokens")
            self._index[literal] = len(self._literals)
            self._literals.append(literal)
        return self.nonce + chr(_FIRST_INDEX + self._index[literal])

    def unmark(self, text: str) -> str:
        """Return `text` with every mark replaced by its literal."""
        if self.nonce not in text:
            return text
        return self._mark.sub(lambda match: self._literals[ord(match[1]) - _FIRST_INDEX], text)

    def mark_value(self, value: str) -> str:
        """Return the mark of a whole control token, such as bos_token; other text is returned unchanged."""
        return self.add(value) if value in self._index else value


def is_control(token: AddedToken) -> bool:
    """True for a special token of the vocabulary. White space is text even if a vocabulary calls it special."""
    return bool(token.special and not token.content.isspace())


def control_tokens_of(tokenizer: Tokenizer) -> dict[int, str]:
    """Return control tokens by id, in the order of ids."""
    added = tokenizer.get_added_tokens_decoder()
    return {index: added[index].content for index in sorted(added) if is_control(added[index])}


def copy_tokenizer(
    base: Tokenizer, *, model: Any = None, rename: Callable[[str], str] = str, without: Collection[str] = ()
) -> Tokenizer:
    """Make a separate tokenizer that shares `base`'s vocabulary and merges, which nothing changes after loading.

    `rename` gives each control token another text; those in `without` are left out. Raises ValueError when an added
    token would change its id.
    """
    copy = Tokenizer(base.model if model is None else model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        value = getattr(base, part)
        if value is not None:
            setattr(copy, part, value)
    added = [
        (index, rename(token.content) if is_control(token) else token.content, token)
        for index, token in sorted(base.get_added_tokens_decoder().items())
        if token.content not in without
    ]
    # In one call: each call rebuilds the matcher of all added tokens, and Gemma 3 has 6,384.
    copy.add_tokens([_with_text(token, content) for _, content, token in added])
    for index, content, _ in added:
        if copy.token_to_id(content) != index:
            raise ValueError(f"added token {index} cannot be given its id again")
    copy.encode_special_tokens = base.encode_special_tokens
    return copy


def _with_text(token: AddedToken, content: str) -> AddedToken:
    """Return a token like `token` with the text `content`."""
    if token.content == content:
        return token
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


@dataclass(frozen=True)
class ContentTokenizer:
    """A tokenizer that knows control tokens only by their marks, and the control tokens' own ids."""

    tokenizer: Tokenizer
    # Ids of marks here -> ids of their control tokens. Empty if both are the same.
    own_ids: Mapping[int, int]

    def copy(self) -> ContentTokenizer:
        """Return a separate one for another thread."""
        return ContentTokenizer(copy_tokenizer(self.tokenizer), self.own_ids)

    def ids_of(self, encoding: Encoding) -> list[int]:
        """Ids of a text that may have marks."""
        ids: list[int] = encoding.ids
        own = self.own_ids
        return [own.get(index, index) for index in ids] if own else ids


def content_tokenizer(base: Tokenizer, marks: ControlMarks) -> ContentTokenizer:
    """Make a copy of `base` that knows its control tokens only by their marks; the ids are the same.

    Raises ValueError when the vocabulary does not allow it.
    """
    inside = {token for token in marks.control_tokens.values() if base.model.token_to_id(token) is not None}
    found = None if _may_spell(base.model, inside) else _beside_model(base, marks, inside)
    if found is None:
        model = _renamed_model(base, inside, marks)
        found = ContentTokenizer(copy_tokenizer(base, model=model, rename=marks.add), {})
    content = found.tokenizer
    # Even a tokenizer that never parses special tokens must do so here: their texts are marks.
    content.encode_special_tokens = False
    # In one call: some vocabularies have thousands.
    controls = list(marks.control_tokens.items())
    encoded = content.encode_batch([marks.add(token) for _, token in controls], add_special_tokens=False)
    for (index, _), encoding in zip(controls, encoded, strict=True):
        if index not in found.ids_of(encoding):
            raise ValueError(f"control token {index} cannot be kept apart from text")
    return found


def _may_spell(model: Model, tokens: Collection[str]) -> bool:
    """False when no text makes the model itself emit one of `tokens`, which are entries of its vocabulary.

    BPE merges the characters of a token in the same order inside a text as alone: a token that it makes anywhere, it
    also makes from its characters alone. Exceptions are entries that depend on their place in a word (prefixes,
    suffixes), dropout, and entries that stand for bytes. Gemma 3 has no merges that make a control token; building
    another model without such merges would take a good part of its start.
    """
    if not tokens:
        return False
    if not isinstance(model, BPE) or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return True
    try:
        return any(
            "<0x" in token or model.token_to_id(token) in [piece.id for piece in model.tokenize(token)]
            for token in tokens
        )
    except Exception:
        # tokenizers raises no other kind, such as for a character without an entry when unk_token has none.
        return True


def _beside_model(base: Tokenizer, marks: ControlMarks, inside: Collection[str]) -> ContentTokenizer | None:
    """Return a tokenizer with `base`'s own model; marks of the entries `inside` get ids after all others.

    None if `base` has such ids itself.
    """
    content = copy_tokenizer(base, rename=marks.add, without=inside)
    kept = [pair for pair in sorted(base.get_added_tokens_decoder().items()) if pair[1].content in inside]
    if kept:
        content.add_tokens([_with_text(token, marks.add(token.content)) for _, token in kept])
    own_ids: dict[int, int] = {}
    for index, token in kept:
        mark = content.token_to_id(marks.add(token.content))
        if mark is None or base.id_to_token(mark) is not None:
            return None
        own_ids[mark] = index
    return ContentTokenizer(content, own_ids)


def _renamed_model(base: Tokenizer, tokens: Collection[str], marks: ControlMarks) -> Any:
    """Return `base`'s model with the entries `tokens` renamed to their marks, so that no text can spell them."""
    description = json.loads(base.to_str())
    model = description["model"]

    def rename(entry: str) -> str:
        return marks.add(entry) if entry in tokens else entry

    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {rename(entry): index for entry, index in vocabulary.items()}
    else:
        model["vocab"] = [[rename(entry), score] for entry, score in vocabulary]
    if model.get("unk_token"):
        model["unk_token"] = rename(model["unk_token"])
    if "merges" in model:
        # The result of a merge has a prefix only at its start.
        skipped = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, tokens, skipped)]
    bare = {"version": "1.0", "added_tokens": [], "model": model}
    return Tokenizer.from_str(json.dumps(bare)).model


def _makes(pair: str | list[str], tokens: Collection[str], skipped: int) -> bool:
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return left in tokens or right in tokens or left + right[skipped:] in tokens
