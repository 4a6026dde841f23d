"""Result of a start: a model in memory, and the facts that requests are checked against."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.generation.options.request_options import ModelFacts
from penstock.generation.startup.load_weights import LoadedWeights
from penstock.generation.startup.make_pools import Pools
from penstock.generation.startup.read_files import ModelFiles
from penstock.generation.startup.tune_engine import EngineParts
from penstock.text.token_bytes import TokenPrefixes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready for an engine: a group of each step of its start, in their order."""

    files: ModelFiles
    weights: LoadedWeights
    pools: Pools
    engine: EngineParts
    served: ModelFacts
    # For token healing; None where there is no table.
    token_prefixes: TokenPrefixes | None

    def status_lines(self) -> list[str]:
        """Return lines of facts for people."""
        ranks, advice = self.weights.ranks, self.weights.device.advice()
        return [
            self.weights.status_line(self.served.name),
            # Before the rest: `penstock serve` has room for three lines.
            *([] if advice is None else [f"advice    {advice}"]),
            *self.pools.status_lines(self.served.max_context_tokens),
            *self.engine.status_lines(self.pools),
            *([] if ranks is None else [f"ranks     {ranks.group.shard.count} processes have a part each"]),
        ]
