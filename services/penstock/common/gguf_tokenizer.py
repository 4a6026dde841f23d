"""`python -m penstock.common.gguf_tokenizer FILE FOLDER`: writes a GGUF file's tokenizer, converted by transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from penstock.common.gguf_file import GgufFile

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


def main(path: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the template. Any exception ends the process."""
    import transformers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    file = GgufFile(path)
    facts = file.facts
    values: dict[str, Any] = {
        name: facts[f"tokenizer.{fact}"] for fact, name in _FACTS.items() if f"tokenizer.{fact}" in facts
    }
    backend, settings = convert_gguf_tokenizer(file.architecture, values)
    tokens = values["tokens"]
    for name, fact in _SPECIAL.items():
        number = facts.get(f"tokenizer.ggml.{fact}_token_id")
        settings[name] = None if number is None else tokens[number]
    # llama.cpp begins a text of a sentencepiece vocabulary with bos unless the file says otherwise.
    settings["add_bos_token"] = bool(facts.get("tokenizer.ggml.add_bos_token", values["tokenizer_type"] == "llama"))
    settings["add_eos_token"] = bool(facts.get("tokenizer.ggml.add_eos_token", False))
    length = facts.get(f"{file.architecture}.context_length")
    if length:
        settings["model_max_length"] = int(length)
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=backend, **settings)
    if template := facts.get("tokenizer.chat_template"):
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
