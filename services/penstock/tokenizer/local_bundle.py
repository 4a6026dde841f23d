"""Tokenizer for the process that asks, which has no tokenizer service: with that service's settings."""

from __future__ import annotations

from pathlib import Path

from penstock.common.environment import current_environment
from penstock.common.options import load
from penstock.tokenizer.bundle import TokenizerBundle
from penstock.tokenizer.bundle_cache import usual_cache
from penstock.tokenizer.config import TokenizerConfig
from penstock.tokenizer.load_bundle import load_bundle


async def load_local_bundle(folder: Path) -> TokenizerBundle:
    """Load the bundle of a folder, or find it in this user's cache, as PENSTOCK_LOAD_TIMEOUT_SECONDS and
    PENSTOCK_CACHED_TOKENIZERS say. Raises StartupError naming the file and MODEL, or the variable."""
    own = load(TokenizerConfig, {}, current_environment())
    return await load_bundle(folder, timeout_seconds=own.load_timeout_seconds, cache=usual_cache(own.cached_tokenizers))
