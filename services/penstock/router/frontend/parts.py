"""Parts that every stream of the router uses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.router.backends.attempts import Attempts
from penstock.router.backends.forecast import Forecast
from penstock.router.backends.pool import BackendPool
from penstock.router.config import RouterConfig
from penstock.router.frontend.admission import Admission
from penstock.router.frontend.drain import Drain
from penstock.router.frontend.turn_limiter import TurnLimiter
from penstock.router.keys.key_desk import KeyDesk
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.delta_pace import DeltaPace
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.router.tokenizer.pipeline import Pipeline
from penstock.router.tokenizer.remembered_texts import TokenTexts
from penstock.router.tokenizer.tokenizer_link import TokenizerLink


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the process, shared by all streams."""

    config: RouterConfig
    link: TokenizerLink
    pipeline: Pipeline
    pool: BackendPool
    attempts: Attempts
    forecast: Forecast
    admission: Admission
    drain: Drain
    detokenizer: Detokenizer
    token_texts: TokenTexts
    metrics: RouterMetrics
    turn_limiter: TurnLimiter
    delta_pace: DeltaPace
    # None: there is no file of keys.
    keys: KeyDesk | None = None
    # Tasks that send statuses to readers that were cut off: the event loop itself would not keep them.
    hanging_up: set[asyncio.Task[None]] = field(default_factory=set)
