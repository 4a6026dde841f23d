"""Token healing against transformers' heal_tokens (5.23) on the demo model, and in every mode on a tiny one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import engine_config, request
from factories.engine.model_engine import answer_alone, check_company, load_tiny
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from penstock.generation.core.decoding_mode import GuidanceOptions
from penstock.generation.core.request import Request, TokenHealingOptions
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.decoding.parallel_sampling import DolaOptions
from penstock.generation.models.decoder import CausalLM
from penstock.text.token_bytes import TokenBytes, TokenPrefixes
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

DEMO = Path(__file__).parents[3] / "services" / "penstock" / "assets" / "demo"
# Each ends inside a word, or where a longer token could stand.
TEXTS = (
    "The capital of Fra", "What is the col", "My name is", "Count from one to t", "How many day", "Tell me a stor",
    "The opposite of hot i", "Please rever", "the sum of tw", "A week has sev", "Hello", "an", "Translate the wor",
    "What comes after Mon", "Once upon a tim", "1, 2, 3, 4", "What is 2 + 2", "red, green, bl", "Say hello to Ali",
)  # fmt: skip


def with_healing(item: Request, prefixes: TokenPrefixes) -> Request:
    """Return `item` with token healing, as the generation service makes it."""
    last = item.prompt_token_ids[-1]
    token_ids = prefixes.extensions(last)
    if len(item.prompt_token_ids) < 2 or len(token_ids) < 2:
        return item
    return replace(item, token_healing=TokenHealingOptions(token_ids, partial(prefixes.added_text, last)))


def helpful_tokenizer() -> Any:
    """The demo tokenizer with what heal_tokens relies on and Qwen's class lacks: a BOS (no prompt here has it), without
    which it raises, and a token for " ", without which it finds no extensions of words that follow a space."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.bos_token = "<|im_start|>"
    convert = tokenizer.convert_tokens_to_ids
    tokenizer.convert_tokens_to_ids = lambda tokens: convert("Ġ" if tokens == " " else tokens)
    return tokenizer


def test_prompts_are_healed_as_by_transformers() -> None:
    tokenizer = helpful_tokenizer()
    reference = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    # It generates by the model's own defaults, sampling included.
    reference.generation_config = GenerationConfig()
    model, prefixes = load_tiny(DEMO), TokenPrefixes(TokenBytes.from_folder(DEMO))
    changed = 0
    for text in TEXTS:
        prompt = tokenizer(text).input_ids
        theirs = reference.heal_tokens(torch.tensor([prompt]), tokenizer)[0].tolist()
        answer = answer_alone(model, with_healing(request(prompt, max_new_tokens=8), prefixes))
        assert answer.started is not None
        healed = prompt if answer.started.healed is None else [*prompt[:-1], answer.started.healed[0]]
        if theirs[-1] in prefixes.extensions(prompt[-1]):
            assert healed == theirs
        else:
            # Theirs are only made likelier by the bias: here the text of the prompt stands.
            assert tokenizer.decode(healed).startswith(text)
        if answer.started.healed is not None:
            assert tokenizer.decode(healed) == text + answer.started.healed[1]
        changed += healed != prompt
        assert answer.ids == answer_alone(model, request(healed, max_new_tokens=8)).ids
    assert changed >= 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_tiny(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", seed=31, num_hidden_layers=3))


# Id i spells one to three letters, so that most have extensions.
TABLE = TokenBytes({one: b"".join(b"%c" % (97 + one // 7**place % 7) for place in range(1 + one % 3)) for one in range(VOCAB_SIZE)}, special=[0, 1])  # fmt: skip # noqa: E501
PREFIXES = TokenPrefixes(TABLE)
PROMPT = [17, 203, 44, 9, 118, 60, 7, 6]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "num_return_sequences": 3, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "guidance": {"guidance": GuidanceOptions(1.6, (4, 5)), "num_return_sequences": 2, "do_sample": True},
    "guidance without a negative prompt": {"guidance": GuidanceOptions(1.6, ())},
    "dola": {"mode": DolaOptions((0, 2))},
    "contrastive": {"mode": ContrastiveOptions(0.6, 4)},
    "beams": {"mode": BeamOptions(num_beams=3), "num_return_sequences": 2},
    "beam sampling": {"mode": BeamOptions(num_beams=3), "do_sample": True},
    "group beams": {"mode": BeamOptions(num_beams=4, num_beam_groups=2, diversity_penalty=0.5)},
    "prompt lookup": {"mode": AssistanceOptions(prompt_lookup_num_tokens=3)},
}


def requests(*, healing: bool) -> list[Request]:
    items = [
        request(PROMPT, request_id=name, max_new_tokens=9, eos_token_ids=(1,), **options)
        for name, options in MODES.items()
    ]
    return [with_healing(item, PREFIXES) for item in items] if healing else items


def test_the_prompt_of_these_tests_is_changed(model: CausalLM) -> None:
    started = answer_alone(model, requests(healing=True)[0]).started
    assert started is not None
    assert started.healed is not None
    assert started.healed[0] != PROMPT[-1]
    assert started.healed[1] == (TABLE.bytes_of(started.healed[0])[len(TABLE.bytes_of(PROMPT[-1])) :]).decode()


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_what_it_gives_on_the_healed_prompt(model: CausalLM, mode: str) -> None:
    (item,) = [one for one in requests(healing=True) if one.request_id == mode]
    answer = answer_alone(model, item)
    assert answer.started is not None
    assert answer.started.healed is not None
    (plain,) = [one for one in requests(healing=False) if one.request_id == mode]
    expected = answer_alone(model, replace(plain, prompt_token_ids=[*PROMPT[:-1], answer.started.healed[0]]))
    assert answer.ids == expected.ids
    assert answer.finished is not None
    assert expected.finished is not None
    for one, other in zip(answer.finished.sequences, expected.finished.sequences, strict=True):
        assert replace(one, cumulative_logprob=None) == replace(other, cumulative_logprob=None)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(engine_config(max_running_sequences=32, num_blocks=200), marks=pytest.mark.slow),
        engine_config(num_blocks=40, block_size=3, max_running_sequences=16, max_batch_tokens=16, reserve_share=0.0),
    ],
    ids=["roomy", "preempted"],
)
def test_the_same_ids_alone_and_in_any_company(model: CausalLM, config: EngineConfig) -> None:
    engine = check_company(model, partial(requests, healing=True), config)
    assert (engine.stats.preemptions > 0) == (config.num_blocks == 40)
