"""Groups of a model's layers by the positions that their rows read: each has block tables of its own over one pool."""

from __future__ import annotations

from dataclasses import dataclass

# Bundles of each group of layers that a small load has: memory for more is made when it is needed.
FIRST_BUNDLES = 8


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that read the same positions. Without `window` and `chunk` a row reads all positions before it.

    The pool's blocks have one size. So the keys and values that all layers of a group keep of the same tokens lie in
    `num_blocks` blocks, which are taken and given back together: a *bundle*.
    """

    num_blocks: int = 1
    # Positions up to its own that a row reads at most; 0: there is no such bound.
    window: int = 0
    # A row reads the positions of its own chunk, which has this length; 0: there are no chunks.
    chunk: int = 0
    # A window begins at a multiple of this: kernels read whole tiles. What is before it takes no weight, but is read.
    align: int = 1

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError("num_blocks must be at least 1")
        if self.window < 0 or self.chunk < 0:
            raise ValueError("window and chunk must not be negative")
        if self.align < 1:
            raise ValueError("align must be at least 1")
        if self.window and self.chunk:
            raise ValueError("a group has a window or chunks, not both")

    @property
    def name(self) -> str:
        """Name by what its rows read: `all`, `window_512` or `chunk_8192`."""
        return f"window_{self.window}" if self.window else f"chunk_{self.chunk}" if self.chunk else "all"

    @property
    def span(self) -> int:
        """Most positions that a row reads, its own included; 0: there is no bound, and no block is ever behind it."""
        return self.window + self.align - 1 if self.window else self.chunk

    def first_read(self, position: int) -> int:
        """Return the first position that the row at `position` reads."""
        if self.window:
            return max(position - self.window + 1, 0) // self.align * self.align
        if self.chunk:
            return max(position, 0) // self.chunk * self.chunk
        return 0

    def most_blocks(self, rows: int, block_size: int) -> int:
        """Most blocks of tokens that a sequence holds during a step of `rows` rows. There is a `span`.

        One position more than a row reads stays, for a fork that goes back by a token.
        """
        return -(-(self.span + rows - 1) // block_size) + 1


# The only group of a model with layers that all read everything.
WHOLE = CacheGroup()
