"""Drafts by a draft model of the caller: transformers' object or a folder, with the same tokenizer or another.

The engine verifies drafts by its own draws, so that no draft changes an answer, whatever its origin.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch


class _Texts(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class ModelDrafts:
    """The likeliest tokens of a causal language model of transformers. Keys and values of the last call are kept."""

    def __init__(self, model: Any, vocab_size: int | None) -> None:
        """Ids that are not below `vocab_size` end a draft."""
        self._model = model
        self._vocab_size = vocab_size
        self._known: list[int] = []
        self._cache: Any = None
        # transformers 5.24 renamed the argument.
        names = inspect.signature(model.forward).parameters if hasattr(model, "forward") else {}
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @torch.inference_mode()
    def __call__(self, token_ids: list[int], most: int) -> list[int]:
        """Return at most `most` drafts after `token_ids`."""
        kept = 0
        if self._cache is not None:
            pairs = zip(self._known, token_ids[:-1], strict=False)
            kept = next(
                (place for place, (a, b) in enumerate(pairs) if a != b), min(len(self._known), len(token_ids) - 1)
            )
        self._go_back(kept)
        drafts: list[int] = []
        rows = token_ids[kept:]
        while len(drafts) < most:
            ids = torch.tensor([rows], dtype=torch.int64, device=self._model.device)
            answer = self._model(input_ids=ids, use_cache=True, **{self._cache_name: self._cache})
            self._cache = getattr(answer, self._cache_name, None) or getattr(answer, "past_key_values", None)
            self._known = [*token_ids, *drafts] if self._cache is not None else []
            drafted = int(answer.logits[0, -1].argmax())
            if self._vocab_size is not None and drafted >= self._vocab_size:
                break
            drafts.append(drafted)
            rows = [drafted] if self._cache is not None else [*token_ids, *drafts]
        return drafts

    def _go_back(self, kept: int) -> None:
        """Forget keys and values behind the first `kept` tokens."""
        if self._cache is None or kept == len(self._known):
            return
        if not kept or not hasattr(self._cache, "crop"):
            self._cache, self._known = None, []
            return
        # Of the two forms that there were, releases of today take the number of tokens to leave out.
        self._cache.crop(kept - len(self._known))
        self._known = self._known[:kept]


class TextDrafts:
    """Drafts of a model with another tokenizer: its ids become text, and the text becomes the served model's ids."""

    def __init__(self, model: Any, its_tokenizer: Any, served: _Texts, vocab_size: int) -> None:
        self._model = ModelDrafts(model, None)
        self._theirs = its_tokenizer
        self._served = served
        self._vocab_size = vocab_size

    def __call__(self, token_ids: list[int], most: int) -> list[int]:
        """Return at most `most` drafts after `token_ids`."""
        text = self._served.decode(token_ids, skip_special_tokens=False)
        theirs = list(self._theirs.encode(text, add_special_tokens=False))
        if not theirs:
            return []
        more = self._model(theirs, most)
        whole = self._theirs.decode([*theirs, *more], skip_special_tokens=False)
        before = self._theirs.decode(theirs, skip_special_tokens=False)
        if not whole.startswith(before):
            return []
        added = whole[len(before) :]
        known = self._served.encode(text, add_special_tokens=False)
        both = self._served.encode(text + added, add_special_tokens=False)
        if known == both[: len(known)]:
            drafts = both[len(known) :]
        else:
            drafts = self._served.encode(added, add_special_tokens=False)
        return [one for one in drafts[:most] if one < self._vocab_size]


class DraftMaker:
    """Maker of drafts from what a caller gives as `assistant_model`. Folders are read once."""

    def __init__(self, served: _Texts | None, vocab_size: int) -> None:
        self._served = served
        self._vocab_size = vocab_size
        self._folders: dict[str, tuple[Any, Any]] = {}

    def make(self, assistant: Any, tokenizer: Any) -> ModelDrafts | TextDrafts:
        """Return drafts for one request. Raises TypeError and ValueError naming the argument."""
        model = assistant
        if isinstance(assistant, str | Path):
            model, found = self._read(Path(assistant))
            tokenizer = tokenizer or found
        elif not callable(model) or not hasattr(model, "device") or not hasattr(model, "config"):
            raise TypeError(
                "option 'assistant_model': must be the name of the server's draft model, a folder, or a causal "
                f"language model of transformers, found {type(assistant).__name__}"
            )
        if tokenizer is not None and self._served is not None and not self._is_same(tokenizer):
            return TextDrafts(model, tokenizer, self._served, self._vocab_size)
        size = getattr(model.config, "vocab_size", None)
        if tokenizer is None and size != self._vocab_size:
            raise ValueError(
                f"option 'assistant_model': has a vocabulary of {size}, and the model one of {self._vocab_size}: give "
                "its tokenizer as assistant_tokenizer"
            )
        return ModelDrafts(model, self._vocab_size)

    def _is_same(self, tokenizer: Any) -> bool:
        """True where a text becomes the same ids: compared on the vocabulary's own size and a sample."""
        assert self._served is not None
        sample = "The quick brown fox, 1234; été 你好!\n\tdef f(x): return x"
        return list(tokenizer.encode(sample, add_special_tokens=False)) == self._served.encode(
            sample, add_special_tokens=False
        )

    def _read(self, folder: Path) -> tuple[Any, Any]:
        key = str(folder.resolve())
        if key not in self._folders:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            try:
                model: Any = AutoModelForCausalLM.from_pretrained(key, local_files_only=True)
                model.eval()
                has_tokenizer = (folder / "tokenizer_config.json").exists() or (folder / "tokenizer.json").exists()
                tokenizer = AutoTokenizer.from_pretrained(key, local_files_only=True) if has_tokenizer else None
            except Exception as error:
                raise ValueError(
                    f"option 'assistant_model': {folder} cannot be read as a causal language model "
                    f"({type(error).__name__})"
                ) from error
            self._folders[key] = model, tokenizer
        return self._folders[key]
