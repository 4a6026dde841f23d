"""Text and bytes of single tokens, for logprobs: fetched from the tokenizer once, then remembered (bounded)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from penstock.common.errors import Internal
from penstock.router.tokenizer.tokenizer_link import TokenizerLink
from penstock.text.token_text import TokenText
from penstock.v1 import common_pb2, tokenizer_pb2

# Ids per Decode call: keeps requests and answers small.
_BATCH = 4096


class TokenTexts:
    """Texts of tokens by id. They depend on the id alone: special tokens are spelled out. Belongs to one event loop."""

    def __init__(self, link: TokenizerLink, capacity: int) -> None:
        self._link = link
        self._capacity = capacity
        self._texts: OrderedDict[int, TokenText] = OrderedDict()

    def fill_known(self, positions: Sequence[common_pb2.PositionLogprobs]) -> bool:
        """Set `text` and `raw` of every entry of `positions` from memory; False when one is not remembered.

        The per-token path: nearly all are remembered.
        """
        try:
            for entry in _entries(positions):
                entry.text, raw = self._texts[entry.token_id]
                if raw:
                    entry.raw = raw
        except KeyError:
            return False
        return True

    async def fill(self, positions: Sequence[common_pb2.PositionLogprobs], timeout: float | None) -> None:
        """Set `text` and `raw` of every entry of `positions`. Raises PenstockError when the tokenizer cannot answer."""
        entries = list(_entries(positions))
        wanted = {entry.token_id for entry in entries}
        found = {token_id: self._texts[token_id] for token_id in wanted if token_id in self._texts}
        missing = sorted(wanted - found.keys())
        for begin in range(0, len(missing), _BATCH):
            found |= await self._ask(missing[begin : begin + _BATCH], timeout)
        for entry in entries:
            entry.text, entry.raw = found[entry.token_id]

    async def _ask(self, ids: Sequence[int], timeout: float | None) -> dict[int, TokenText]:
        request = tokenizer_pb2.DecodeRequest(
            sequences=[common_pb2.TokenIds(ids=[token_id]) for token_id in ids],
            skip_special_tokens=False,
            with_pieces=True,
        )
        answer = await self._link.decode(request, timeout)
        # A tokenizer of an earlier release sends only texts.
        texts = [TokenText.of(piece) for piece in answer.pieces] or [TokenText(text, b"") for text in answer.texts]
        if len(texts) != len(ids):
            raise Internal("the tokenizer did not answer every sequence", reason="TOKENIZER_PROTOCOL")
        new = dict(zip(ids, texts, strict=True))
        self._texts.update(new)
        while len(self._texts) > self._capacity:
            self._texts.popitem(last=False)
        return new


def _entries(positions: Iterable[common_pb2.PositionLogprobs]) -> Iterable[common_pb2.TokenLogprob]:
    for position in positions:
        if position.HasField("chosen"):
            yield position.chosen
        yield from position.top
