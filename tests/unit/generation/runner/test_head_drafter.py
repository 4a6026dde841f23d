"""A head's bookkeeping, on a toy head that checks every row that it is given and the keys that it is told to read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.sequence import Sequence
from penstock.generation.core.step import DraftRequest, ScheduledSequence
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.models.draft_head import DraftHead, Embed
from penstock.generation.runner.head_drafter import HeadDrafter
from penstock.generation.sampling.sampler import Sampler
from penstock.generation.sampling.sampling_kernels import SamplingKernels
from torch import Tensor

VOCAB, BLOCK_SIZE = 10, 4
CPU = torch.device("cpu")
MODE = AssistanceOptions(num_assistant_tokens=5, confidence_threshold=0.0)


class ToyHead(DraftHead):
    """Head of a model with hidden states (place, token). It drafts the token after the last one, by counting.

    A row's key is (place, next token). A row fails when the keys before it, since the head's first row, are not those
    of the places before it.
    """

    kind = "toy"

    def __init__(self) -> None:
        facts: Any = SimpleNamespace(hidden_size=2, num_kv_heads=1, head_dim=2, has_values=True)
        self.config, self.taps, self.served_ids = facts, (1,), None
        self.dtype, self.device, self.num_bytes, self.num_parameters = torch.float32, CPU, 0, 0
        # Rows of each pass since the last look.
        self.passes: list[list[tuple[int, int]]] = []

    def features(self, taps_TKI: Tensor) -> Tensor:
        return taps_TKI[:, 0]

    def embedded(self, ids_T: Tensor, embed: Embed) -> Tensor:
        return torch.stack([ids_T, ids_T], dim=-1).float()

    def forward(
        self, embeds_TI: Tensor, features_TI: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool
    ) -> Tensor:
        rows = [(int(place), int(token)) for place, token in zip(features_TI[:, 0], embeds_TI[:, 0], strict=True)]
        self.passes.append(rows)
        keys = kv.key(0).view(-1, 2)
        for slot, row in zip(metadata.slot_mapping.tolist(), rows, strict=True):
            keys[slot] = torch.tensor(row, dtype=torch.float32)
        starts = metadata.query_start.tolist()
        for number, length in enumerate(metadata.kv_lens):
            slots = [
                int(metadata.block_tables[number, place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE
                for place in range(length)
            ]
            last = rows[starts[number + 1] - 1][0]
            places = keys[slots, 0].tolist()
            assert places == list(range(last - length + 1, last + 1)), "keys of other rows"
        return torch.stack([features_TI[:, 0] + 1, embeds_TI[:, 0]], dim=-1)

    def scores(self, hidden_NI: Tensor) -> Tensor:
        ids = (hidden_NI[:, 1].long() + 1) % VOCAB
        return torch.nn.functional.one_hot(ids, VOCAB).float() * 4

    def look(self) -> list[list[tuple[int, int]]]:
        passes, self.passes = self.passes, []
        return passes


def make(num_blocks: int = 32) -> tuple[HeadDrafter, ToyHead]:
    head = ToyHead()
    kv = KVCachePool(1, num_blocks, BLOCK_SIZE, 1, 2, torch.float32, CPU)
    return HeadDrafter(head, kv, VOCAB, kernels=SamplingKernels(), masks=None), head


def a_sequence(ids: list[int], seq_id: int = 0, **options: Any) -> Sequence:
    return Sequence(seq_id, 0, SamplingParams(50, mode=MODE, **options), 0, list(ids), len(ids))


def step(
    drafter: HeadDrafter, sequence: Sequence, start: int, count: int, *siblings: Sequence, draws: bool = True
) -> None:
    """Let the served model compute some tokens of a sequence."""
    sample = (sequence, *siblings) if draws else ()
    rows = [(place, sequence.token_ids[place]) for place in range(start, start + count)]
    entry = ScheduledSequence(sequence, start, count, sample)
    drafter.take([(entry, 0)], torch.tensor(rows, dtype=torch.float32)[:, None], lambda ids: ids)


def test_a_chain_counts_on_from_the_token_that_was_drawn_last() -> None:
    drafter, head = make()
    one = a_sequence([3, 8, 1])
    step(drafter, one, 0, 3)
    one.token_ids.append(5)
    assert drafter.draft([DraftRequest(one, 3)]) == [[6, 7, 8]]
    # A row for each token of the prompt, with the token after it; then one for each draft but the last.
    assert head.look() == [[(0, 8), (1, 1), (2, 5)], [(3, 6)], [(4, 7)]]
    drafter.check_integrity()


def test_rows_of_tokens_that_stay_are_computed_anew_from_the_models_own_states() -> None:
    drafter, head = make()
    one = a_sequence([3, 8, 1])
    step(drafter, one, 0, 3)
    one.token_ids += [5]
    (drafts,) = drafter.draft([DraftRequest(one, 3)])
    head.look()
    # The model computes the last token and all drafts, and keeps the first one.
    one.token_ids += drafts
    step(drafter, one, 3, 4)
    one.token_ids[5:] = [2]
    assert drafter.draft([DraftRequest(one, 2)]) == [[3, 4]]
    assert head.look() == [[(3, 6), (4, 2)], [(5, 3)]]
    drafter.check_integrity()


def test_a_prompt_passes_the_head_chunk_by_chunk() -> None:
    drafter, head = make()
    one = a_sequence([1, 2, 3, 4, 5, 6, 7])
    step(drafter, one, 0, 3, draws=False)
    assert head.look() == [[(0, 2), (1, 3), (2, 4)]]
    step(drafter, one, 3, 4)
    assert head.look() == []
    one.token_ids.append(0)
    assert drafter.draft([DraftRequest(one, 1)]) == [[1]]
    assert head.look() == [[(3, 5), (4, 6), (5, 7), (6, 0)]]


def test_rows_begin_anew_where_the_model_skipped_some() -> None:
    """Behind a prefix of the cache, after a swap, and when all is computed again."""
    drafter, head = make()
    one = a_sequence([1, 2, 3, 4, 5, 6, 7])
    step(drafter, one, 4, 3)
    one.token_ids.append(0)
    assert drafter.draft([DraftRequest(one, 2)]) == [[1, 2]]
    assert head.look() == [[(4, 6), (5, 7), (6, 0)], [(7, 1)]]
    step(drafter, one, 0, 8)
    one.token_ids.append(3)
    assert drafter.draft([DraftRequest(one, 1)]) == [[4]]
    assert len(head.look()[0]) == 8
    drafter.check_integrity()


def test_rows_of_a_prefix_that_another_sequence_left_are_read_again() -> None:
    drafter, head = make()
    first = a_sequence([1, 2, 3, 4, 5, 6, 7], seq_id=1)
    first.block_hashes = [b"first four"]
    step(drafter, first, 0, 7)
    first.token_ids.append(0)
    drafter.draft([DraftRequest(first, 1)])
    drafter.release([1])
    head.look()
    # Of the same first block, and the same token behind it.
    second = a_sequence([1, 2, 3, 4, 5, 9], seq_id=2)
    second.block_hashes = [b"first four"]
    step(drafter, second, 4, 2)
    second.token_ids.append(7)
    assert drafter.draft([DraftRequest(second, 2)]) == [[8, 9]]
    # The toy head checks that the keys before these are those of the first four rows.
    assert head.look() == [[(4, 9), (5, 7)], [(6, 8)]]
    drafter.check_integrity()
    others = [([1, 2, 3, 4, 8, 9], b"first four"), ([1, 2, 3, 4, 5, 9], b"of another tenant")]
    for number, (ids, name) in enumerate(others, 3):
        other = a_sequence(ids, seq_id=number)
        other.block_hashes = [name]
        step(drafter, other, 4, 2)
        assert drafter._followers[number].first == 4
    drafter.clear()
    again = a_sequence([1, 2, 3, 4, 5, 9], seq_id=9)
    again.block_hashes = [b"first four"]
    step(drafter, again, 4, 2)
    assert drafter._followers[9].first == 4
    drafter.check_integrity()


def test_rows_wait_while_nobody_asks_for_drafts_but_not_for_ever() -> None:
    drafter, head = make()
    one = a_sequence([1])
    for place in range(70):
        step(drafter, one, place, 1)
        one.token_ids.append(2)
    assert sum(map(len, head.look())) == 64
    assert drafter.draft([DraftRequest(one, 1)]) == [[3]]


def test_siblings_share_the_blocks_of_their_prompt_until_they_differ() -> None:
    drafter, _ = make()
    one = a_sequence([1, 2, 3, 4, 5, 6, 7], seq_id=1)
    two = a_sequence([1, 2, 3, 4, 5, 6, 7], seq_id=2)
    step(drafter, one, 0, 6, draws=False)
    step(drafter, one, 6, 1, two)
    assert drafter.num_used_blocks == 2
    one.token_ids.append(0)
    two.token_ids.append(5)
    answers = drafter.draft([DraftRequest(one, 2), DraftRequest(two, 2)])
    assert answers == [[1, 2], [6, 7]]
    drafter.check_integrity()
    drafter.release([1])
    drafter.check_integrity()
    drafter.clear()
    assert drafter.num_used_blocks == 0


def test_a_full_pool_forgets_who_was_drafted_for_least_recently() -> None:
    drafter, head = make(num_blocks=4)
    first, second, third = (a_sequence([number] * 6, seq_id=number) for number in range(3))
    for one in (first, second, third):
        step(drafter, one, 0, 6)
        one.token_ids.append(4)
        assert drafter.draft([DraftRequest(one, 2)]) == [[5, 6]]
    drafter.check_integrity()
    head.look()
    # The first one is known from here on.
    step(drafter, first, 6, 1)
    first.token_ids.append(5)
    assert drafter.draft([DraftRequest(first, 1)]) == [[6]]
    assert head.look() == [[(6, 5)]]


def test_a_sequence_that_the_pool_cannot_hold_gets_no_drafts() -> None:
    drafter, _ = make(num_blocks=1)
    one = a_sequence([1] * 5)
    step(drafter, one, 0, 5)
    one.token_ids.append(4)
    assert drafter.draft([DraftRequest(one, 2)]) == [[]]
    assert drafter.num_used_blocks == 0
    assert drafter.draft([DraftRequest(a_sequence([1], seq_id=9), 2)]) == [[]]


def test_drafting_stops_at_an_end_at_the_limit_and_below_the_threshold() -> None:
    drafter, _ = make()
    ending, sure, unsure = (
        a_sequence([1], seq_id=1, eos_token_ids=(5,)),
        a_sequence([1], seq_id=2),
        a_sequence([1], seq_id=3),
    )
    for one in (ending, sure, unsure):
        step(drafter, one, 0, 1)
        one.token_ids.append(2)
    requests = [DraftRequest(ending, 9), DraftRequest(sure, 4, 0.8), DraftRequest(unsure, 4, 0.9)]
    # Its token has a share of 0.86.
    assert drafter.draft(requests) == [[3, 4], [3, 4, 5, 6], [3]]


def test_draws_take_the_requests_own_options() -> None:
    drafter, _ = make()
    plain, banned = a_sequence([1], seq_id=1), a_sequence([1], seq_id=2, suppress_tokens=(4,))
    for one in (plain, banned):
        step(drafter, one, 0, 1)
        one.token_ids.append(2)
    answers = drafter.draft([DraftRequest(plain, 2), DraftRequest(banned, 2)])
    assert answers[0] == [3, 4]
    assert answers[1][0] == 3
    assert answers[1][1] != 4


SCORED = torch.tensor([0, 2, 3, 5, 7, 8])


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0, "top_p": 0.7}, {"top_k": 3}, {"min_p": 0.3}, {"top_k": 9}]
)
@pytest.mark.parametrize(("penalty", "width"), [({}, len(SCORED)), ({"suppress_tokens": (3,)}, VOCAB)])
def test_a_draw_looks_at_no_more_ids_than_it_must(
    options: dict[str, Any], penalty: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head that scores some of the ids: its drafts are those of one that finds the others never likely."""
    (some, head), (whole, other) = make(), make()
    random_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    unlikely_V = torch.full((VOCAB,), -1e9).index_put((SCORED,), random_V[SCORED])
    monkeypatch.setattr(head, "served_ids", SCORED)
    monkeypatch.setattr(head, "scores", lambda hidden_NI: random_V[SCORED].repeat(len(hidden_NI), 1))
    monkeypatch.setattr(other, "scores", lambda hidden_NI: unlikely_V.repeat(len(hidden_NI), 1))
    sample, widths = Sampler.sample, []

    def noted(sampler: Sampler, logits_NV: Tensor, *rest: Any) -> Any:
        widths.append(logits_NV.shape[1])
        return sample(sampler, logits_NV, *rest)

    monkeypatch.setattr(Sampler, "sample", noted)
    drafts = []
    for drafter in (some, whole):
        one = a_sequence([1], do_sample=True, **options, **penalty)
        step(drafter, one, 0, 1)
        one.token_ids.append(2)
        drafts.append(drafter.draft([DraftRequest(one, 40, 1e-9)])[0])
    assert drafts[0] == drafts[1]
    assert len(set(drafts[0])) > 1
    assert widths == [width] * 40 + [VOCAB] * 40


def test_scores_that_are_no_numbers_end_one_sequences_drafts_alone() -> None:
    drafter, head = make()
    good, bad = a_sequence([1], seq_id=1, do_sample=True), a_sequence([1], seq_id=2, do_sample=True)
    for one in (good, bad):
        step(drafter, one, 0, 1)
    good.token_ids.append(2)
    bad.token_ids.append(7)
    scores = head.scores

    def some_scores(hidden_NI: Tensor) -> Tensor:
        found = scores(hidden_NI)
        found[hidden_NI[:, 1] == 7] = torch.nan
        return found

    head.scores = some_scores  # type: ignore[method-assign]
    answers = drafter.draft([DraftRequest(good, 2), DraftRequest(bad, 2)])
    assert len(answers[0]) == 2
    assert answers[1] == []
