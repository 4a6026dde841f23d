"""A rank other than 0 started by a launcher, in place of a service or a Generator."""

from __future__ import annotations

from typing import Protocol

from penstock.common.environment import current_environment, prepare_environment
from penstock.generation.parallel.launch import Rendezvous


class HasRanks(Protocol):
    """Configuration of a model in several processes."""

    @property
    def tensor_parallel(self) -> int:
        """Number of the processes."""

    @property
    def rank_threads(self) -> int | None:
        """Threads of each; None: all cores."""


def run_rank(config: HasRanks) -> int | None:
    """Run as a launcher's rank other than 0 until rank 0 ends; return the exit code. None: this process serves.

    Raises StartupError naming the variable.
    """
    rendezvous = Rendezvous.of(current_environment(), config.tensor_parallel)
    if rendezvous is None or rendezvous.rank == 0:
        return None
    # Before torch is imported.
    prepare_environment(config.rank_threads)
    from penstock.generation.parallel.meeting import meet_rank_0
    from penstock.generation.parallel.worker import serve

    return serve(*meet_rank_0(rendezvous))
