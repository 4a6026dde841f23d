"""Token healing: the prompt's last token is drawn again among those that begin with its text, then the request begins.

As in transformers' heal_tokens (5.23), the draw is greedy and by the plain model, and favours the old token slightly.
transformers only makes tokens with another text unlikely; here they are excluded, so that the prompt's text always
stays. The prompt itself is used unchanged: decoding, stripping and encoding it again would lose the special tokens of a
chat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from penstock.generation.core.decoding_mode import PLAIN, DecodingMode
from penstock.generation.core.request import Emission
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.engine.decoding.base import Decision, DecodingStrategy

if TYPE_CHECKING:
    from penstock.generation.core.request import FinishReason, Request, TokenHealingOptions
    from penstock.generation.core.step import DraftRequest, SampledToken


class _Keeping(DecodingMode):
    """Greedy search with kept hidden states: the request's own mode needs them."""

    __slots__ = ()
    keeps_hidden_states = True


_KEEPING = _Keeping()
# Bias in favour of the old token, as in transformers: "http" rather than "https".
_FAVOUR = 1.0


class TokenHealing(DecodingStrategy):
    """First phase of one sequence, the prompt without its last token; the request's own strategy forks from it."""

    def __init__(
        self,
        request: Request,
        healing: TokenHealingOptions,
        make: Callable[[Request], DecodingStrategy],
        next_seq_id: Callable[[], int],
    ) -> None:
        """`request` has at least two prompt tokens. `make` returns the strategy of a request with a healed prompt."""
        self._request = request
        self._healing = healing
        self._make = make
        # Until the prompt is healed it finds the request's errors, and ends a request that gets no further.
        self._strategy = make(request)
        self._healer: Sequence | None = Sequence(
            seq_id=next_seq_id(),
            index=0,
            params=_params(request, healing),
            seed=0,
            token_ids=request.prompt_token_ids[:-1],
            num_prompt_tokens=len(request.prompt_token_ids) - 1,
        )

    @property
    def width(self) -> int:
        return self._strategy.width

    @override
    def start(self) -> tuple[list[Sequence], list[Emission]]:
        """Raises the errors of the request's own strategy."""
        sequences, preset_events = self._strategy.start()
        return [self._healer] if sequences and self._healer is not None else [], preset_events

    def advance(self, sampled: Mapping[Sequence, SampledToken]) -> Decision:
        if self._healer is None:
            return self._strategy.advance(sampled)
        return self._begin(self._healer, sampled[self._healer].token_id)

    def restarted(self) -> list[Sequence] | None:
        return self._strategy.restarted() if self._healer is None else None

    def draft_requests(self) -> list[DraftRequest]:
        return self._strategy.draft_requests() if self._healer is None else []

    def take_drafts(self, drafts: Mapping[Sequence, list[int]]) -> None:
        self._strategy.take_drafts(drafts)

    def end(self, reason: FinishReason) -> list[Emission]:
        return self._strategy.end(reason)

    def _begin(self, healer: Sequence, token_id: int) -> Decision:
        """Begin the request on its healed prompt. Only its last token is computed again."""
        self._healer = None
        prompt = [*self._request.prompt_token_ids[:-1], token_id]
        self._strategy = self._make(replace(self._request, prompt_token_ids=prompt, token_healing=None))
        sequences, _ = self._strategy.start()
        heir = min((one for one in sequences if one.family == 0), key=lambda one: len(one.token_ids))
        return Decision(
            forks=[(healer, heir)],
            added=[one for one in sequences if one is not heir],
            dropped=[healer],
            healed=(token_id, self._healing.added_text(token_id)),
        )


def _params(request: Request, healing: TokenHealingOptions) -> SamplingParams:
    """Return options of a greedy draw among the extensions. The runner keeps the same states as for the own mode."""
    return SamplingParams(
        max_new_tokens=1,
        allowed_token_ids=healing.token_ids,
        logit_bias={request.prompt_token_ids[-1]: _FAVOUR},
        mode=_KEEPING if request.params.mode.keeps_hidden_states else PLAIN,
    )
