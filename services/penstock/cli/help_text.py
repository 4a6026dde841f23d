"""Form of --help where typer leaves no choice."""

from __future__ import annotations

from rich.text import Text
from typer import rich_utils


class _Folding(rich_utils.OptionHighlighter):
    """Highlighter that colours flags as typer does. A flag wider than its column is folded instead of cut."""

    def highlight(self, text: Text) -> None:
        """See Highlighter."""
        super().highlight(text)
        text.overflow = "fold"


class _FoldingNegative(rich_utils.NegativeOptionHighlighter):
    """Highlighter of the same kind for --no-... ."""

    def highlight(self, text: Text) -> None:
        """See Highlighter."""
        super().highlight(text)
        text.overflow = "fold"


def fold_long_flags() -> None:
    """Fold long flags in every help text that this process prints."""
    rich_utils.highlighter = _Folding()
    rich_utils.negative_highlighter = _FoldingNegative()
