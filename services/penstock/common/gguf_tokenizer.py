"""`python -m penstock.common.gguf_tokenizer FILE FOLDER`: writes a GGUF file's tokenizer, converted by transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from penstock.common.child_limits import limit_memory
from penstock.common.gguf_file import GgufArray, GgufFile

# transformers' names of the facts behind `tokenizer.`.
_FACTS = {
    "ggml.model": "tokenizer_type",
    "ggml.pre": "pre_tokenizer_type",
    "ggml.tokens": "tokens",
    "ggml.scores": "scores",
    "ggml.token_type": "token_type",
    "ggml.merges": "merges",
    "ggml.precompiled_charsmap": "precompiled_charsmap",
    "ggml.bos_token_id": "bos_token_id",
    "ggml.eos_token_id": "eos_token_id",
    "ggml.unknown_token_id": "unk_token_id",
    "ggml.padding_token_id": "pad_token_id",
    "ggml.add_space_prefix": "add_prefix_space",
}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


# Converting the largest vocabularies takes a gigabyte.
_MEMORY_BYTES = 2**32
# More than any vocabulary has; an array of numbers becomes a list with an object for each.
_MOST_NUMBERS = 1 << 22


def main(path: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the template. Any exception ends the process."""
    import transformers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    limit_memory(_MEMORY_BYTES)
    file = GgufFile(path)
    values = {
        name: _value(file, f"tokenizer.{fact}") for fact, name in _FACTS.items() if f"tokenizer.{fact}" in file.facts
    }
    tokens = file.texts("tokenizer.ggml.tokens")
    special = {
        name: file.whole(f"tokenizer.ggml.{fact}_token_id", most=len(tokens) - 1) for name, fact in _SPECIAL.items()
    }
    backend, settings = convert_gguf_tokenizer(file.architecture, values)
    for name, number in special.items():
        settings[name] = None if number is None else tokens[number]
    # llama.cpp begins a text with bos for a sentencepiece vocabulary unless the file says otherwise.
    is_llama = values.get("tokenizer_type") == "llama"
    settings["add_bos_token"] = file.flag("tokenizer.ggml.add_bos_token", default=is_llama)
    settings["add_eos_token"] = file.flag("tokenizer.ggml.add_eos_token", default=False)
    if length := file.whole(f"{file.architecture}.context_length"):
        settings["model_max_length"] = length
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=backend, **settings)
    if template := file.text("tokenizer.chat_template", ""):
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def _value(file: GgufFile, name: str) -> Any:
    value = file.facts[name]
    if not isinstance(value, GgufArray):
        return value
    if not value.letter:
        return file.texts(name)
    if value.count > _MOST_NUMBERS:
        raise file.error(f"has {name} of {value.count} numbers; at most {_MOST_NUMBERS} are supported")
    return list(file.numbers(name))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
