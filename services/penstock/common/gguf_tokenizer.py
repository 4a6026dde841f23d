"""`python -m penstock.common.gguf_tokenizer FILE FOLDER`: writes a GGUF file's tokenizer as Hugging Face's files.

By the library tokenizers alone: transformers has a converter, too, but its import takes seconds, and it cuts text for
few of llama.cpp's pre-tokenizers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.common.child_limits import limit_memory
from penstock.common.gguf_file import GgufArray, GgufFile
from penstock.common.gguf_pretokenizers import PRETOKENIZERS

# Converting the largest vocabularies takes a gigabyte.
_MEMORY_BYTES = 2**32
# More than any vocabulary has; an array of numbers becomes a list with an object for each.
_MOST_NUMBERS = 1 << 22
# Kinds of tokens, as llama.cpp numbers them.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Names of rows of the embedding that no token has.
_FILLER = re.compile(r"\[PAD[0-9]+\]")
_SPACE = "▁"
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
# Of a template beside the main one: it becomes a file's name.
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)
# Longest token that is looked for as two others.
_MOST_CHARS = 512


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A file's tokens by their ids, and what is said of each."""

    file: GgufFile
    tokens: list[str]
    kinds: Sequence[int]
    scores: Sequence[float]

    def merges(self) -> list[tuple[str, str]] | None:
        """Return the merges that the file lists; None if there are none."""
        if f"{_PREFIX}merges" not in self.file.facts:
            return None
        # Either part may begin with a space.
        cut = ((one, one.find(" ", 1)) for one in self.file.texts(f"{_PREFIX}merges"))
        return [(one[:place], one[place + 1 :]) for one, place in cut if place > 0]

    def ids(self, respell: Callable[[str], str] = str) -> dict[str, int]:
        """Return the ids by the tokens, without those of rows that no token has."""
        return {
            respell(token): number
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind != _UNUSED or not _FILLER.fullmatch(token)
        }

    def flag(self, name: str, default: bool) -> bool:
        """Return a flag of the tokenizer."""
        return self.file.flag(f"{_PREFIX}{name}", default=default)

    def token(self, name: str) -> str | None:
        """Return a special token."""
        number = self.file.whole(f"{_PREFIX}{name}_token_id", most=len(self.tokens) - 1)
        return None if number is None else self.tokens[number]


@dataclass(frozen=True, slots=True)
class Built:
    """A tokenizer without its added tokens, and whether a text begins with bos unless the file says otherwise."""

    tokenizer: Tokenizer
    adds_bos: bool


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the templates. Raises StartupError as `convert` does."""
    file = GgufFile(path)
    tokenizer, settings = convert(file)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False))
    if template := file.text(_TEMPLATE, ""):
        (folder / "chat_template.jinja").write_text(template)
    for fact in file.facts:
        name = fact.removeprefix(f"{_TEMPLATE}.")
        if name != fact and _TEMPLATE_NAME.fullmatch(name):
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(file.text(fact, ""))


def convert(file: GgufFile) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and tokenizer_config.json's values. Raises StartupError naming a fact that is not read."""
    kind = file.text(f"{_PREFIX}model", "")
    if kind not in _KINDS:
        raise file.error(
            f"has {_PREFIX}model {kind[:80]!r}, which is not read; supported are {', '.join(_KINDS)}: give a folder "
            "with the tokenizer"
        )
    words = _vocabulary(file)
    built = _KINDS[kind](words)
    _add_tokens(built.tokenizer, words)
    _begin_and_end(built.tokenizer, words, adds_bos=built.adds_bos)
    settings: dict[str, Any] = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"}
    settings |= {name: token for name, fact in _SPECIAL.items() if (token := words.token(fact)) is not None}
    if length := file.whole(f"{file.architecture}.context_length"):
        settings["model_max_length"] = length
    return built.tokenizer, settings


def _vocabulary(file: GgufFile) -> GgufVocabulary:
    tokens = file.texts(f"{_PREFIX}tokens")
    kinds = _numbers(file, "token_type", len(tokens), _NORMAL)
    return GgufVocabulary(file, tokens, kinds, _numbers(file, "scores", len(tokens), 0.0))


def _numbers(file: GgufFile, name: str, count: int, default: float) -> Sequence[Any]:
    value = file.facts.get(f"{_PREFIX}{name}")
    if value is None:
        return [default] * count
    if isinstance(value, GgufArray) and value.count not in range(min(count, _MOST_NUMBERS), _MOST_NUMBERS):
        raise file.error(f"has {_PREFIX}{name} of {value.count} numbers, and {count} tokens")
    return file.numbers(f"{_PREFIX}{name}")[:count]


# Kinds of tokenizers.


def _byte_level(words: GgufVocabulary) -> Built:
    """Return BPE over bytes, each spelled as a character."""
    name = words.file.text(f"{_PREFIX}pre", "default")
    row = PRETOKENIZERS.get(name)
    if row is None:
        raise words.file.error(
            f"has {_PREFIX}pre {name[:80]!r}, which is not read; supported are {', '.join(PRETOKENIZERS)}: give a "
            "folder with the tokenizer"
        )
    merges = words.merges()
    if merges is None:
        raise words.file.error(f"has no {_PREFIX}merges")
    tokenizer = Tokenizer(models.BPE(words.ids(), merges, fuse_unk=False, ignore_merges=row.ignores_merges))
    if row.composes:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in row.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return Built(tokenizer, row.adds_bos)


def _sentencepiece(words: GgufVocabulary) -> Built:
    """Return sentencepiece's BPE: spaces are written, and other bytes are tokens of their own."""
    tokenizer = _spelled_out(words, merges=None)
    if words.flag("add_space_prefix", default=True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        strip = [decoders.Strip(" ", 1, 0)]
    else:
        strip = []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return Built(tokenizer, adds_bos=True)


def _gemma4(words: GgufVocabulary) -> Built:
    """Return the same with merges of its own. llama.cpp begins a text with bos; the original does not, since its chat
    template does."""
    tokenizer = _spelled_out(words, words.merges())
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return Built(tokenizer, adds_bos=False)


def _spelled_out(words: GgufVocabulary, merges: list[tuple[str, str]] | None) -> Tokenizer:
    ids = words.ids(_written)
    # Gemma's scores do not follow the order of its merges, which is that of the ids.
    by_id = words.file.architecture.startswith("gemma")
    if merges is None:
        merges = _recovered(words, ids, by_id=by_id)
    unknown = words.token("unknown")
    model = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    return tokenizer


def _written(token: str) -> str:
    """Return a token of spaces alone, which files have as they are, with the sign for a space."""
    return _SPACE * len(token) if token and not token.strip(" ") else token


def _recovered(words: GgufVocabulary, ids: dict[str, int], *, by_id: bool) -> list[tuple[str, str]]:
    """Return the merges of sentencepiece's tokens: all ways to make a token of two, the best tokens first."""
    found: list[tuple[float, int, int, int, str, str]] = []
    for number, (token, kind) in enumerate(zip(words.tokens, words.kinds, strict=True)):
        # A control token is never made of a text's letters, nor is one that stands for a byte.
        if kind not in (_NORMAL, _USER_DEFINED) or not 1 < len(token) <= _MOST_CHARS:
            continue
        token = _written(token)
        rank = float(number) if by_id else -float(words.scores[number])
        if by_id and kind == _USER_DEFINED:
            # Runs of white space, the longest first.
            rank = -1.0
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in ids and right in ids:
                # As transformers' converter orders them: of one token the longer first part comes first.
                found.append((rank, -len(left), -len(right), number, left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _unigram(words: GgufVocabulary) -> Built:
    """Return sentencepiece's unigram model: the likeliest tokens by their scores."""
    unknown = words.file.whole(f"{_PREFIX}unknown_token_id", 2, most=len(words.tokens) - 1)
    pairs = [(token, float(score)) for token, score in zip(words.tokens, words.scores, strict=True)]
    tokenizer = Tokenizer(models.Unigram(pairs, unk_id=unknown, byte_fallback="<0x00>" in words.ids()))
    steps: list[Any] = []
    if f"{_PREFIX}precompiled_charsmap" in words.file.facts:
        table = words.file.numbers(f"{_PREFIX}precompiled_charsmap")
        steps.append(normalizers.Precompiled(bytes(one & 255 for one in table)))
    if words.flag("remove_extra_whitespaces", default=False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if words.flag("add_space_prefix", default=True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    return Built(tokenizer, adds_bos=False)


_KINDS: dict[str, Callable[[GgufVocabulary], Built]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
    "t5": _unigram,
}


# Added tokens, and the ends of a text.


def _add_tokens(tokenizer: Tokenizer, words: GgufVocabulary) -> None:
    """Add the tokens that are found in a text before anything else: control tokens, and those that users defined."""
    known = tokenizer.get_vocab(with_added_tokens=False)
    # Phi-3's control tokens take the white space behind them.
    strips = words.file.architecture == "phi3" and words.file.text(f"{_PREFIX}model", "") == "llama"
    named = {words.token(fact) for fact in _SPECIAL.values()} - {None}
    control, others = [], []
    for token, kind in zip(words.tokens, words.kinds, strict=True):
        if token not in known:
            continue
        if kind == _CONTROL or token in named:
            rstrip = strips and kind == _CONTROL and token not in ("<unk>", "<s>", "<|endoftext|>")
            control.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip))
        elif kind == _USER_DEFINED:
            others.append(AddedToken(token, normalized=False, special=False))
    # One call for each: a call reads the whole vocabulary.
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(others)


def _begin_and_end(tokenizer: Tokenizer, words: GgufVocabulary, *, adds_bos: bool) -> None:
    """Begin a text with bos and end it with eos, where that is so."""
    is_gemma4 = words.file.text(f"{_PREFIX}model", "") == "gemma4"
    flags = {"bos": not is_gemma4 and words.flag("add_bos_token", default=adds_bos)}
    flags["eos"] = words.flag("add_eos_token", default=False)
    found = {name: words.token(name) for name, is_set in flags.items() if is_set}
    ends = {name: token for name, token in found.items() if token is not None}
    single = [*([ends["bos"]] if "bos" in ends else []), "$A", *([ends["eos"]] if "eos" in ends else [])]
    pair = [f"{one}:1" if one != "$A" else "$B:1" for one in single]
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(ends.values())]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=[*single, *pair], special_tokens=ids)


if __name__ == "__main__":
    limit_memory(_MEMORY_BYTES)
    # Any exception ends the process.
    write_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]))
