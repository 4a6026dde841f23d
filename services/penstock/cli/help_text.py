"""What --help looks like where typer leaves no choice."""

from __future__ import annotations

from rich.text import Text
from typer import rich_utils


class _Folding(rich_utils.OptionHighlighter):
    """Colours flags as typer does. One that is wider than its column goes on in the next line instead of being cut."""

    def highlight(self, text: Text) -> None:
        """See Highlighter."""
        super().highlight(text)
        text.overflow = "fold"


class _FoldingNegative(rich_utils.NegativeOptionHighlighter):
    """The same for --no-... ."""

    def highlight(self, text: Text) -> None:
        """See Highlighter."""
        super().highlight(text)
        text.overflow = "fold"


def fold_long_flags() -> None:
    """For every help that this process prints."""
    rich_utils.highlighter = _Folding()
    rich_utils.negative_highlighter = _FoldingNegative()
