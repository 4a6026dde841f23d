"""First step of a start: all that is read before the weights. A start that cannot succeed mostly ends here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.common.checkpoint import resolve_model
from penstock.common.errors import StartupError
from penstock.common.fingerprint import tokenizer_fingerprint
from penstock.common.heap import trim_heap
from penstock.common.logging import get_logger
from penstock.generation.core.model_config import ModelConfig
from penstock.generation.models.registry import read_model_config
from penstock.generation.options.hf_json import load_defaults
from penstock.generation.options.request_options import ModelDefaults
from penstock.generation.startup.plugin_registry import PluginRegistry, load_plugins
from penstock.generation.startup.start import Start
from penstock.generation.startup.vocabulary import read_token_tables
from penstock.generation.startup.vocabulary_cache import TokenTables, VocabularyCache
from penstock.text.token_bytes import TokenBytes

_log = get_logger("penstock.generation")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Facts of a model's folder beside its weights, and the owner's plugins."""

    folder: Path
    # As its config.json has it; loading the weights adds to it.
    config: ModelConfig
    # Longest prompt and output together, in tokens.
    context: int
    # Folder of its tokenizer.json; None: it is not to be read.
    tokenizer_folder: Path | None
    # None: there is no tokenizer, or none that can be split by token.
    token_tables: TokenTables | None
    defaults: ModelDefaults
    plugins: PluginRegistry

    @property
    def token_bytes(self) -> TokenBytes | None:
        """Bytes of the tokenizer's tokens."""
        return None if self.token_tables is None else self.token_tables.token_bytes

    def tokenizer_fingerprint(self) -> str:
        """Return the fingerprint of the tokenizer.json as it is now; empty where none is read."""
        return "" if self.tokenizer_folder is None else tokenizer_fingerprint(self.tokenizer_folder)


def read_files(start: Start) -> ModelFiles:
    """Find the folder, download it where it is a hub id's, and read it. Raises StartupError naming the flag."""
    config = start.config
    plugins = load_plugins(config.logits_processor, config.stopping_criteria)
    folder = resolve_model(config.model, show=start.show)
    model = read_model_config(folder, config.route)
    context = _context(config.max_context, model)
    tokenizer_folder = _tokenizer_folder(start, folder)
    cache = VocabularyCache(most=config.cached_vocabularies)
    token_tables = None if tokenizer_folder is None else read_token_tables(tokenizer_folder, model, cache)
    defaults = _defaults(folder, model, has_token_bytes=token_tables is not None)
    # Frees tokenizer.json as objects, many times as large as the table.
    trim_heap()
    return ModelFiles(folder, model, context, tokenizer_folder, token_tables, defaults, plugins)


def _context(wanted: int | None, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise StartupError(f"--max-context {wanted} is more than the model's {longest}", flag="--max-context")
    return wanted or longest


def _tokenizer_folder(start: Start, folder: Path) -> Path | None:
    """Return the folder of the tokenizer; None with --no-load-tokenizer. Raises StartupError naming
    --tokenizer-path."""
    if not start.config.load_tokenizer:
        return None
    if start.config.tokenizer_path is None:
        return folder
    try:
        return resolve_model(start.config.tokenizer_path, show=start.show)
    except StartupError as error:
        raise StartupError(f"--tokenizer-path: {error.message}", flag="--tokenizer-path") from error


def _defaults(folder: Path, model: ModelConfig, *, has_token_bytes: bool) -> ModelDefaults:
    """Read generation_config.json. Raises StartupError for options that need a tokenizer where there is none."""
    defaults, ignored = load_defaults(folder, model.eos_token_ids, model.vocab_size, model.num_layers)
    if ignored:
        _log.warning("generation_config.json asks for what this release does not do", fields=list(ignored))
    if defaults.stop_strings and not has_token_bytes:
        raise StartupError("generation_config.json has stop_strings, which need a tokenizer.json", flag="MODEL")
    if defaults.options.token_healing and not has_token_bytes:
        raise StartupError("generation_config.json has token_healing, which needs a tokenizer.json", flag="MODEL")
    pad = model.pad_token_id if defaults.pad_token_id is None else defaults.pad_token_id
    bos = model.bos_token_id if defaults.bos_token_id is None else defaults.bos_token_id
    # A pad id outside the vocabulary is common, and no group of beams can count as such a token.
    pad, bos = (one if one is not None and one < model.vocab_size else None for one in (pad, bos))
    return replace(defaults, pad_token_id=pad, bos_token_id=bos)
