"""How `chat` and `complete` generate."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from penstock.common.options import option

if TYPE_CHECKING:
    from penstock_client import GenerationOptions

GROUP = "Generation"


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options of a request; what is left out is the model's own default."""

    model: str | None = option(
        None, "Model to use; the only one served when left out.", group=GROUP, flag="--model", env="PENSTOCK_CHAT_MODEL"
    )
    max_new_tokens: int | None = option(None, "Longest answer.", group=GROUP, minimum=1)
    temperature: float | None = option(None, "0 is greedy.", group=GROUP, minimum=0)
    top_k: int | None = option(None, "Sample among the k likeliest tokens; 0 is off.", group=GROUP, minimum=0)
    top_p: float | None = option(None, "Sample among the likeliest tokens of this probability.", group=GROUP)
    seed: int | None = option(None, "Same seed, same answer.", group=GROUP, minimum=0)
    stop: tuple[str, ...] = option(
        (), "Stop before this text (repeatable).", group=GROUP, metavar="TEXT", parse=lambda text: (text,)
    )
    stats: bool = option(False, "Show token counts and timings.", group=GROUP)

    def request_options(self) -> GenerationOptions:
        """Keyword options of penstock_client, those that were given."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("stop", "stats")}
        given: dict[str, Any] = {name: value for name, value in plain.items() if value is not None}
        if self.stop:
            given["stop_strings"] = list(self.stop)
        return cast("GenerationOptions", given)
