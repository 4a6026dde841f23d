"""The demo model's corpus: one generator per family, the split, and the prompts held out of training."""

from .base import LETTER_BREAK, Dialogue, Turn, visible
from .mixture import FAMILIES, HeldOutPrompt, held_out_prompts, held_out_thinking_prompts, messages_of

__all__ = [
    "FAMILIES",
    "LETTER_BREAK",
    "Dialogue",
    "HeldOutPrompt",
    "Turn",
    "held_out_prompts",
    "held_out_thinking_prompts",
    "messages_of",
    "visible",
]
