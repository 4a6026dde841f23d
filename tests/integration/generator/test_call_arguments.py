"""generate() in process takes what transformers' generate() takes: tensors, objects, draft models, held prefixes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.local_generators import local_generator
from penstock import Generator
from penstock.common.errors import FailedPrecondition, Internal, InvalidArgument, ResourceExhausted
from penstock.common.hf_fields import REFUSED, WITHOUT_EFFECT
from penstock.generation.core.cache_group import FIRST_BUNDLES
from penstock.generation.host.small_pages import has_small_pages
from penstock.generation.startup.draft_model import DraftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteriaList,
    TopKLogitsWarper,
)

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
TEXT, LONGER = "Penstock serves", "A text that is much longer than the other one"


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    made = AutoTokenizer.from_pretrained(folder)
    made.pad_token, made.padding_side = made.pad_token or made.eos_token, "left"
    return made


def expected(model: Any, encoded: Any, **options: Any) -> list[list[int]]:
    """Return what transformers generates, without the prompts."""
    whole = model.generate(**encoded, **{**GREEDY, **options})
    return [row.tolist() for row in whole[:, encoded["input_ids"].shape[1] :]]


def ids_of(answers: Any) -> list[list[int]]:
    return [one.token_ids for one in answers]


@pytest.mark.parametrize("texts", [[TEXT], [TEXT, LONGER], [LONGER, TEXT, TEXT]])
def test_a_tokenizers_answer_is_taken_as_it_is(generator: Generator, model: Any, tokenizer: Any, texts: Any) -> None:
    encoded = tokenizer(texts, return_tensors="pt", padding=True)
    wanted = expected(model, encoded)
    assert ids_of(generator.generate(**encoded, **GREEDY)) == wanted
    assert ids_of(generator.generate(encoded, **GREEDY)) == wanted
    positions = (encoded["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    assert ids_of(generator.generate(**encoded, position_ids=positions, **GREEDY)) == wanted
    plain = {name: value.tolist() for name, value in encoded.items()}
    assert ids_of(generator.generate(**plain, **GREEDY)) == wanted


def test_one_row_of_ids_is_one_answer(generator: Generator, tokenizer: Any) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    answer = generator.generate(input_ids=ids, attention_mask=[1] * len(ids), **GREEDY)
    assert answer.token_ids == generator.generate(ids, **GREEDY).token_ids


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_ids": [5, 6], "attention_mask": [1, 0]}, "'attention_mask': must be ones, behind zeros"),
        ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "'attention_mask': must have a one"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "'attention_mask': must have the shape of input_ids"),
        ({"input_ids": [5, 6], "attention_mask": "ones"}, "'attention_mask': must be whole numbers"),
        ({"input_ids": [5, 6], "position_ids": [0, 2]}, "'position_ids': must count the tokens"),
        ({"attention_mask": [1, 1]}, "'attention_mask': goes with input_ids"),
        ({"prompt": "x", "input_ids": [5]}, "'input_ids': the prompt is given twice"),
        ({"prompt": "x", "logits_processor": [3]}, "'logits_processor': an entry must be an object"),
        ({"prompt": "x", "stopping_criteria": [object()]}, "'stopping_criteria': an entry must be an object"),
        ({"prompt": "x", "streamer": 1}, "'streamer': must have the methods put and end"),
        ({"prompt": "x", "prefix_allowed_tokens_fn": 1}, "'prefix_allowed_tokens_fn': must be a function"),
        ({"prompt": "x", "assistant_model": object()}, "'assistant_model': must be the name"),
        ({"prompt": "x", "past_key_values": object()}, "'past_key_values': must be what Generator.hold_prefix"),
        ({"prompt": "x", "generation_config": 3}, "generation_config: must be transformers' GenerationConfig"),
        *(({"prompt": "x", name: 1}, f"'{name}': ") for name in REFUSED),
    ],
)
def test_an_argument_that_cannot_be_taken_is_named(generator: Generator, arguments: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        generator.generate(**arguments)


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
@pytest.mark.parametrize("form", ["keyword", "mapping", "config"])
def test_a_field_of_caches_and_compilers_warns_in_every_form(generator: Generator, name: str, form: str) -> None:
    value: Any = "static" if name == "cache_implementation" else 3
    if form == "keyword":
        answer = generator.generate(TEXT, max_new_tokens=1, **{name: value})
    elif form == "mapping":
        answer = generator.generate(TEXT, {name: value}, max_new_tokens=1)
    else:
        config = GenerationConfig(max_new_tokens=1)
        setattr(config, name, value)
        if name not in config.to_diff_dict():
            pytest.skip("it is an argument of generate() and no field of its configuration")
        answer = generator.generate(TEXT, config)
    assert [one for one in answer.warnings if one.startswith(f"{name} has no effect: ")], answer.warnings


def test_a_configuration_with_its_cache_off_warns(generator: Generator) -> None:
    answer = generator.generate(TEXT, GenerationConfig(max_new_tokens=1, use_cache=False))
    assert any("use_cache has no effect" in one for one in answer.warnings)


def test_processors_and_criteria_may_be_objects(generator: Generator, model: Any, tokenizer: Any) -> None:
    encoded = tokenizer([TEXT], return_tensors="pt")
    first = expected(model, encoded)[0][0]

    def ban(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, first] = -torch.inf
        return scores

    def short(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.tensor([ids.shape[1] >= encoded["input_ids"].shape[1] + 3])

    objects: dict[str, Any] = {
        "logits_processor": LogitsProcessorList([ban, TopKLogitsWarper(5)]),  # type: ignore[list-item]
        "stopping_criteria": StoppingCriteriaList([short]),  # type: ignore[list-item]
    }
    wanted = expected(model, encoded, **objects)
    answer = generator.generate(**encoded, **objects, **GREEDY)[0]
    assert [answer.token_ids] == wanted
    assert len(answer.token_ids) == 3
    assert answer.finish_reason == "STOP_CRITERIA"
    assert generator.generate(TEXT, logits_processor=ban, **GREEDY).token_ids[0] != first


def test_processors_of_transformers_work_in_beams_and_sampling(
    generator: Generator, model: Any, tokenizer: Any
) -> None:
    encoded = tokenizer([TEXT], return_tensors="pt")
    length = encoded["input_ids"].shape[1]
    minimum = LogitsProcessorList([MinNewTokensLengthLogitsProcessor(length, 8, [0, 1, 2])])
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        wanted = expected(model, encoded, logits_processor=minimum, **options)
        answer = generator.generate(**encoded, logits_processor=minimum, **options, **GREEDY)[0]
        assert [choice.token_ids for choice in answer.choices] == wanted


@pytest.mark.parametrize("beams", [1, 3])
def test_allowed_tokens_may_depend_on_row_and_prefix(
    generator: Generator, model: Any, tokenizer: Any, beams: int
) -> None:
    encoded = tokenizer([TEXT, LONGER], return_tensors="pt", padding=True)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [11, 12, 13] if row else [21 + int(ids[-1]) % 3, 31, 32]

    options = {"prefix_allowed_tokens_fn": allowed, "num_beams": beams}
    assert ids_of(generator.generate(**encoded, **options, **GREEDY)) == expected(model, encoded, **options)


def test_an_exception_of_a_callers_object_reaches_the_caller(generator: Generator) -> None:
    def broken(ids: torch.Tensor, scores: Any) -> Any:
        raise LookupError("the caller's own words")

    for options in ({"logits_processor": [broken]}, {"stopping_criteria": [broken]}):
        with pytest.raises(Internal, match="plugin function raised LookupError") as caught:
            generator.generate(TEXT, **options, **GREEDY)
        assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(Internal, match="prefix_allowed_tokens_fn raised ValueError"):
        generator.generate(TEXT, prefix_allowed_tokens_fn=lambda row, ids: [], **GREEDY)
    assert len(generator.generate(TEXT, **GREEDY).token_ids) == 8


class Streamer:
    """A streamer that writes down what it is given."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.ids: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.shapes.append(tuple(value.shape))
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_what_transformers_gives_it(generator: Generator, model: Any, tokenizer: Any) -> None:
    encoded = tokenizer([TEXT], return_tensors="pt")
    theirs, ours = Streamer(), Streamer()
    model.generate(**encoded, streamer=theirs, **GREEDY)
    generator.generate(**encoded, streamer=ours, **GREEDY)
    assert (ours.shapes, ours.ids, ours.ended) == (theirs.shapes, theirs.ids, 1)
    with pytest.raises(ValueError, match="'streamer'"):
        generator.generate(TEXT, streamer=Streamer(), num_beams=2)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "seed": 5}])
def test_a_draft_model_may_be_an_object_or_a_folder(
    generator: Generator, model: Any, folder: Path, sampling: dict[str, Any]
) -> None:
    options = {**GREEDY, **sampling, "max_new_tokens": 20, "ignore_eos": True}
    wanted = generator.generate(TEXT, **options).token_ids
    drafting = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    for assistant in (model, str(folder), folder):
        answer = generator.generate(TEXT, assistant_model=assistant, **drafting, **options)
        assert answer.token_ids == wanted
        assert answer.warnings == ()
        if not sampling:
            # It drafts what the model itself draws.
            assert answer.usage.accepted_draft_tokens > 12
            assert answer.usage.rejected_draft_tokens == 0


def test_a_draft_model_with_another_tokenizer_drafts_by_text(generator: Generator, model: Any, tokenizer: Any) -> None:
    class Shouting:
        """Another tokenizer: ids turned around."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [*reversed(tokenizer.encode(text, add_special_tokens=False))]

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    wanted = generator.generate(TEXT, **GREEDY).token_ids
    assert generator.generate(TEXT, assistant_model=model, assistant_tokenizer=Shouting(), **GREEDY).token_ids == wanted
    answer = generator.generate(TEXT, assistant_model=model, assistant_tokenizer=tokenizer, **GREEDY)
    assert answer.token_ids == wanted
    assert answer.usage.accepted_draft_tokens


def test_a_folder_that_is_no_model_is_named(generator: Generator, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"'assistant_model': {tmp_path} cannot be read"):
        generator.generate(TEXT, assistant_model=str(tmp_path))


@pytest.mark.parametrize("rows", [[[0, 0, 5, 6, 7, 8]], [[0, 0, 0, 9], [5, 6, 7, 8]], [[5, 6, 7]]])
def test_padding_without_a_mask_is_what_transformers_infers(generator: Generator, model: Any, rows: Any) -> None:
    ids, ends = torch.tensor(rows), [1, 2]
    wanted = expected(model, {"input_ids": ids}, pad_token_id=0, eos_token_id=ends)
    asked = {**GREEDY, "pad_token_id": 0, "eos_token_id": ends}
    for answers in (generator.generate(input_ids=ids, **asked), generator.generate(ids, **asked)):
        assert [row + [0] * (len(wanted[0]) - len(row)) for row in ids_of(answers)] == wanted
    # One that ends a sequence is no padding, and a mask says otherwise.
    for more in ({"eos_token_id": [0, 1]}, {"attention_mask": torch.ones_like(ids)}):
        asked = {"pad_token_id": 0, "eos_token_id": ends, **more}
        answers = generator.generate(input_ids=ids, **{**GREEDY, **asked})
        wanted = expected(model, {"input_ids": ids}, **asked)
        assert [row + [0] * (len(wanted[0]) - len(row)) for row in ids_of(answers)] == wanted


def test_padding_in_the_middle_is_named(generator: Generator) -> None:
    for ids in ([[5, 0, 6]], [[5, 0]], [[0, 0]]):
        with pytest.raises(ValueError, match="'input_ids': has pad_token_id 0 behind other tokens"):
            generator.generate(input_ids=ids, pad_token_id=0, eos_token_id=2)


def test_a_stream_takes_what_generate_takes_of_one_prompt(generator: Generator, tokenizer: Any) -> None:
    encoded = tokenizer(TEXT, return_tensors="pt")
    wanted = generator.generate(TEXT, **GREEDY).token_ids
    ids = encoded["input_ids"]
    for arguments in ({**encoded}, {"input_ids": ids}, {"prompt": encoded}, {"prompt": ids}, {"prompt": ids.tolist()}):
        assert generator.stream(**arguments, **GREEDY).result().token_ids == wanted
    for prompt in ([TEXT, LONGER], torch.ones((2, 3), dtype=torch.int64), 5):
        with pytest.raises(InvalidArgument, match="prompt: must be a text, a list of ids"):
            generator.stream(prompt)
    with generator.hold_prefix(ids) as handle:
        assert handle.token_ids == tuple(ids[0].tolist())


def test_a_streamer_that_nobody_would_call_is_refused(generator: Generator) -> None:
    for begin in (
        lambda: generator.stream(TEXT, streamer=Streamer()),
        lambda: generator.generate_many([TEXT], streamer=Streamer()),
        lambda: generator.init_continuous_batching().add_request([5], streamer=Streamer()),
    ):
        with pytest.raises(ValueError, match="'streamer'"):
            begin()
    ((_, answer),) = generator.generate_each([(TEXT, {"streamer": Streamer()})])
    assert isinstance(answer, ValueError)


def test_words_are_about_what_the_caller_gave(generator: Generator) -> None:
    with pytest.raises(InvalidArgument, match=r"^best_of: must be"):
        generator.generate(TEXT, best_of=10**6, do_sample=True, max_new_tokens=2)
    answer = generator.generate(TEXT, **GREEDY)
    with pytest.raises(ValueError, match="'output_scores'"):
        generator.compute_transition_scores(answer)
    with pytest.raises(TypeError, match="'attention_mask': goes with input_ids"):
        generator.generate(5, attention_mask=[1])  # type: ignore[call-overload]
    for items, place in (([("a", [-1])], "continuation"), ([("a", 5)], "continuation"), ([([-1], "a")], "prompt")):
        with pytest.raises(InvalidArgument, match=rf"items\[0\]\.{place}: must be a text or a list of ids"):
            generator.score(items)  # type: ignore[arg-type]
    assert generator.tokenizer is not None
    assert generator.tokenizer.token_text(10**6) == ("", b"")


def test_a_prefix_is_refused_at_once_while_a_request_is_live(generator: Generator) -> None:
    with generator.stream(TEXT, max_new_tokens=4000, ignore_eos=True) as live:
        next(live)
        with pytest.raises(FailedPrecondition) as caught:
            generator.hold_prefix([5, 6, 7])
        assert caught.value.reason == "BUSY"
    generator.hold_prefix([5, 6, 7]).close()


def test_a_held_prefix_outlives_the_pools_need(generator: Generator) -> None:
    prefix = list(range(100, 165))
    with generator.hold_prefix(prefix) as handle:
        assert handle.get_seq_length() == 65
        assert handle.num_held_tokens == 64
        plain = generator.generate([*prefix, 7, 8], **GREEDY)
        generator.clear_cache()
        answer = generator.generate([*prefix, 7, 8], past_key_values=handle, **GREEDY)
        assert answer.token_ids == plain.token_ids
        assert answer.usage.cached_tokens == 64
        for wrong in ([*prefix[1:], 7], prefix):
            with pytest.raises(InvalidArgument, match="past_key_values: the prompt must be its 65 tokens"):
                generator.generate(wrong, past_key_values=handle)
        generator._engine.on_engine(lambda engine: engine.check_integrity())
    with pytest.raises(InvalidArgument, match="past_key_values: is closed"):
        generator.generate([*prefix, 7], past_key_values=handle)
    assert generator.clear_cache() >= 4
    assert generator.generate([*prefix, 7, 8], **GREEDY).usage.cached_tokens == 0


def test_a_held_prefix_is_given_back_by_the_garbage_collector_and_refused_without_a_cache(folder: Path) -> None:
    with local_generator(folder) as made:
        handle = made.hold_prefix(list(range(64)))
        made.clear_cache()
        assert made._engine.on_engine(lambda engine: engine.load().kv_blocks_used) == 4
        del handle
        assert made._engine.on_engine(lambda engine: engine.load().kv_blocks_used) == 0
    with local_generator(folder, prefix_cache=False) as made, pytest.raises(FailedPrecondition) as caught:
        made.hold_prefix([1, 2, 3])
    assert caught.value.reason == "NO_PREFIX_CACHE"


@pytest.mark.skipif(not has_small_pages(), reason="this system cannot make large pages of small ones")
def test_the_pool_gets_large_pages_before_more_than_its_first_blocks_are_used(folder: Path) -> None:
    with local_generator(folder, kv_memory="1MiB") as made:
        pool = made._engine.loaded.pools.kv
        room = FIRST_BUNDLES * pool.block_size
        made.generate([5] * (room - 8), **GREEDY)
        assert pool._small
        made.generate([7] * room, **GREEDY)
        assert not pool._small


@pytest.mark.skipif(not has_small_pages(), reason="this system cannot make large pages of small ones")
def test_a_draft_models_pool_does_so_too(folder: Path) -> None:
    with local_generator(
        folder, kv_memory="2MiB", assistant_model=str(folder), assistant_kv_memory="1MiB", dtype="float32"
    ) as made:
        draft = made._engine.loaded.engine.draft
        assert isinstance(draft, DraftModel)
        room = FIRST_BUNDLES * draft.kv.block_size
        made.generate([5] * (room - 20), assistant_model=draft.name, **GREEDY)
        assert draft.kv._small
        made.generate([7] * room, assistant_model=draft.name, **GREEDY)
        assert not draft.kv._small


def test_a_held_prefix_of_more_than_half_of_the_pool_is_room_for_what_begins_with_it(folder: Path) -> None:
    with local_generator(folder, kv_memory="1MiB") as made:
        pool = made._engine.loaded.pools.kv
        blocks, size = pool.num_blocks, pool.block_size
        # One more token than whole blocks; the rest of the pool is less than it.
        prefix = [5 + number % 200 for number in range((blocks * 3 // 5) * size + 1)]
        # A prompt as long that shares nothing.
        other = [7, *prefix[1:]]
        wanted = made.generate([*prefix, 9], **GREEDY).token_ids
        with made.hold_prefix(prefix) as handle:
            assert handle.num_held_tokens > blocks * size // 2
            answer = made.generate([*prefix, 9], past_key_values=handle, **GREEDY)
            assert answer.token_ids == wanted
            assert answer.usage.cached_tokens == handle.num_held_tokens
            together = made.generate([[*prefix, 9], [*prefix, 10]], **GREEDY)
            assert together[0].token_ids == wanted
            # Two sequences share the prompt; what is its own fits the rest.
            assert len(made.generate([*prefix, 9], num_beams=2, **GREEDY).token_ids) == 8
            for options in ({}, {"prompt_logprobs": 0}, {"cache_salt": "another"}):
                with pytest.raises(ResourceExhausted, match="KV blocks and the pool has"):
                    made.generate([*(prefix if options else other), 9], **options, **GREEDY)
            # A thread that is busy elsewhere when the handle closes.
            goes_on = threading.Event()
            made._engine.core.loop.run_on_engine(lambda _: goes_on.wait(60))
            threading.Timer(0.2, goes_on.set).start()
        assert made.generate([*other, 9], **GREEDY).token_ids
