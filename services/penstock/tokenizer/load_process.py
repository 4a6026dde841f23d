"""Child process that loads a tokenizer folder with transformers and writes the result.

Ids equal transformers' own because transformers does the loading: it rebuilds some tokenizers from their class, adds
tokens from the configuration and sets the post-processor. A child process keeps transformers and its copies out of the
service's memory. It ends when there are no more requests. Or, since importing transformers takes over a second, it
continues as the first template process.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from penstock.common import child_io
from penstock.common.heap import trim_heap
from penstock.text.tokenizer_json import read_tokenizer_json
from penstock.tokenizer.bundle import LARGE_INTEGER, TokenizerBundle, checked

# Limit of ids. Each has a place in the decoding tables, and a wrong number in a file must not take all memory.
MAX_IDS = 1 << 24


def read_sources_once() -> None:
    """Give transformers.models the sources of all models, which `import transformers` has already read.

    transformers 5 reads them twice, for itself and for transformers.models, to find the names that they export. One
    reading takes a fifth of this process's time.
    """
    import transformers
    from transformers.utils import import_utils

    utils: Any = import_utils
    define = utils.define_import_structure
    models = Path(transformers.__file__).parent / "models"
    # From its cache; `import transformers` has added its own names to it.
    found = define(models, prefix="models")
    named = {
        backends: {
            name.removeprefix("models."): objects for name, objects in modules.items() if name.startswith("models.")
        }
        for backends, modules in found.items()
    }

    def define_once(path: str, prefix: str | None = None) -> Any:
        return named if prefix is None and Path(path) == models / "__init__.py" else define(path, prefix)

    utils.define_import_structure = define_once


def copy_added_tokens_directly() -> None:
    """Let deep copies of added tokens be made by their fields: transformers copies all of them several times.

    By pickling, as Python copies what it does not know, it takes half a second for Gemma 3, which has thousands.
    """
    from tokenizers import AddedToken

    def copied(token: AddedToken, _: dict[int, Any]) -> AddedToken:
        return AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )

    table: dict[type, Any] = vars(copy)["_deepcopy_dispatch"]
    table[AddedToken] = copied


def read_added_tokens_alone() -> None:
    """Let transformers read of a tokenizer.json what it takes of it before the tokenizers library reads all of it.

    That is its added tokens. Parsing the merges for them takes 0.7 s for Gemma 3.
    """
    from transformers import tokenization_utils_base

    base: Any = tokenization_utils_base
    base.json = _AddedTokensAlone()


class _AddedTokensAlone:
    """The module json, but for tokenizer.json: it has its added tokens and nothing else."""

    def __getattr__(self, name: str) -> Any:
        return getattr(json, name)

    def load(self, file: TextIO) -> Any:
        """Read as json.load does."""
        path = Path(str(getattr(file, "name", "")))
        if path.name != "tokenizer.json":
            return json.load(file)
        return {"added_tokens": read_tokenizer_json(path)["added_tokens"]}


def load(folder: Path) -> TokenizerBundle:
    """Load the folder's tokenizer. Raises transformers' errors; TypeError for a tokenizer without a fast backend;
    ValueError for one that encodes nothing."""
    from transformers import AutoTokenizer

    with _readable(folder) as readable:
        tokenizer = AutoTokenizer.from_pretrained(readable, local_files_only=True, trust_remote_code=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TypeError(f"{type(tokenizer).__name__} has no tokenizers backend")
    backend.no_truncation()
    backend.no_padding()
    _check_encoding(backend)
    template = tokenizer.chat_template
    limit = tokenizer.model_max_length
    return checked(
        TokenizerBundle(
            backend=backend.to_str(),
            special_tokens=dict(tokenizer.special_tokens_map),
            response_template=_json_text(getattr(tokenizer, "response_template", None)),
            templates=template if isinstance(template, dict) else {"default": template} if template else {},
            model_max_length=_limit(limit),
            padding_side=tokenizer.padding_side,
            truncation_side=tokenizer.truncation_side,
            pad_token_type_id=tokenizer.pad_token_type_id,
            clean_up_tokenization_spaces=_cleans_up(tokenizer, backend),
            split_special_tokens=bool(tokenizer.split_special_tokens),
            id_limit=_id_limit(tokenizer, folder),
            generation_eos_token_ids=_generation_eos(folder),
        )
    )


def _check_encoding(backend: Any) -> None:
    """Encode a text. Raises ValueError: without a class in tokenizer_config.json transformers makes the one that models
    of the folder's type have, whatever tokenizer.json is, and gives it that one's special tokens."""
    try:
        backend.encode("warm up", add_special_tokens=False)
    except Exception as error:  # the class of all errors of the tokenizers library
        raise ValueError(
            f"it encodes no text ({error}): tokenizer_config.json has no tokenizer_class, or the wrong one"
        ) from error


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[Path]:
    """Yield the folder, or a copy if config.json has runs of ids as ends, which transformers refuses."""
    config = _json(folder / "config.json")
    ends = config.get("eos_token_id")
    if not isinstance(ends, list) or not any(isinstance(one, list) for one in ends):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="penstock-tokenizer-") as scratch:
        for path in folder.iterdir():
            # Named chat templates are in their own folder.
            if path.name != "config.json" and path.suffix != ".safetensors":
                (Path(scratch) / path.name).symlink_to(path.resolve())
        text = json.dumps({name: value for name, value in config.items() if name != "eos_token_id"})
        (Path(scratch) / "config.json").write_text(text, encoding="utf-8")
        yield Path(scratch)


def _limit(value: object) -> int | None:
    """Limit on the length of a text; None without one, or for a number that means none. Raises TypeError."""
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise TypeError("tokenizer_config.json has a model_max_length that is not a number")
    return int(value) if value is not None and 1 <= value < LARGE_INTEGER else None


def _json_text(value: object) -> str:
    """JSON text of an optional value of a folder; empty without one, or if it is not JSON."""
    try:
        return json.dumps(value) if value else ""
    except (TypeError, ValueError):
        return ""


def _id_limit(tokenizer: Any, folder: Path) -> int:
    """Find the limit of ids; a vocabulary with holes has ids beyond its length. Raises ValueError past MAX_IDS."""
    limit: int = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0), _embedding_rows(folder))
    if limit > MAX_IDS:
        raise ValueError(f"tokenizer.json or config.json has {limit} ids; at most {MAX_IDS} are supported")
    return limit


def _cleans_up(tokenizer: Any, backend: Any) -> bool:
    """True when transformers cleans up spaces: for BPE, where that would destroy text, only if forced."""
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(tokenizer.clean_up_tokenization_spaces and (type(backend.model).__name__ != "BPE" or forced))


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def _embedding_rows(folder: Path) -> int:
    """Rows of the model's embedding, which may be padded beyond the tokenizer's entries; 0 when unknown."""
    config = _json(folder / "config.json")
    rows = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size", 0))
    return rows if isinstance(rows, int) else 0


def _generation_eos(folder: Path) -> list[int]:
    eos = _json(folder / "generation_config.json").get("eos_token_id", [])
    found = eos if isinstance(eos, list) else [eos]
    return [index for index in found if isinstance(index, int) and 0 <= index < MAX_IDS]


def main() -> None:
    answers = child_io.claim_stdout()
    child_io.forbid_torch()
    folder = Path(child_io.read(sys.stdin.buffer)["folder"])
    # Garbage collections are off until everything is read: they would find nothing, and they are costly with the lists
    # of a tokenizer.json, which transformers parses several times.
    gc.disable()
    try:
        # It only saves time, and another release of transformers may not have it. If transformers itself cannot be
        # imported, `load` gives the reason.
        with contextlib.suppress(Exception):
            read_sources_once()
            copy_added_tokens_directly()
            read_added_tokens_alone()
        answer: dict[str, Any] = {"bundle": asdict(load(folder))}
    except Exception as error:  # a process boundary: the parent reports any fault of the folder
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(child_io.pack(answer))
    answers.flush()
    # The loaded objects are garbage now, and a template process lives as long as the service.
    del answer
    gc.enable()
    gc.collect()
    trim_heap()
    try:
        settings = child_io.read(sys.stdin.buffer)
    except EOFError:
        return
    from penstock.tokenizer import template_process

    template_process.serve(settings, answers)


if __name__ == "__main__":
    main()
