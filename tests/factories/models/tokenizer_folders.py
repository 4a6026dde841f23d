"""Tokenizer folders and vocabularies for tests: the demo model's, small ones of other kinds, and the real ones."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from penstock.common.checkpoint import demo_folder
from penstock.tokenizer.bundle import TokenizerBundle
from penstock.tokenizer.detokenizer_factory import DetokenizerFactory
from penstock.tokenizer.load_process import load
from penstock.tokenizer.tokenizer import Vocabulary, clean_up
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

ROOT = Path(__file__).resolve().parents[3]
CHAT_CONTROLS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|im_start|>", "<|im_end|>")


@cache
def bundle_of(folder: Path) -> TokenizerBundle:
    """Load a bundle as the service does, in this process."""
    return load(folder)


@cache
def demo_vocabulary() -> Vocabulary:
    return Vocabulary(bundle_of(demo_folder()))


def vocabulary_of(tokenizer: Tokenizer, special_tokens: dict[str, str] | None = None, **options: Any) -> Vocabulary:
    """Make a vocabulary without a folder."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    settings = {"id_limit": size, "special_tokens": special_tokens or {}, "templates": {}, **options}
    return Vocabulary(TokenizerBundle(backend=tokenizer.to_str(), **settings))


def byte_fallback_tokenizer() -> Tokenizer:
    """Make a tokenizer like Llama 2's: byte tokens, a word-boundary mark, <s> and </s> inside the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "s",
        "<",
        ">",
        "|",
        "/",
        "u",
        "你",
        "é",
        "he",
        "ll",
        "▁w",
        "or",
        "hell",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("h", "e"), ("l", "l"), ("▁", "w"), ("o", "r"), ("he", "ll")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CHAT_CONTROLS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    return tokenizer


def unigram_tokenizer() -> Tokenizer:
    """Make a tokenizer of pieces with scores; <s> and </s> are pieces like any other until they are kept apart."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -3.0), ("hello", -4.0), ("world", -4.0)]
    pieces += [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz<>/|."]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    """Make a tokenizer like BERT's; control tokens are words of the vocabulary."""
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "hello", "world", "##s", ".", ",", "'", "s", "[", "]", "sep", "cls"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    return tokenizer


def detokenizers_of(vocabulary: Vocabulary) -> DetokenizerFactory:
    bundle = vocabulary.bundle
    return DetokenizerFactory(
        vocabulary.tokenizer,
        id_limit=bundle.id_limit,
        special_ids=vocabulary.special_ids,
        clean_up=clean_up if bundle.clean_up_tokenization_spaces else None,
    )


def write_folder(folder: Path, tokenizer: Tokenizer, config: dict[str, Any], template: str = "") -> Path:
    """Write a model folder with a tokenizer and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def conformance_data() -> Path:
    """Find the folder with real tokenizers; skip the test where it is absent."""
    folder = (ROOT / os.environ.get("PENSTOCK_CONFORMANCE_DATA", "../shared/data")).resolve()
    if not (folder / "tokenizers").is_dir():
        pytest.skip(f"no real tokenizers in {folder} (PENSTOCK_CONFORMANCE_DATA)")
    return folder
