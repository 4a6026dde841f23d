"""Fields of a request that a model with states of layers, or with sparse attention, cannot do, and the reasons."""

from __future__ import annotations

_BACK = "is not possible with this model: its layers keep a state, which cannot go back to an earlier token"
_NO_ATTENTIONS = "is not possible with this model: some of its layers keep a state instead of attending"
# Where states can go back.
NOT_ATTENDED = {"output.output_attentions": _NO_ATTENTIONS}
# With sparse attention.
NOT_WHOLE = {
    "output.output_attentions": "is not possible with this model: its rows attend to positions that an indexer chose"
}
UNSUPPORTED = {
    **NOT_ATTENDED,
    **dict.fromkeys(
        (
            "config.assistant_model",
            "config.prompt_lookup_num_tokens",
            "config.ngram_memory_num_tokens",
            "config.lookahead_window",
            "config.num_beam_groups",
        ),
        _BACK,
    ),
}
