"""Text of an answer: what the output ids add to the prompt's text, by the library's one-shot decode alone.

Whatever the tokenizer, the cut between prompt and output, and the stop string: alone, in portions, after a resumption,
and as the engine and the router do it together.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
from factories.models.tokenizer_folders import (
    bundle_of,
    byte_fallback_tokenizer,
    conformance_data,
    demo_vocabulary,
    detokenizers_of,
    unigram_tokenizer,
    vocabulary_of,
    word_piece_tokenizer,
    write_folder,
)
from penstock.generation.core.request import FinishReason
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence as EngineSequence
from penstock.generation.engine.stopping import Stop, StopCriteria
from penstock.router.tokenizer.detokenize import Detokenizer as RouterDetokenizer
from penstock.text.text_decoder import TextDecoder
from penstock.text.token_bytes import TokenBytes, UnsupportedTokenizer
from penstock.tokenizer.decode_stream import DecodeLimits, DecodeSession
from penstock.tokenizer.detokenizer_factory import DetokenizerFactory
from penstock.tokenizer.tokenizer import TextTokenizer, Vocabulary
from penstock.v1 import tokenizer_pb2 as pb
from tokenizers import AddedToken, Tokenizer, decoders, normalizers

REPLACEMENT = "\ufffd"
# Seeded triples of each kind: some in every run, and those of `make slow`, which are 14 000 over all.
QUICK, MANY = 150, int(os.environ.get("PENSTOCK_ANSWER_TRIPLES", "2000"))
WORDS = [
    "hello", " hello", " world", "\n", "\n\n", " ", "  ", "d", "é", "你", "你好", "鎽龥", "👨\u200d👩\u200d👧", "👍🏽",
    ".", " .", " '", "'", "s", " n't", "def f(x):\n", "Answer:\n", "<s>", "<SP>", "Ñand", "x",
]  # fmt: skip
BYTES = [*"你鎽龥é👍".encode(), 0x20, 0x0A, 0x41, 0xFF, 0xC3]
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Kind:
    """One tokenizer with all that decodes for it."""

    vocabulary: Vocabulary
    factory: DetokenizerFactory
    text: TextTokenizer
    # None where the engine knows no stop strings.
    stop_text: TokenBytes | None

    def decode(self, ids: Sequence[int], skip: bool) -> str:
        return self.text.decode([ids], skip)[0]

    def byte_of(self, token_id: int) -> bytes | None:
        """Return the byte of a byte-fallback token."""
        found = BYTE_TOKEN.fullmatch(self.vocabulary.tokenizer.id_to_token(token_id) or "")
        return bytes([int(found[1], 16)]) if found and self.factory.kind == "byte_fallback" else None


def plain(make: Callable[[], Tokenizer], *, lower: bool = True, **options: object) -> Vocabulary:
    """Make a tokenizer with special tokens that are normalized, which changes one of them."""
    tokenizer = make()
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken(text, normalized=True) for text in ("<SP>", "<t>")])
    tokenizer.add_tokens([AddedToken("Ñand", normalized=True, special=False)])
    return vocabulary_of(tokenizer, **options)


def gemma_like() -> Tokenizer:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def byte_level() -> Tokenizer:
    return Tokenizer.from_str(demo_vocabulary().tokenizer.to_str())


VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {
    "byte_fallback": partial(plain, byte_fallback_tokenizer),
    "byte_fallback_unstripped": partial(plain, gemma_like, lower=False),
    "byte_level": partial(plain, byte_level),
    "byte_level_cleaned_up": partial(plain, byte_level, lower=False, clean_up_tokenization_spaces=True),
    "unigram": partial(plain, unigram_tokenizer),
    "word_piece": partial(plain, word_piece_tokenizer),
    "word_piece_cleaned_up": partial(plain, word_piece_tokenizer, clean_up_tokenization_spaces=True),
}
REAL = ["mistral-7b", "qwen2.5"]


@cache
def real_vocabulary(name: str) -> Vocabulary:
    return Vocabulary(bundle_of(conformance_data() / "tokenizers" / name))


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    name = request.param
    vocabulary = VOCABULARIES[name]() if name in VOCABULARIES else real_vocabulary(name)
    return kind_of(vocabulary, tmp_path)


def kind_of(vocabulary: Vocabulary, folder: Path) -> Kind:
    try:
        stop_text = TokenBytes.from_folder(write_folder(folder / "model", vocabulary.tokenizer, {}))
    except UnsupportedTokenizer:
        stop_text = None
    if vocabulary.bundle.clean_up_tokenization_spaces:
        stop_text = None
    return Kind(vocabulary, detokenizers_of(vocabulary), TextTokenizer(vocabulary), stop_text)


@dataclass(frozen=True)
class Triple:
    """A prompt, the output after it, and a stop string or none."""

    prompt: list[int]
    output: list[int]
    stop: str | None
    skip: bool
    # The text that the output adds to the prompt's.
    added: str


def draw(kind: Kind, rng: random.Random) -> Triple:
    ids = [token for _ in range(rng.randint(1, 4)) for token in portion(kind, rng)]
    if rng.random() < 0.1:  # longer than the context that a DecodeStream is given
        ids = portion(kind, rng) * 40 + ids
    cut, skip = rng.randint(0, len(ids)), rng.random() < 0.8
    prompt, output = ids[:cut], ids[cut:]
    added = added_text(kind, prompt, output, skip)
    return Triple(prompt, output, draw_stop(kind, rng, prompt, added, skip), skip, added)


def portion(kind: Kind, rng: random.Random) -> list[int]:
    """Draw some ids: of words, of bytes, or any."""
    tokenizer, limit = kind.vocabulary.tokenizer, kind.vocabulary.bundle.id_limit
    how = rng.random()
    if how < 0.6:
        text = "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))
        return list(tokenizer.encode(text, add_special_tokens=rng.random() < 0.3).ids)
    if how < 0.8:
        wanted = [tokenizer.token_to_id(f"<0x{rng.choice(BYTES):02X}>") for _ in range(rng.randint(1, 6))]
        return [token for token in wanted if token is not None]
    added = sorted(tokenizer.get_added_tokens_decoder())
    return [rng.choice(added) if rng.random() < 0.3 else rng.randrange(limit) for _ in range(rng.randint(1, 6))]


def draw_stop(kind: Kind, rng: random.Random, prompt: list[int], added: str, skip: bool) -> str | None:
    how = rng.random()
    if how < 0.2:
        return None
    source = added if how < 0.7 else kind.decode(prompt, skip)[-4:] + added[:2] if how < 0.85 else rng.choice(WORDS)
    begin = rng.randrange(len(source) + 1)
    stop = source[begin : begin + rng.randint(1, 4)]
    # Incomplete characters are no text that a request could ask for.
    return None if not stop or REPLACEMENT in stop else stop


def added_text(kind: Kind, prompt: list[int], output: list[int], skip: bool) -> str:
    """Return what the output adds, from decoding prompt and output at once."""
    whole, before = kind.decode([*prompt, *output], skip), kind.decode(prompt, skip)
    if kind.factory.kind == "byte_fallback":
        place, run, rest = run_between(kind, prompt, output, skip)
        if run and rest:
            if not is_text(run + rest):
                return whole[len(kind.decode(prompt[:place], skip)) + len(run) :]
            characters = run.decode(errors="ignore").encode()
            byte_ids = [kind.vocabulary.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in characters]
            return whole[len(kind.decode([*prompt[:place], *byte_ids], skip)) :]
    if whole.startswith(before):
        return whole[len(before) :]
    return after(whole, before.removesuffix(REPLACEMENT))


def run_between(kind: Kind, prompt: list[int], output: list[int], skip: bool) -> tuple[int, bytes, bytes]:
    """Return the run of byte tokens around the seam: its place in the prompt, the prompt's bytes and the output's."""
    return *run_at_end(kind, prompt, skip), run_at_end(kind, output[::-1], skip)[1][::-1]


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def run_at_end(kind: Kind, ids: list[int], skip: bool) -> tuple[int, bytes]:
    """Return the place and the bytes of the run of byte tokens that `ids` end with; skipped ids do not end it."""
    special, run, place = set(kind.vocabulary.special_ids), b"", len(ids)
    for token in reversed(ids):
        byte = kind.byte_of(token)
        if byte is None and not (skip and token in special) and kind.vocabulary.tokenizer.id_to_token(token):
            break
        run, place = (byte or b"") + run, place - 1
    return place, run


def after(whole: str, before: str) -> str:
    """Return `whole` after `before`, of which the clean-up of spaces took some."""
    place = 0
    for character in before.rstrip(" ").replace(" ", ""):
        place = whole.index(character, place) + 1
    for _ in range(len(before) - len(before.rstrip(" "))):
        place += whole[place : place + 1] == " "
    return whole[place:]


def cut_at(stop: str | None, text: str) -> str:
    place = -1 if stop is None else text.find(stop)
    return text if place < 0 else text[:place]


def portions(rng: random.Random, ids: list[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if rng.random() < 0.7:
            parts.append([])
        parts[-1].append(token)
    return parts


def decoder_of(kind: Kind, triple: Triple, *, stop: bool, whole_prompt: bool = True) -> TextDecoder:
    """Make the decoder of the triple's answer, as the router does unless it gets the whole prompt."""
    decoder = TextDecoder(kind.factory.make(triple.skip), [triple.stop] if stop and triple.stop else [], False)
    context: Sequence[int] = triple.prompt
    if not whole_prompt:
        router = RouterDetokenizer(max_outstanding=1)
        if kind.factory.table is not None:
            router.use_table(kind.factory.table)
        context = router.context(triple.prompt, triple.skip)
    decoder.replay(context, (), is_cut=len(context) < len(triple.prompt))
    return decoder


def run(decoder: TextDecoder, parts: list[list[int]], matched: str | None = None) -> str:
    texts = [decoder.push(part) for part in parts]
    if decoder.stops is not None:
        texts = [decoder.stops.push(text).text for text in texts]
    return "".join([*texts, decoder.finish("", matched).text])


def streamed(kind: Kind, triple: Triple, parts: list[list[int]], resumed: int) -> str:
    """Decode by DecodeStream; after `resumed` parts another one goes on."""
    opened = pb.DecodeStreamOpen(prefix_token_ids=triple.prompt, skip_special_tokens=triple.skip)
    opened.stop_strings.extend([triple.stop] if triple.stop else [])
    text = ""
    for first, last, is_end in ((0, resumed, False), (resumed, len(parts), True)):
        session = DecodeSession(
            kind.factory, DecodeLimits(), serves=lambda _: True, id_limit=kind.vocabulary.bundle.id_limit
        )
        items = [pb.DecodeStreamItem(stream_id=1, token_ids=part) for part in parts[first:last]]
        if is_end:
            items.append(pb.DecodeStreamItem(stream_id=1, finish=True))
        if items:
            items[0].open.CopyFrom(opened)
            items[0].open.resumed_token_ids.extend(token for part in parts[:first] for token in part)
        for item in items:
            result = session.process(pb.DecodeStreamRequest(items=[item])).results[0]
            assert not result.error
            text += result.text
    return text


def engine_end(stop_text: TokenBytes, triple: Triple) -> tuple[list[int], Stop | None]:
    """Return the output up to where the engine ends it."""
    params = SamplingParams(1 << 20, stop_strings=(triple.stop,), skip_special_tokens=triple.skip)  # type: ignore[arg-type]
    criteria = StopCriteria(params, 1 << 20, stop_text, triple.prompt)
    sequence = EngineSequence(0, 0, params, 0, list(triple.prompt), len(triple.prompt))
    state = criteria.new_state()
    for count, token in enumerate(triple.output, 1):
        sequence.token_ids.append(token)
        stop = criteria.check(sequence, state)
        if stop is not None:
            return triple.output[:count], stop
    return triple.output, None


def check(kind: Kind, triple: Triple, rng: random.Random) -> None:
    parts = portions(rng, triple.output)
    wanted = cut_at(triple.stop, triple.added)
    assert run(decoder_of(kind, triple, stop=False), [triple.output]) == triple.added, "alone"
    if not is_all_quotes(kind, triple):
        assert run(decoder_of(kind, triple, stop=False, whole_prompt=False), parts) == triple.added, "context cut"
    assert run(decoder_of(kind, triple, stop=True), parts) == wanted, "stop string"
    assert streamed(kind, triple, parts, rng.randint(0, len(parts))) == wanted, "resumed"
    check_echo(kind, triple, parts)
    if kind.stop_text is not None and triple.stop is not None:
        # What tokens stand for in the engine is read from the file, where no token is normalized.
        normalized = set(range(*added_range(kind)))
        if not normalized & {*triple.prompt, *triple.output}:
            output, end = engine_end(kind.stop_text, triple)
            added = added_text(kind, triple.prompt, output, triple.skip)
            assert (triple.stop in added) == (end is not None and end.reason is FinishReason.STOP_STRING), "engine"
            answer = run(decoder_of(kind, triple, stop=True, whole_prompt=False), [output], end and end.string)
            assert answer == cut_at(triple.stop, added), "engine's end"


def is_all_quotes(kind: Kind, triple: Triple) -> bool:
    """True where the clean-up pairs off spaces around quotes from before the context that a DecodeStream is given."""
    cleans_up = kind.vocabulary.bundle.clean_up_tokenization_spaces
    return cleans_up and not kind.decode(triple.prompt[-64:], triple.skip).strip(" '")


def check_echo(kind: Kind, triple: Triple, parts: list[list[int]]) -> None:
    """Check that the echo of ids and the answer are one text, unless the output makes the prompt's bytes invalid."""
    _, before, rest = run_between(kind, triple.prompt, triple.output, triple.skip)
    if before and not is_text(before + rest) and before.decode(errors="ignore"):
        return
    echo = kind.factory.make(triple.skip).begin(triple.prompt)
    decoder = TextDecoder(kind.factory.make(triple.skip), [], False)
    decoder.replay(triple.prompt, (), with_open_end=True)
    whole = kind.decode([*triple.prompt, *triple.output], triple.skip)
    if whole.startswith(echo):
        assert echo + run(decoder, parts) == whole, "echo"
    else:
        assert kind.vocabulary.bundle.clean_up_tokenization_spaces, "echo"


def added_range(kind: Kind) -> tuple[int, int]:
    tokenizer = kind.vocabulary.tokenizer
    first = tokenizer.token_to_id("<SP>")
    return (0, 0) if first is None else (first, tokenizer.get_vocab_size())


@pytest.mark.parametrize("kind", VOCABULARIES, indirect=True)
def test_an_answer_is_what_its_ids_add_to_the_prompt(kind: Kind) -> None:
    check_many(kind, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", VOCABULARIES, indirect=True)
def test_many_answers_are_what_their_ids_add_to_the_prompt(kind: Kind) -> None:
    check_many(kind, MANY)


@pytest.mark.slow
@pytest.mark.conformance
@pytest.mark.parametrize("kind", REAL, indirect=True)
def test_many_answers_of_real_tokenizers_are_what_their_ids_add_to_the_prompt(kind: Kind) -> None:
    check_many(kind, MANY)


@pytest.mark.thinned(2)
@pytest.mark.conformance
@pytest.mark.parametrize("kind", REAL, indirect=True)
def test_answers_of_real_tokenizers_are_what_their_ids_add_to_the_prompt(kind: Kind) -> None:
    check_many(kind, QUICK)


def check_many(kind: Kind, count: int) -> None:
    for seed in range(count):
        rng = random.Random(seed)
        triple = draw(kind, rng)
        try:
            check(kind, triple, rng)
        except AssertionError as error:
            tokens = [
                [kind.vocabulary.tokenizer.id_to_token(one) for one in ids] for ids in (triple.prompt, triple.output)
            ]
            raise AssertionError(f"seed {seed}: {tokens}, stop {triple.stop!r}, skip {triple.skip}: {error}") from None
