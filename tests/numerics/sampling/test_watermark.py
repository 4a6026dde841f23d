"""The watermark end to end: what is drawn under it is what the detectors, transformers' and ours, agree to find."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from factories.engine.sequences import params, sequence
from factories.models.run_kernels import new_sampler
from penstock.generation.core.decoding_mode import AnyWatermark, SynthIdOptions, WatermarkOptions
from penstock.generation.sampling.ops import synthid_numbers
from penstock.generation.sampling.ops.green_lists import green_bits, is_green
from penstock.generation.sampling.watermark_detector import SynthIdDetector, TooFewTokens, WatermarkDetector
from transformers import LlamaConfig, WatermarkingConfig
from transformers import WatermarkDetector as ReferenceDetector
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor, WatermarkLogitsProcessor

CPU = torch.device("cpu")
VOCAB = 1009
torch.set_num_threads(1)
SCHEMES = [
    WatermarkOptions(bias=4.0),
    WatermarkOptions(0.5, 3.0, 12345, "lefthash", 1),
    WatermarkOptions(0.25, 5.0, 15485863, "selfhash", 1),
    WatermarkOptions(0.4, 5.0, 99_999_999_977, "selfhash", 3),
]


def reference_config(options: WatermarkOptions) -> WatermarkingConfig:
    return WatermarkingConfig(
        options.greenlist_ratio, options.bias, options.hashing_key, options.seeding_scheme, options.context_width
    )


def generate(options: AnyWatermark | None, seed: int, length: int) -> list[int]:
    """Output of a model of random logits."""
    one = sequence([5, 6, 7], params(do_sample=True, top_k=60, seed=seed, watermark=options))
    sampler = new_sampler()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(length):
        one.append(sampler.sample(torch.randn(1, VOCAB, generator=generator) * 2, [one])[0].token_id)
    return one.output_token_ids


@pytest.mark.thinned(2)
@pytest.mark.parametrize("vocab_size", [VOCAB, 151_936])
@pytest.mark.parametrize("options", SCHEMES, ids=str)
def test_green_lists_are_those_of_transformers(options: WatermarkOptions, vocab_size: int) -> None:
    rng = random.Random(3)
    reference = WatermarkLogitsProcessor(
        vocab_size,
        "cpu",
        options.greenlist_ratio,
        options.bias,
        options.hashing_key,
        options.seeding_scheme,
        options.context_width,
    )
    for _ in range(4):
        context = [rng.randrange(vocab_size) for _ in range(3)]
        expected = set(reference._get_greenlist_ids(torch.tensor(context)).tolist())
        probed = [*rng.sample(range(vocab_size), 20), *list(expected)[:20]]
        assert [is_green(vocab_size, options, context, i) for i in probed] == [i in expected for i in probed]
        bits = green_bits(vocab_size, options, context)
        assert sum(byte.bit_count() for byte in bits.tolist()) == len(expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("ignore_repeated", [False, True])
@pytest.mark.parametrize("options", SCHEMES, ids=str)
def test_evidence_is_that_of_transformers(options: WatermarkOptions, ignore_repeated: bool) -> None:
    reference = ReferenceDetector(
        LlamaConfig(vocab_size=VOCAB, bos_token_id=1), "cpu", reference_config(options), ignore_repeated
    )
    detector = WatermarkDetector(options, VOCAB, bos_token_id=1, ignore_repeated_ngrams=ignore_repeated)
    texts = [generate(options, 1, 40), generate(None, 2, 40), [1, *generate(options, 3, 12)], [8, 9] * 10]
    for text in texts:
        expected = reference(torch.tensor([text]), return_dict=True)
        found = detector.detect(text)
        assert found.num_tokens_scored == expected.num_tokens_scored[0]
        assert found.num_green_tokens == expected.num_green_tokens[0]
        assert found.green_fraction == pytest.approx(expected.green_fraction[0])
        assert found.z_score == pytest.approx(expected.z_score[0])
        assert found.p_value == pytest.approx(expected.p_value[0])
        assert found.prediction == expected.prediction[0]
        assert 1 - found.p_value == pytest.approx(expected.confidence[0])


@pytest.mark.parametrize("options", SCHEMES, ids=str)
def test_marked_text_is_found_and_unmarked_text_is_not(options: WatermarkOptions) -> None:
    detector = WatermarkDetector(options, VOCAB)
    assert detector.detect(generate(options, 5, 80)).prediction
    assert not detector.detect(generate(None, 5, 80)).prediction


def test_too_few_tokens_are_an_error() -> None:
    detector = WatermarkDetector(WatermarkOptions(context_width=2), VOCAB, bos_token_id=1)
    with pytest.raises(ValueError, match="too few"):
        detector.detect([1, 5, 6])


SYNTHIDS = [
    SynthIdOptions(5, (654, 400, 836, 123, 340, 443, 597, 160, 57)),
    SynthIdOptions(2, tuple(range(1, 25)), context_history_size=4, sampling_table_seed=3, sampling_table_size=999),
]


def synthid_reference(options: SynthIdOptions) -> SynthIDTextWatermarkLogitsProcessor:
    fields = dataclasses.asdict(options)
    return SynthIDTextWatermarkLogitsProcessor(**{**fields, "keys": list(options.keys)}, device=CPU)


@pytest.mark.parametrize("options", SYNTHIDS, ids=str)
def test_synthids_mean_score_is_that_of_transformers_g_values(options: SynthIdOptions) -> None:
    reference = synthid_reference(options)
    detector = SynthIdDetector(options, bos_token_id=1)
    for text in (generate(options, 1, 60), generate(None, 2, 60), [8, 9] * 20):
        ids = torch.tensor([text])
        is_scored = reference.compute_context_repetition_mask(ids)[0]
        values = reference.compute_g_values(ids)[0][is_scored].float()
        for found in (detector.detect(text), detector.detect([1, *text])):
            assert found.num_tokens_scored == int(is_scored.sum())
            assert found.green_fraction == pytest.approx(float(values.mean()))
            assert found.num_green_tokens == len(found.green_positions) == int((values.mean(1) > 0.5).sum())
            assert found.z_score == pytest.approx(float((2 * values - 1).sum()) / math.sqrt(values.numel()), abs=1e-5)


@pytest.mark.parametrize("options", SYNTHIDS, ids=str)
def test_synthid_is_found_where_it_is_and_not_elsewhere(options: SynthIdOptions) -> None:
    detector = SynthIdDetector(options)
    assert detector.detect(generate(options, 5, 150)).prediction
    assert not detector.detect(generate(None, 5, 150)).prediction
    with pytest.raises(TooFewTokens, match="too few"):
        detector.detect([5] * (options.ngram_len - 1))


def test_synthids_table_is_made_once_for_a_request() -> None:
    """Also where more requests with tables of their own draw in a step than are remembered: one takes milliseconds."""
    sampler, rows = new_sampler(), []
    for seed in range(6):
        options = SynthIdOptions(2, (1, 2), sampling_table_seed=10**9 + seed, sampling_table_size=64)
        rows.append(sequence([5, 6, 7], params(do_sample=True, seed=seed, watermark=options), seq_id=seed))
    before = synthid_numbers._table.cache_info().misses
    for _ in range(4):
        for row, drawn in zip(rows, sampler.sample(torch.zeros(6, VOCAB), rows), strict=True):
            row.append(drawn.token_id)
    assert synthid_numbers._table.cache_info().misses - before == 6
