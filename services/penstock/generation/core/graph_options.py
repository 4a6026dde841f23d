"""Options of the model's graphs. Light: the configuration imports this."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.options import option

GRAPHS = "The model as graphs"


def _sizes(text: str) -> tuple[int, ...]:
    """Parse whole numbers above 0, with commas between them. Raises ValueError."""
    try:
        sizes = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError("expected whole numbers with commas between them") from None
    if not sizes or min(sizes) < 1:
        raise ValueError("expected numbers of at least 1")
    return sizes


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Bounds that a server's owner may change. All of them are for the whole process, over all callers. Each is
    declared here alone, as `EngineOptions`."""

    graph_lengths: tuple[int, ...] = option(
        (512, 2048),
        "Sequence lengths of the graphs' stages, up to the context; shapes in between are accepted as well.",
        group=GRAPHS,
        metavar="INT,INT",
        parse=_sizes,
    )
    graph_batches: tuple[int, ...] = option(
        (1, 4), "Sequences at once of the graphs' stages.", group=GRAPHS, metavar="INT,INT", parse=_sizes
    )
    graph_kv_tokens: int = option(
        4096,
        "Tokens of the KV pool for named sequences, in addition to --kv-memory; memory is allocated on use.",
        group=GRAPHS,
        minimum=0,
    )
    graph_share: float = option(
        0.5,
        "Largest share of the engine's time for graphs while there are requests.",
        group=GRAPHS,
        minimum=0.01,
        maximum=1.0,
    )
    max_graph_streams: int = option(8, "Forward streams that are open at once.", group=GRAPHS, minimum=1)
    max_graph_call_bytes: int = option(
        64 << 20, "Most bytes of inputs, and of outputs, of one graph call in messages.", group=GRAPHS, minimum=1024
    )
    max_graph_tensors: int = option(1024, "Tensors kept at the server; 0: none.", group=GRAPHS, minimum=0)
    max_graph_tensor_bytes: int = option(256 << 20, "Bytes of all tensors kept.", group=GRAPHS, minimum=0)
    max_graph_leases: int = option(64, "Leases at once; they own the tensors kept.", group=GRAPHS, minimum=1)
    graph_lease_seconds: float = option(
        60.0,
        "Default lifetime of an unused lease; 1h at most.",
        group=GRAPHS,
        minimum=0.01,
        maximum=3600.0,
    )
