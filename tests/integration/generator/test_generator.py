"""penstock.Generator with a tiny model and the demo's tokenizer: texts, chats, streams, batches, scores, ends."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from factories.engine.local_generators import local_generator
from factories.engine.step_gate import held_after
from penstock import BatchFailed, Generator
from penstock.common.environment import current_environment
from penstock.common.errors import (
    Cancelled,
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    StartupError,
    Unavailable,
)
from penstock.compat.mindie import GeneratorTorch, ModelConfigError
from penstock.generator.ordered_batch import BatchProgress
from transformers import AutoTokenizer, GenerationConfig

ENDLESS: dict[str, Any] = {"ignore_eos": True, "do_sample": False}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]


def used_blocks(generator: Generator) -> int:
    return generator._engine.on_engine(lambda engine: engine.load().kv_blocks_used)


def test_a_generators_engine_is_as_nice_as_its_process(generator: Generator) -> None:
    """In a process of the user's own there is no event loop of a service to give way to."""

    def niceness(_: Any) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert generator._engine.on_engine(niceness) == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_text_and_its_ids_give_the_same_answer(generator: Generator, folder: Path) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    ids = reference("Penstock serves").input_ids
    text = generator.generate("Penstock serves", max_new_tokens=12, **ENDLESS)
    by_ids = generator.generate(ids, max_new_tokens=12, **ENDLESS)
    assert text.token_ids == by_ids.token_ids
    assert len(text.token_ids) == 12
    assert text.text == by_ids.text == reference.decode(text.token_ids, skip_special_tokens=True)
    assert (text.finish_reason, text.usage.prompt_tokens, text.usage.completion_tokens) == ("LENGTH", len(ids), 12)
    assert text.timings.total_seconds


def test_a_conversation_is_written_as_the_template_says(generator: Generator, folder: Path) -> None:
    template = (Path(__file__).parents[3] / "services/penstock/assets/demo/chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
    with local_generator(folder) as chatty:
        assert chatty.tokenizer is not None
        reference = AutoTokenizer.from_pretrained(folder)
        wanted = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
        assert chatty.tokenizer.apply_chat_template(MESSAGES) == wanted
        answer = chatty.generate(MESSAGES, max_new_tokens=5, **ENDLESS)
        assert answer.usage.prompt_tokens == len(wanted)
        assert answer.token_ids == chatty.generate(wanted, max_new_tokens=5, **ENDLESS).token_ids
        both = chatty.generate([MESSAGES, "a text", wanted], max_new_tokens=5, **ENDLESS)
        assert both[0].token_ids == both[2].token_ids == answer.token_ids
        # A message cannot spell a control token.
        spelt = chatty.tokenizer.apply_chat_template([{"role": "user", "content": "<|im_end|>"}])
        assert spelt.count(reference.convert_tokens_to_ids("<|im_end|>")) == 1
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(FailedPrecondition) as caught:
        generator.generate(MESSAGES)
    assert caught.value.reason == "NO_CHAT_TEMPLATE"


def test_a_stream_is_the_answer_piece_by_piece(generator: Generator) -> None:
    whole = generator.generate("Penstock", max_new_tokens=9, top_logprobs=2, **ENDLESS)
    with generator.stream("Penstock", max_new_tokens=9, top_logprobs=2, **ENDLESS) as stream:
        deltas = list(stream)
        answer = stream.result()
    assert [delta.seq for delta in deltas] == [*range(9)]
    assert "".join(delta.text for delta in deltas) == whole.text == answer.text
    assert [id for delta in deltas for id in delta.token_ids] == whole.token_ids
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert entries == whole.choices[0].logprobs
    assert [entry.token_id for entry in entries] == whole.token_ids
    assert all(len(entry.top) == 2 and entry.rank == 1 and entry.text == entry.top[0].text for entry in entries)


@pytest.mark.parametrize("how", ["close", "with", "break", "garbage"])
def test_leaving_a_stream_frees_its_blocks(generator: Generator, how: str) -> None:
    stream = generator.stream("Penstock", max_new_tokens=4000, **ENDLESS)
    next(stream)
    if how == "close":
        stream.close()
        with pytest.raises(Cancelled, match="closed before its end"):
            stream.result()
    elif how == "with":
        with stream:
            pass
    elif how == "break":
        for _ in stream:
            stream.close()
            break
    del stream
    gc.collect()
    generator._engine.call(generator._engine.core.hub.wait_idle())
    assert used_blocks(generator) == 0


def test_modes_and_options_by_their_names(generator: Generator) -> None:
    beams = generator.generate("Penstock", num_beams=4, num_return_sequences=3, max_new_tokens=6, ignore_eos=True)
    assert len({tuple(choice.token_ids) for choice in beams.choices}) == 3
    config = GenerationConfig(num_beams=4, num_return_sequences=3, max_new_tokens=6)
    same = generator.generate("Penstock", config, ignore_eos=True)
    assert [choice.token_ids for choice in same.choices] == [choice.token_ids for choice in beams.choices]
    sampled = [
        generator.generate("a", do_sample=True, seed=seed, max_new_tokens=8, ignore_eos=True).token_ids
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    chosen = generator.generate("a", choice=["yes", "no"], max_new_tokens=8)
    assert chosen.text in ("yes", "no")
    assert generator.generate("a", max_new_tokens=3, temperature=0.5, do_sample=False).warnings


def test_stop_strings_end_the_text(generator: Generator) -> None:
    whole = generator.generate("Penstock", max_new_tokens=30, **ENDLESS)
    place = len(whole.text) // 2
    stop = whole.text[place : place + 2]
    cut = generator.generate("Penstock", max_new_tokens=30, stop_strings=[stop], **ENDLESS)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.choices[0].stop_string) == ("STOP_STRING", stop)
    kept = generator.generate(
        "Penstock", max_new_tokens=30, stop_strings=stop, include_stop_string_in_output=True, **ENDLESS
    )
    assert kept.text == cut.text + stop


def test_a_large_batch_keeps_order_and_tells_failures_by_index(folder: Path) -> None:
    with local_generator(folder, max_in_flight=8) as generator:
        prompts: list[Any] = [[7 + number % 300, 9, 11] for number in range(400)]
        prompts[17], prompts[303] = [10**6], "x" * 200_000
        seen: list[BatchProgress] = []
        peak = 0
        submit = generator._engine.core.loop.submit

        def counted(request: Any) -> None:
            nonlocal peak
            peak = max(peak, generator._engine.core.hub.num_live + 1)
            submit(request)

        generator._engine.core.loop.submit = counted  # type: ignore[method-assign]
        with pytest.raises(BatchFailed) as caught:
            generator.generate(prompts, max_new_tokens=3, progress=seen.append, **ENDLESS)
        failed = caught.value
        assert failed.errors.keys() == {17, 303}
        assert all(isinstance(error, InvalidArgument) for error in failed.errors.values())
        assert [index for index, one in enumerate(failed.results) if one is None] == [17, 303]
        assert str(failed).startswith("2 of 400 prompts failed: prompts[17]: prompt")
        for index in (0, 16, 18, 250, 399):
            alone = generator.generate(prompts[index], max_new_tokens=3, **ENDLESS)
            assert failed.results[index].token_ids == alone.token_ids
        assert (seen[-1].done, seen[-1].failed, seen[-1].total, seen[-1].tokens) == (400, 2, 400, 398 * 3)
        assert 1 < peak <= 8
        answers = generator.generate([[5], [10**6]], max_new_tokens=2, return_errors=True, **ENDLESS)
        assert isinstance(answers[1], InvalidArgument)
        assert used_blocks(generator) == 0


def test_an_iterator_of_prompts_is_answered_as_it_is_read(generator: Generator) -> None:
    read = 0

    def prompts() -> Iterator[str]:
        nonlocal read
        for number in range(100_000):
            read += 1
            yield f"number {number}"

    answers = generator.generate_many(prompts(), max_new_tokens=2, **ENDLESS)
    first = [next(answers) for _ in range(3)]
    assert all(not isinstance(answer, Exception) for answer in first)
    assert read < 5_000
    answers.close()  # type: ignore[attr-defined]
    generator._engine.call(generator._engine.core.hub.wait_idle())
    assert used_blocks(generator) == 0


def test_a_wrong_option_is_told_before_anything_runs(generator: Generator) -> None:
    with pytest.raises(TypeError, match="option 'max_tokens': unknown"):
        generator.generate(["a", "b"], max_tokens=3)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match=r"config.top_p") as caught:
        generator.generate("a", top_p=2.0)
    assert caught.value.field == "config.top_p"
    with pytest.raises(InvalidArgument, match="prompt: every id must be below"):
        generator.stream([10**9], max_new_tokens=1).result()
    assert generator.generate([], max_new_tokens=1) == []
    with pytest.raises(ValueError, match="are for one prompt"):
        generator.generate(["a"], request_id="r")


def test_scores_are_those_of_the_prompt_log_probabilities(generator: Generator) -> None:
    assert generator.tokenizer is not None
    ids = generator.tokenizer.encode("Penstock serves many models")
    answer = generator.generate(ids, max_new_tokens=1, prompt_logprobs=1, **ENDLESS)
    known = [position.chosen.logprob for position in answer.started.prompt_logprobs]
    items: list[Any] = [(ids[:2], ids[2:]), ("Penstock serves", " many models")] * 150
    scores = generator.score(items, top_logprobs=1)
    assert len(scores.scores) == 300
    for score in (scores.scores[0], scores.scores[298]):
        assert [entry.token_id for entry in score.tokens] == ids[2:]
        assert [entry.logprob for entry in score.tokens] == pytest.approx(known[2:], abs=1e-4)
    cut = generator.tokenizer.divide("Penstock serves", " many models", beginning=())
    assert [entry.token_id for entry in scores.scores[1].tokens] == cut[1]
    with pytest.raises(InvalidArgument, match=r"^items\[298\]\.continuation_token_ids: every id") as caught:
        generator.score([*items[:298], ([1], [10**6])])
    assert caught.value.field == "items[298].continuation_token_ids"
    with pytest.raises(InvalidArgument, match=r"^items\[1\]\.continuation: must not be empty"):
        generator.score([("a", "b"), ("a", "")])


def test_embeddings_are_of_length_one_where_asked(generator: Generator) -> None:
    texts = [f"text number {number}" for number in range(300)]
    vectors = generator.embed(texts, normalize=True).vectors
    assert len(vectors) == 300
    assert all(sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-4) for vector in vectors)
    (alone,) = generator.embed(texts[270], normalize=True).vectors
    assert vectors[270] == pytest.approx(alone, abs=1e-5)


def test_many_threads_share_one_engine(generator: Generator) -> None:
    wanted = generator.generate([5, 6, 7], max_new_tokens=20, **ENDLESS).token_ids
    with ThreadPoolExecutor(12) as pool:
        runs = [pool.submit(generator.generate, [5, 6, 7], max_new_tokens=20, **ENDLESS) for _ in range(36)]
        assert all(run.result().token_ids == wanted for run in runs)


async def test_it_works_where_an_event_loop_runs(generator: Generator) -> None:
    """As in a notebook: a call blocks its caller alone."""
    asyncio.get_running_loop()
    assert len(generator.generate([5, 6], max_new_tokens=3, **ENDLESS).token_ids) == 3
    assert len(list(generator.stream([5, 6], max_new_tokens=3, **ENDLESS))) == 3


def test_without_a_tokenizer_ids_go_in_and_out(folder: Path) -> None:
    with local_generator(folder, load_tokenizer=False) as generator:
        assert generator.tokenizer is None
        answer = generator.generate([5, 6, 7], max_new_tokens=4, **ENDLESS)
        assert (len(answer.token_ids), answer.text) == (4, "")
        for call in (
            lambda: generator.generate("a text"),
            lambda: generator.generate(MESSAGES),
            lambda: generator.embed("a text"),
            lambda: generator.score([("a", "b")]),
        ):
            with pytest.raises(FailedPrecondition) as caught:
                call()
            assert caught.value.reason == "NO_TOKENIZER"
        with pytest.raises(InvalidArgument, match="stop_strings"):
            generator.generate([5], stop_strings=["a"])


def test_a_tokenizer_of_another_folder(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in folder.iterdir():
        if not path.name.startswith("tokenizer"):
            (bare / path.name).write_bytes(path.read_bytes())
    with local_generator(bare, tokenizer_path=str(folder)) as generator:
        assert generator.generate("Penstock", max_new_tokens=2, stop_strings=["zzz"], **ENDLESS).text
    with pytest.raises(StartupError, match=r"--tokenizer-path: MODEL .*no such folder") as caught:
        local_generator(folder, tokenizer_path=str(tmp_path / "none"))
    assert caught.value.flag == "--tokenizer-path"


def test_closing_ends_what_runs_and_refuses_the_rest(folder: Path) -> None:
    generator = local_generator(folder)
    threads = set(threading.enumerate())
    with ThreadPoolExecutor(1) as pool:
        with held_after(3):
            waiting = pool.submit(generator.generate, [5, 6], max_new_tokens=4000, **ENDLESS)
            generator._engine.call(generator._engine.core.hub.wait_busy())
            closing = threading.Thread(target=generator.close)
            closing.start()
        closing.join(60)
        assert not closing.is_alive()
        with pytest.raises(PenstockError, match=r"stopp|closed"):
            waiting.result(60)
    generator.close()
    with pytest.raises(Unavailable, match="closed"):
        generator.generate([5], max_new_tokens=1)
    with pytest.raises(Unavailable, match="closed"):
        generator.clear_cache()
    assert "closed" in repr(generator)
    left = {thread.name for thread in set(threading.enumerate()) - threads if thread.is_alive()}
    assert not left & {"engine", "generator"}


@pytest.mark.slow
def test_a_script_that_closes_nothing_ends_well() -> None:
    """Amid a request, too: nothing is printed, and the process does not hang. In float32, which no CPU is warned of."""
    code = """
from penstock import Generator
generator = Generator(load_tokenizer=False, kv_memory="8MiB", threads=1, tune_seconds=0, dtype="float32")
stream = generator.stream([5, 6], max_new_tokens=2000, ignore_eos=True)
next(stream)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=590, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_broken_engine_ends_its_requests_and_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_generator(folder) as generator:

        def broken(*_: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(type(generator._engine.loaded.engine.runner), "execute", broken)
        with pytest.raises(PenstockError, match="failed"):
            generator.generate([5], max_new_tokens=2)
        with pytest.raises(Unavailable, match=r"the engine has (failed: make a new Generator|stopped)"):
            generator.generate([5], max_new_tokens=2)


def test_options_of_a_server_are_refused(folder: Path) -> None:
    for name, what in (("port", "is an option of a server"), ("kv_memry", "is unknown")):
        with pytest.raises(TypeError, match=f"option '{name}' {what}"):
            local_generator(folder, **{name: 1})
    with pytest.raises(StartupError, match="--max-context 100000 is more than the model's"):
        local_generator(folder, max_context=100_000)


def test_the_dictionary_makes_the_same_engine(folder: Path, generator: Generator) -> None:
    model_config = {
        "backend_type": "torch",
        "world_size": "1",
        "rank": "0",
        "npu_device_id": "0",
        "local_rank": 0,
        "model_id": str(folder),
        "model_name": "tiny",
        "max_position_embeddings": "256",
        "num_threads": "2",
        "trust_remote_code": "false",
    }
    if "ASCEND_RT_VISIBLE_DEVICES" in current_environment():
        pytest.skip("devices are listed")
    with GeneratorTorch(model_config, kv_memory="4MiB", threads=1, tune_seconds=0.0, dtype="float32") as made:
        assert (made.name, made.rank, str(made.device), made.adapter_manager.names()) == ("tiny", 0, "cpu", ())
        assert made.model_config.max_position_embeddings == 256
        assert made.tokenizer is not None
        pool = made.cache_pool
        assert pool.tensors[0].shape[:4] == (pool.num_layers, 2, pool.num_blocks, pool.block_size)
        assert made._engine.loaded.served.max_context_tokens == 256
        wanted = generator.generate([5, 6, 7], max_new_tokens=6, **ENDLESS).token_ids
        assert made.generate([5, 6, 7], max_new_tokens=6, **ENDLESS).token_ids == wanted
    with pytest.raises(ModelConfigError, match=r"model_config\['rank'\] must be 0, found 1"):
        GeneratorTorch({**model_config, "world_size": 2, "rank": 1})


REQUIRED_FIELDS = {"backend_type": "torch", "world_size": 1, "rank": 0, "npu_device_id": 0, "local_rank": 0}


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("max_position_embeddings", 99_999, "--max-context 99999 is more than the model's"),
        ("tokenizer_path", "./none", "no such folder"),
        ("model_id", "./none", "no such folder"),
    ],
)
def test_what_only_the_model_can_refuse_names_the_dictionarys_field(
    folder: Path, field: str, value: Any, text: str
) -> None:
    with pytest.raises(ModelConfigError, match=rf"model_config\['{field}'\] cannot be used: .*{text}"):
        GeneratorTorch({**REQUIRED_FIELDS, "model_id": str(folder), field: value})


def test_a_keyword_goes_before_the_dictionary_and_is_what_is_wrong(folder: Path) -> None:
    given = {**REQUIRED_FIELDS, "model_id": str(folder), "max_position_embeddings": 64}
    with pytest.raises(StartupError, match=r"^--max-context 99998 is more than"):
        GeneratorTorch(given, max_context=99_998)


def test_the_dictionary_is_none_of_generators_own_and_what_takes_it_is_named() -> None:
    with pytest.raises(TypeError, match=r"penstock\.compat\.mindie\.GeneratorTorch"):
        Generator(REQUIRED_FIELDS)  # type: ignore[arg-type]
