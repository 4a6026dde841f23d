"""Encoding of the texts of Score, Embed and DetectWatermark.

A prompt and its continuation are encoded together, as lm-evaluation-harness does. White space at the prompt's end moves
to the continuation, since a token begins with its space. The whole text is encoded; the prompt is the ids that it
shares with the start of the prompt's own encoding. So the scored ids are always those of the whole text. If the
tokenizer joins characters across the boundary, the joint token counts as continuation (the harness cuts by the number
of ids and would lose it). Special tokens that the tokenizer puts at the front come first. A prompt without any id
becomes the beginning-of-sequence id, or else the end-of-sequence id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.common.errors import Internal, InvalidArgument
from penstock.router.config import RouterConfig
from penstock.router.tokenizer.tokenizer_link import TokenizerLink
from penstock.v1 import text_pb2, tokenizer_pb2

# Texts of one Encode, below a tokenizer's default limit.
_BATCH = 128
# Any text with a token: its encoding shows the ids that the tokenizer puts in front.
_PROBE = "a"


@dataclass(frozen=True, slots=True)
class ScoredIds:
    """One item of Score."""

    prompt: list[int]
    continuation: list[int]


class ScoreEmbedTexts:
    """Encodes texts; shared by all handlers."""

    def __init__(self, link: TokenizerLink, config: RouterConfig) -> None:
        self._link = link
        self._parse_special = config.allow_control_tokens_in_text
        # fingerprint -> ids that the tokenizer puts in front.
        self._fronts: dict[str, list[int]] = {}

    async def inputs(self, texts: Sequence[str], timeout: float | None) -> list[list[int]]:
        """Return the ids of Embed's texts, special tokens included. Raises InvalidArgument naming `texts`."""
        encoded = await self._encode(texts, timeout, field="texts", special=True)
        for index, ids in enumerate(encoded):
            if not ids:
                raise InvalidArgument(f"texts[{index}]", "must have at least one token")
        return encoded

    async def output(self, text: str, timeout: float | None) -> list[int]:
        """Return the ids of a model's output text, without special tokens. Raises InvalidArgument naming `text`."""
        (ids,) = await self._encode([text], timeout, field="text", special=False)
        return ids

    async def items(self, items: Sequence[text_pb2.ScoreTextItem], timeout: float | None) -> list[ScoredIds]:
        """Return the ids of Score's items. Raises InvalidArgument naming `items[i].…`."""
        for index, item in enumerate(items):
            if not item.continuation:
                raise InvalidArgument(f"items[{index}].continuation", "must not be empty")
        prompts = [item.prompt.rstrip() for item in items]
        texts = [*prompts, *(item.prompt + item.continuation for item in items)]
        encoded = await self._encode(texts, timeout, field="items", special=False)
        front = await self._front(timeout)
        found = []
        for index, (prompt, whole) in enumerate(zip(encoded[: len(items)], encoded[len(items) :], strict=True)):
            common = _common(prompt, whole)
            context = [*front, *whole[:common]] or self._beginning(index)
            if common == len(whole):
                raise InvalidArgument(f"items[{index}].continuation", "must have at least one token")
            found.append(ScoredIds(context, whole[common:]))
        return found

    def _beginning(self, index: int) -> list[int]:
        info = self._link.info
        if info is not None and info.HasField("bos_token_id"):
            return [info.bos_token_id]
        if info is not None and info.eos_token_ids:
            return [info.eos_token_ids[0]]
        raise InvalidArgument(f"items[{index}].prompt", "must have at least one token")

    async def _front(self, timeout: float | None) -> list[int]:
        fingerprint = self._link.fingerprint
        if fingerprint not in self._fronts:
            (bare,) = await self._encode([_PROBE], timeout, field="items", special=False)
            (dressed,) = await self._encode([_PROBE], timeout, field="items", special=True)
            starts = [begin for begin in range(len(dressed)) if dressed[begin : begin + len(bare)] == bare]
            self._fronts[fingerprint] = dressed[: starts[0]] if starts else []
        return self._fronts[fingerprint]

    async def _encode(
        self, texts: Sequence[str], timeout: float | None, *, field: str, special: bool
    ) -> list[list[int]]:
        found: list[list[int]] = []
        for begin in range(0, len(texts), _BATCH):
            request = tokenizer_pb2.EncodeRequest(
                texts=texts[begin : begin + _BATCH],
                add_special_tokens=special,
                parse_special_tokens=self._parse_special,
            )
            try:
                answer = await self._link.encode(request, timeout)
            except InvalidArgument as error:
                # The error names a field of the tokenizer's request.
                raise InvalidArgument(field, error.description, reason=error.reason) from error
            found += [list(encoding.ids) for encoding in answer.encodings]
        if len(found) != len(texts):
            raise Internal("the tokenizer did not answer every text", reason="TOKENIZER_PROTOCOL")
        return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
