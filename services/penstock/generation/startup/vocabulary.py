"""A folder's tokenizer beside its model: the table of bytes with which stop strings are matched, and the check that the
two belong together."""

from __future__ import annotations

from pathlib import Path

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.core.model_config import ModelConfig
from penstock.text.token_bytes import TokenBytes, UnsupportedTokenizer

_log = get_logger("penstock.generation")


def read_token_bytes(folder: Path, model: ModelConfig) -> TokenBytes | None:
    """Return the table; None when the folder's tokenizer does not allow one.

    A tokenizer may have added tokens that the model has no rows for, as one of a model that also sees has its image
    token: they are left out. Raises StartupError for a vocabulary of another model, or a broken file.
    """
    try:
        table = TokenBytes.from_folder(folder, model.vocab_size)
    except UnsupportedTokenizer as error:
        _log.warning("stop strings are refused", cause=str(error))
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StartupError("tokenizer.json of the model is broken", flag="MODEL") from error
    if len(table) > model.vocab_size:
        raise StartupError(
            f"tokenizer.json has {len(table)} ids and the model a vocabulary of {model.vocab_size}: "
            "they do not belong together",
            flag="MODEL",
        )
    if table.beyond:
        _log.warning(
            "the tokenizer has added ids that the model has no rows for: they are never made, and prompts that have "
            "them are refused",
            rows=model.vocab_size,
            ids=len(table.beyond),
            first=table.beyond[0],
        )
    return table
