"""ModelRunner against transformers' generate, whatever the batch and the chunks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from factories.engine.pools import spoil
from factories.engine.sequences import params, sequence
from factories.models.checkpoints import VOCAB_SIZE, tiny_checkpoint
from factories.models.run_kernels import cpu_device, new_runner
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.request import PositionLogprobs
from penstock.generation.core.sampling_params import derive_seed
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import BlockCopy, RunnerOutput, ScheduledSequence, SchedulerOutput
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import WarmUpWork
from transformers import PreTrainedModel

BLOCK_SIZE = 4
NUM_BLOCKS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=3)


class Driver:
    """A scheduler in miniature: blocks from a counter, any entries a test likes."""

    def __init__(self, model: CausalLM, **options: int) -> None:
        config = model.config
        geometry = (config.num_layers, NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.runner = new_runner(model, KVCachePool(*geometry, model.dtype, model.device), **options)
        self._next_block = 0

    def give_blocks(self, one: Sequence, num_tokens: int) -> None:
        """Blocks of its own for `num_tokens` tokens, deliberately not in order."""
        while len(one.block_table) * BLOCK_SIZE < num_tokens:
            one.block_table.append((self._next_block * 7) % NUM_BLOCKS)
            self._next_block += 1

    def entry(self, one: Sequence, count: int | None = None, *siblings: Sequence) -> ScheduledSequence:
        """The next `count` tokens (None: all that are left); draws when none is left then."""
        start = one.num_computed_tokens
        end = one.num_tokens if count is None else min(one.num_tokens, start + count)
        self.give_blocks(one, end)
        return ScheduledSequence(one, start, end - start, (one, *siblings) if end == one.num_tokens else ())

    def step(self, *entries: ScheduledSequence, released: tuple[int, ...] = ()) -> RunnerOutput:
        """Execute, and append what was drawn."""
        output = self.runner.execute(SchedulerOutput(entries, released=released))
        for entry in entries:
            entry.sequence.num_computed_tokens += entry.num_tokens
            for one in entry.sample:
                one.token_ids.append(output.sampled[one.seq_id].token_id)
        return output


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def expected_greedy(reference: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    output = reference.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, eos_token_id=None
    )
    return list(output[0].tolist())


def test_greedy_ids_equal_transformers_in_mixed_and_chunked_batches(
    model: CausalLM, reference: PreTrainedModel
) -> None:
    rng = random.Random(1)
    driver = Driver(model)
    live = [sequence(prompt, params(), seq_id=i) for i, prompt in enumerate(prompts(12))]
    while any(one.num_output_tokens < 24 for one in live):
        # Some sequences sit a step out, the others take chunks of any size: prompts and decodes mixed.
        chosen = [one for one in live if one.num_output_tokens < 24 and rng.random() < 0.7]
        rng.shuffle(chosen)
        if chosen:
            driver.step(*(driver.entry(one, rng.randrange(1, 12)) for one in chosen))
    for one, prompt in zip(live, prompts(12), strict=True):
        assert one.token_ids == expected_greedy(reference, prompt, 24)


def test_released_sequence_comes_back_in_other_blocks(model: CausalLM, reference: PreTrainedModel) -> None:
    driver = Driver(model)
    prompt = prompts(1, seed=5)[0]
    one = sequence(prompt, params(), seq_id=7)
    for _ in range(4):
        driver.step(driver.entry(one))
    one.block_table.clear()
    one.num_computed_tokens = 0
    driver.step(driver.entry(one), released=(7,))
    while one.num_output_tokens < 10:
        driver.step(driver.entry(one))
    assert one.token_ids == expected_greedy(reference, prompt, 10)


def test_copied_block_is_read_by_the_fork(model: CausalLM, reference: PreTrainedModel) -> None:
    driver = Driver(model)
    prompt = list(range(2, 12))
    parent, child = sequence(prompt, params(), seq_id=0), sequence(prompt, params(), seq_id=1)
    driver.step(driver.entry(parent, None, child))
    child.block_table[:] = [*parent.block_table[:2], 399]
    child.num_computed_tokens = len(prompt)
    output = driver.runner.execute(
        SchedulerOutput((driver.entry(child),), copies=(BlockCopy(parent.block_table[2], child.block_table[2]),))
    )
    assert [*child.token_ids, output.sampled[1].token_id] == expected_greedy(reference, prompt, 2)


def test_siblings_draw_what_single_requests_with_their_seeds_draw(model: CausalLM) -> None:
    prompt = list(range(5, 20))
    driver = Driver(model)

    def sibling(index: int, seq_id: int) -> Sequence:
        return sequence(prompt, params(do_sample=True, seed=derive_seed(99, index)), seq_id=seq_id)

    together = [sibling(index, index) for index in range(4)]
    driver.step(driver.entry(together[0], None, *together[1:]))
    for index, one in enumerate(together):
        alone = sibling(index, 100 + index)
        driver.step(driver.entry(alone))
        assert alone.token_ids == one.token_ids


def test_prompt_logprobs_equal_transformers_for_any_chunks(model: CausalLM, reference: PreTrainedModel) -> None:
    prompt = prompts(1, seed=9)[0] + list(range(10, 30))
    driver = Driver(model, prompt_logprob_rows=3)
    one = sequence(prompt, params(prompt_logprobs=5), seq_id=0)
    found: list[PositionLogprobs] = []
    while one.num_computed_tokens < len(prompt):
        found += driver.step(driver.entry(one, 7)).prompt_logprobs.get(0, ())
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert len(found) == len(prompt) - 1
    for entry, target, row in zip(found, prompt[1:], expected, strict=True):
        assert entry.chosen is not None
        assert entry.chosen.token_id == target
        assert entry.chosen.logprob == pytest.approx(row[target].item(), abs=1e-4)
        assert entry.chosen.rank == 1 + int((row > row[target]).sum())
        values, ids = row.topk(5)
        assert [top.token_id for top in entry.top] == ids.tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_decode_steps_give_no_prompt_logprobs(model: CausalLM) -> None:
    driver = Driver(model)
    one = sequence([3, 4, 5], params(prompt_logprobs=0), seq_id=0)
    assert len(driver.step(driver.entry(one)).prompt_logprobs[0]) == 2
    assert driver.step(driver.entry(one)).prompt_logprobs == {}


def test_step_without_entries_only_releases(model: CausalLM) -> None:
    assert Driver(model).step(released=(1, 2)) == RunnerOutput({}, {})


def test_warm_up_leaves_no_trace_in_later_results(model: CausalLM, reference: PreTrainedModel) -> None:
    driver = Driver(model)
    driver.runner.warm_up()
    one = sequence([9, 8, 7], params(), seq_id=0)
    while one.num_output_tokens < 8:
        driver.step(driver.entry(one))
    assert one.token_ids == expected_greedy(reference, [9, 8, 7], 8)


def test_a_warm_up_over_what_damaged_weights_left_behind(tmp_path: Path) -> None:
    """As the Reload that repairs them runs it: it computes prompts in the first layers only."""
    deep = load_model(tiny_checkpoint(tmp_path, num_hidden_layers=4), dtype="float32", device=cpu_device())
    config = deep.config
    kv = KVCachePool(
        config.num_layers, NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim, deep.dtype, deep.device
    )
    spoil(kv)
    runner = new_runner(deep, kv)
    runner.warm_up(WarmUpWork(2, 10, 3))
    runner.warm_up()


def test_a_row_whose_options_leave_no_token_fails_alone(model: CausalLM, reference: PreTrainedModel) -> None:
    driver = Driver(model)
    everything = tuple(range(VOCAB_SIZE))
    dead = [
        sequence([4, 5], params(suppress_tokens=everything, do_sample=sampled), seq_id=seq_id)
        for seq_id, sampled in ((1, False), (2, True))
    ]
    alive = sequence([9, 8, 7], params(), seq_id=0)
    output = driver.runner.execute(SchedulerOutput(tuple(driver.entry(one) for one in (dead[0], alive, dead[1]))))
    assert (output.failed, output.exhausted) == (frozenset(), {1, 2})
    assert [9, 8, 7, output.sampled[0].token_id] == expected_greedy(reference, [9, 8, 7], 1)
