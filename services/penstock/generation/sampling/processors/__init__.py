"""Processors in running order: one option each, over the rows of a batch that use it.

The order is that of transformers 5.x, with Hamming diversity where 4.41 had it. OpenAI's penalties and logit_bias take
the place of custom processors there: after its own processors and before the WARP stage, transformers' warpers.
"""

from __future__ import annotations

from penstock.generation.sampling.processors.allowed_tokens import AllowedTokens, AllowedTrie
from penstock.generation.sampling.processors.base import Processor
from penstock.generation.sampling.processors.ends import ExponentialDecayLength, ForcedBos, ForcedEos, MinNewTokens
from penstock.generation.sampling.processors.fixed_tokens import BeginSuppressTokens, LogitBias, SuppressTokens
from penstock.generation.sampling.processors.min_p import MinP
from penstock.generation.sampling.processors.ngrams import EncoderNoRepeatNgram, NoRepeatNgram
from penstock.generation.sampling.processors.numbers import RemoveInvalidValues, Renormalize
from penstock.generation.sampling.processors.penalties import (
    EncoderRepetitionPenalty,
    HammingDiversity,
    OpenAIPenalties,
    RepetitionPenalty,
)
from penstock.generation.sampling.processors.plugin_processors import AllowingPlugins, PluginProcessors
from penstock.generation.sampling.processors.sequence_bias import BadWords, SequenceBias
from penstock.generation.sampling.processors.synthid import SynthId
from penstock.generation.sampling.processors.temperature import Temperature
from penstock.generation.sampling.processors.thinking_budget import ThinkingBudget
from penstock.generation.sampling.processors.top_k import TopK
from penstock.generation.sampling.processors.top_p import TopP
from penstock.generation.sampling.processors.truncation import EpsilonCutoff, EtaCutoff, TopH, TopNSigma, TypicalP
from penstock.generation.sampling.processors.watermark import Watermark
from penstock.generation.sampling.processors.xtc import XTC

# In the order they run: the stages one after another.
PROCESSORS: tuple[type[Processor], ...] = (
    # SCORES; the grammar's masks follow.
    SequenceBias,
    HammingDiversity,
    EncoderRepetitionPenalty,
    RepetitionPenalty,
    NoRepeatNgram,
    EncoderNoRepeatNgram,
    BadWords,
    MinNewTokens,
    AllowedTrie,
    AllowedTokens,
    AllowingPlugins,
    ForcedBos,
    ForcedEos,
    RemoveInvalidValues,
    ExponentialDecayLength,
    SuppressTokens,
    BeginSuppressTokens,
    OpenAIPenalties,
    LogitBias,
    PluginProcessors,
    ThinkingBudget,
    # WARP
    TopNSigma,
    Temperature,
    TopH,
    TopK,
    TopP,
    MinP,
    TypicalP,
    EpsilonCutoff,
    EtaCutoff,
    XTC,
    # LATE
    Watermark,
    SynthId,
    Renormalize,
)
