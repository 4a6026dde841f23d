"""Rendezvous of the ranks of a launcher such as torchrun: one process each, described by variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.common.environment import current_environment
from penstock.common.errors import StartupError

_FLAG = "--tensor-parallel"
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_MOST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Rank of this process, the number of ranks, and the store where they find each other."""

    rank: int
    count: int
    address: str
    port: int
    # The launcher's own process has the store; else rank 0 makes it.
    is_store_there: bool
    # Number of restarts of the ranks by the launcher: its store outlives them.
    attempt: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str], count: int) -> Rendezvous | None:
        """Read the variables of torchrun, for a model in `count` processes. None: no launcher, or one process.

        A launcher of one process, as some platforms present themselves, does not count: it starts no further ranks.
        Raises StartupError naming the variable.
        """
        if count == 1 or "RANK" not in environment or environment.get("WORLD_SIZE") == "1":
            return None
        rank, ranks = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if ranks != count:
            raise StartupError(
                f"WORLD_SIZE is {ranks}, and {_FLAG} {count}: the launcher starts a process for each part of the "
                "model; unset RANK where this is no launcher's",
                flag="WORLD_SIZE",
            )
        if rank >= count:
            raise StartupError(f"RANK is {rank}, and must be below WORLD_SIZE, {count}", flag="RANK")
        if _number(environment, "LOCAL_RANK") != rank:
            raise StartupError(
                f"LOCAL_RANK is {environment['LOCAL_RANK']}, and RANK {rank}: the processes of {_FLAG} are all on one "
                "machine",
                flag="LOCAL_RANK",
            )
        port = _number(environment, "MASTER_PORT")
        if not 0 < port <= _MOST_PORT:
            raise StartupError(f"MASTER_PORT is {port}, and must be from 1 to {_MOST_PORT}", flag="MASTER_PORT")
        is_there = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = _number({_ATTEMPT: "0", **environment}, _ATTEMPT)
        return cls(rank, count, _text(environment, "MASTER_ADDR"), port, is_there, attempt)

    def use(self) -> None:
        """Use it for a model, once: the launcher's other processes are ranks of this model only, and end with
        it.

        Raises StartupError naming RANK.
        """
        if self in _used:
            raise StartupError(
                "RANK is set, and an earlier model of this process has had the launcher's other processes as ranks, "
                "which end with it: load one model, or start the program anew",
                flag="RANK",
            )
        _used.add(self)


# Those that this process has used.
_used: set[Rendezvous] = set()


def _text(environment: Mapping[str, str], name: str) -> str:
    found = environment.get(name)
    if not found:
        raise StartupError(
            f"RANK is set, and {name} is not: a launcher of ranks sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT; without one unset RANK",
            flag=name,
        )
    return found


def _number(environment: Mapping[str, str], name: str) -> int:
    found = _text(environment, name)
    if not (found.isascii() and found.isdigit() and len(found) < 10):
        raise StartupError(f"{name} must be a number from 0 on, found {found[:40]!r}", flag=name)
    return int(found)


def refuse_launcher(tensor_parallel: int) -> None:
    """Refuse to start a tree of services in one of a launcher's processes. Raises StartupError."""
    if Rendezvous.of(current_environment(), tensor_parallel) is not None:
        raise StartupError(
            "RANK is set: a launcher of ranks starts `penstock serve generation`, and the other services come beside "
            f"it; unset RANK, and {_FLAG} starts the processes itself",
            flag="RANK",
        )
