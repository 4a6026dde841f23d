"""Random generators in a served process."""

from __future__ import annotations

import torch


def seeded_generator(seed: int) -> torch.Generator:
    """Return a generator with this seed: its numbers are those of a new `torch.Generator`.

    Making that needs modules of torch that this process may have left unloaded (startup/preload.py).
    """
    return torch.default_generator.clone_state().manual_seed(seed)
