"""A folder's tokenizer beside its model: the table of bytes with which stop strings are matched, and the check that the
two belong together."""

from __future__ import annotations

from pathlib import Path

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.core.model_config import ModelConfig
from penstock.generation.startup.vocabulary_cache import TokenTables, VocabularyCache
from penstock.text.token_bytes import TokenBytes, UnsupportedTokenizer

_log = get_logger("penstock.generation")


def read_token_tables(folder: Path, model: ModelConfig, cache: VocabularyCache | None = None) -> TokenTables | None:
    """Return the tables; None when the folder's tokenizer does not allow them. `cache`: where they may be kept.

    A tokenizer may have added tokens that the model has no rows for, as one of a model that also sees has its image
    token: they are left out. Raises StartupError for a vocabulary of another model, or a broken file.
    """

    def read() -> TokenBytes | None:
        return _read(folder, model.vocab_size)

    if cache is None:
        table = read()
        found = None if table is None else TokenTables(table)
    else:
        found = cache.token_tables(folder, model.vocab_size, read)
    if found is not None:
        _warn_of_ids(found.token_bytes, model.vocab_size)
    return found


def _read(folder: Path, vocab_size: int) -> TokenBytes | None:
    try:
        table = TokenBytes.from_folder(folder, vocab_size)
    except UnsupportedTokenizer as error:
        _log.warning("stop strings are refused", cause=str(error))
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StartupError("tokenizer.json of the model is broken", flag="MODEL") from error
    if len(table) > vocab_size:
        raise StartupError(
            f"tokenizer.json has {len(table)} ids and the model a vocabulary of {vocab_size}: "
            "they do not belong together",
            flag="MODEL",
        )
    return table


def _warn_of_ids(table: TokenBytes, vocab_size: int) -> None:
    if table.beyond:
        _log.warning(
            "the tokenizer has added ids that the model has no rows for: they are never made, and prompts that have "
            "them are refused",
            rows=vocab_size,
            ids=len(table.beyond),
            first=table.beyond[0],
        )
