"""The error of an engine's numbers: its readings of the prose beside those of transformers in float32."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import ENGINES
from benchmarks.engines.base import Settings, TextScores
from benchmarks.engines.process import EngineProcess

PROSE = Path(__file__).with_name("data") / "prose.txt"
CONTEXT = 512


@dataclass(frozen=True)
class TextError:
    """Distance of readings from others of the same text."""

    # Mean magnitude of the difference of a log-probability.
    mean: float
    # Share of the places with the same likeliest token; None: the engine does not tell it.
    agreement: float | None

    @classmethod
    def between(cls, found: TextScores, exact: TextScores) -> TextError:
        """Compare with `exact`. Raises ValueError where they are of different texts."""
        pairs = zip(found.log_probabilities, exact.log_probabilities, strict=True)
        mean = statistics.fmean(abs(ours - theirs) for ours, theirs in pairs)
        if not found.likeliest:
            return cls(mean, None)
        same = (ours == theirs for ours, theirs in zip(found.likeliest, exact.likeliest, strict=True))
        return cls(mean, statistics.fmean(same))

    def facts(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"error": self.mean, "agreement": self.agreement}


def prose_documents(folder: Path, tokens: int) -> list[list[int]]:
    """Return the prose's first tokens in documents of at most CONTEXT."""
    from penstock.evaluation.documents import documents_of

    return documents_of(folder, PROSE.read_text(encoding="utf-8"), tokens, CONTEXT)


def exact_scores(settings: Settings, documents: list[list[int]]) -> TextScores:
    """Return the readings of transformers in float32, which are kept beside the checkpoints.

    Raises EngineFailed where transformers does not load it."""
    folder = Path(settings.model)
    stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(folder.glob("*.safetensors"))]
    about = {"folder": str(folder.resolve()), "files": stamp, "documents": documents}
    kept = settings.converted("exact.json")
    if kept.is_file() and (found := json.loads(kept.read_text()))["about"] == about:
        return TextScores(**found["scores"])
    engine = EngineProcess(
        "transformers", ENGINES["transformers"], Path(settings.cache), settings.threads, passive=True
    )
    try:
        engine.load(_in_float32(settings))
        scores = engine.score(documents)
        engine.close()
    finally:
        engine.stop()
    kept.write_text(json.dumps({"about": about, "scores": asdict(scores)}))
    return scores


def _in_float32(settings: Settings) -> Settings:
    """Return the settings of transformers in float32."""
    return Settings(settings.model, "fp32", settings.threads, settings.kv_tokens, settings.max_context, settings.cache)
