"""A model that takes the ids and gives the logits of a vocabulary of another size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.models.decoder import CausalLM


class ResizedVocabulary(CausalLM):
    """Shares the weights of another model. Checkpoints of one family pad the same vocabulary to different sizes.

    An id beyond the model's own is read as its last one, and is never likely: its logit is -inf. Logits beyond
    `vocab_size` are cut off.
    """

    def __init__(self, model: CausalLM, vocab_size: int) -> None:
        """`vocab_size`: of the ids and logits from now on; `config.vocab_size` stays the model's own."""
        vars(self).update(vars(model))
        self._vocab_size = vocab_size

    @property
    def can_draw(self) -> bool:
        """See CausalLM: the head has the model's own vocabulary."""
        return False

    def embed(self, input_ids_T: Tensor) -> Tensor:
        """See CausalLM."""
        return super().embed(input_ids_T.clamp(max=self.config.vocab_size - 1))

    @torch.inference_mode()
    def compute_logits(self, hidden_NI: Tensor) -> Tensor:
        """See CausalLM; (N, vocab_size)."""
        logits_NV = super().compute_logits(hidden_NI)
        missing = self._vocab_size - logits_NV.shape[1]
        if missing > 0:
            return F.pad(logits_NV, (0, missing), value=-torch.inf)
        return logits_NV[:, : self._vocab_size].contiguous()
