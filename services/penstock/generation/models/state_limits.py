"""Fields of a request that a model with states of layers, or with sparse attention, cannot do, and the reasons."""

from __future__ import annotations

# Where layers keep a state.
NOT_ATTENDED = {
    "output.output_attentions": "is not possible with this model: some of its layers keep a state instead of attending"
}
# With sparse attention.
NOT_WHOLE = {
    "output.output_attentions": "is not possible with this model: its rows attend to positions that an indexer chose"
}
