"""Fields of a request that some models cannot do, and the reasons: those with states of layers, with sparse attention,
or with vectors of tokens for each layer."""

from __future__ import annotations

# Where layers keep a state.
NOT_ATTENDED = {
    "output.output_attentions": "is not possible with this model: some of its layers keep a state instead of attending"
}
# With sparse attention.
NOT_WHOLE = {
    "output.output_attentions": "is not possible with this model: its rows attend to positions that an indexer chose"
}
# Where layers have vectors of tokens.
NOT_WITHOUT_IDS = {"inputs_embeds": "is not possible with this model: its layers look at token ids"}
