"""Masks of the tokens that may follow, for the sequences of a step that have a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.generation.attention.to_device import uploaded
from penstock.generation.core.decoding_mode import Rescue

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    import numpy.typing as npt
    import torch

    from penstock.generation.core.sampling_params import SamplingParams
    from penstock.generation.core.sequence import Sequence

# Byte -> numbers to add to the scores of its eight ids: 0 where the bit is set, else -inf.
_BIAS_OF_BYTE = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_BIAS_OF_BYTE = _BIAS_OF_BYTE.astype(np.float32)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of R sequences. Valid until the next step."""

    # (R, at least ceil(V / 32)): bit i % 32 of word i // 32 says that token i may follow. Contiguous.
    words_RW: npt.NDArray[np.int32]
    # seq_id -> row of `words_RW`.
    row_of: Mapping[int, int]

    def apply(self, scores_NV: torch.Tensor, sequences: Seq[Sequence]) -> None:
        """Set the scores of tokens that a row's sequence may not continue with to -inf, in place.

        When no allowed token has a finite score, the grammar wins over the processors that removed them: allowed tokens
        get the score 0. In a beam search this holds only when none of its beams can go on; all of them are then in the
        step.
        """
        rows, masks = [], []
        for row, sequence in enumerate(sequences):
            mask = self.row_of.get(sequence.seq_id)
            if mask is not None:
                rows.append(row)
                masks.append(mask)
        if not rows:
            return
        bias_MV = uploaded(self._bias(masks, scores_NV.shape[1]), scores_NV.device)
        if len(rows) == len(sequences):
            masked_MV = scores_NV.add_(bias_MV)
        else:
            index_M = uploaded(np.array(rows, dtype=np.int64), scores_NV.device)
            masked_MV = scores_NV[index_M].add_(bias_MV)
            scores_NV[index_M] = masked_MV
        highest_M = masked_MV.amax(dim=1).tolist()
        if -np.inf in highest_M:
            for place in _stuck([sequences[row].params for row in rows], highest_M):
                scores_NV[rows[place]] = bias_MV[place]

    def _bias(self, masks: list[int], vocab_size: int) -> npt.NDArray[np.float32]:
        """Bias (M, V) in fp32 on the host: 0 or -inf."""
        words_MW = self.words_RW if masks == list(range(len(self.words_RW))) else self.words_RW[masks]
        bias_MB8 = np.take(_BIAS_OF_BYTE, words_MW.view(np.uint8), axis=0)
        biases: npt.NDArray[np.float32] = bias_MB8.reshape(len(masks), -1)[:, :vocab_size]
        return biases


def _stuck(options: list[SamplingParams], highest_M: list[float]) -> list[int]:
    """Places of the rows that can go on only if allowed tokens get the score 0. All beams of a request hold the same
    options object."""
    alive = {id(params) for params, highest in zip(options, highest_M, strict=True) if highest > -np.inf}
    return [
        place
        for place, (params, highest) in enumerate(zip(options, highest_M, strict=True))
        if highest == -np.inf and (params.mode.rescue is not Rescue.TOGETHER or id(params) not in alive)
    ]
