"""The one decoder of all native families; a family is data for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.generation.attention.cache_layout import LayerSight
from penstock.generation.layers.decoder_layer import DecoderLayer, RMSNorm, Step
from penstock.generation.layers.delta_net import note_lengths, state_layout
from penstock.generation.layers.linear.native import NativeLinear
from penstock.generation.layers.lora import (
    SITES_A_LAYER,
    AdapterBatch,
    AdapterWeights,
    DenseAdapter,
    DenseBatch,
    EmbeddingPart,
    LoraPart,
    NativeAdapter,
    NativeBatch,
    SiteAdapters,
)
from penstock.generation.layers.media_rows import MediaRows
from penstock.generation.models.fused import FusedLayers, can_fuse
from penstock.generation.models.hidden_keeper import LayerTaps
from penstock.generation.models.state_limits import NOT_ATTENDED, NOT_WHOLE, NOT_WITHOUT_IDS
from penstock.generation.weights.tensor_names import site_linears

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention, AttentionMetadata
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.attention.state_pool import StateTensor
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.core.step import BlockCopy
    from penstock.generation.layers.linear.base import Linear, Rows
    from penstock.generation.layers.rope import RotaryEmbedding
    from penstock.generation.layers.token_inputs import TokenInputs
    from penstock.generation.models.hidden_keeper import StateKeeper
    from penstock.generation.models.model_parts import ModelParts


class CausalLM:
    """A loaded LanguageModel. It holds only weights: everything about a step comes as arguments. Any number of pools
    may use one instance, one call at a time."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor | Rows,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        lm_head: Linear,
        rotaries: Sequence[RotaryEmbedding],
        attention: Attention,
        dtype: torch.dtype,
        device: torch.device,
        num_bytes: int,
        mapped_bytes: int = 0,
        parts: ModelParts | None = None,
        token_inputs: TokenInputs | None = None,
    ) -> None:
        """Take the parts of a model; `embedding` is a table (vocabulary, hidden) or the rows of `lm_head`. Layers refer
        to their rotary embedding by its place in `rotaries`. `parts`: the same by name; None: nothing replaces any.
        `token_inputs`: what makes tokens' vectors for each layer; None: they have none."""
        self.config = config
        self.dtype = dtype
        self.device = device
        # Memory that the weights take.
        self.num_bytes = num_bytes
        # Part of it that is mapped from the page cache.
        self.mapped_bytes = mapped_bytes
        self.parts = parts
        self.layers = tuple(layers)
        self.attention = attention
        self._embedding = embedding
        self.token_inputs = token_inputs
        found = config.media_ids
        self._media_rows = None if found is None else MediaRows(found, config.vocab_size, device)
        table = embedding if isinstance(embedding, Tensor) else None
        self._rows = cast("Rows", embedding) if table is None else partial(F.embedding, weight=table)
        # In the model's dtype, as in transformers.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        if self._embedding_scale != 1.0:
            self._rows = _Scaled(self._rows, self._embedding_scale)
        self._fused = (
            FusedLayers(config, self.layers, norm, lm_head, rotaries, table, self._embedding_scale, dtype, token_inputs)
            if can_fuse(config, self.layers, norm, lm_head, attention, token_inputs)
            else None
        )
        self._norm = norm
        # Of the residual stream.
        self.stream_dtype = norm.kernels.stream_dtype(dtype)
        self._lm_head = lm_head
        self._rotaries = tuple(rotaries)
        self._has_plain_logits = config.logit_scale == 1.0 and not config.logit_softcap
        self._is_native = isinstance(lm_head, NativeLinear)

    @property
    def fused(self) -> FusedLayers | None:
        """All layers in one call; None: their operators are called one by one."""
        return self._fused

    @property
    def can_draw(self) -> bool:
        """True when `decode` may be called where layers keep no states, and `forward_and_draw` for steps that
        `draws_in` accepts."""
        return self._fused is not None

    def draws_in(self, metadata: AttentionMetadata) -> bool:
        """True when `forward_and_draw` may be called for a step."""
        return self.can_draw and (self._fused is None or self._fused.takes(metadata))

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Fields of a request that it cannot do: some where layers keep states, read chosen positions, or have vectors
        of tokens."""
        if self.token_inputs is not None:
            return NOT_WITHOUT_IDS
        if self.config.index is not None:
            return NOT_WHOLE
        return {} if self.config.delta is None else NOT_ATTENDED

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

    @property
    def windows(self) -> Sequence[int | None]:
        """Number of positions that a row of each layer sees, itself included; None: all."""
        return self.config.sliding_windows

    @property
    def sights(self) -> Sequence[LayerSight]:
        """Positions that rows read in the pool of each layer that has keys there. A layer that reads another's has its
        window."""
        align, config = self.attention.reads_behind + 1, self.config
        windows = [
            window
            for layer, window in enumerate(config.sliding_windows)
            if not config.layer_shapes or config.layer_shapes[layer].source is None
        ]
        return [LayerSight() if window is None else LayerSight(window, align=align) for window in windows]

    @property
    def state_layout(self) -> Sequence[StateTensor]:
        """Tensors of a state of each sequence, of all layers that keep one: the rows that the next convolution reads,
        and the matrices of the heads."""
        return state_layout(self.config.delta, self.dtype)

    def shallow(self, num_layers: int) -> CausalLM:
        """Return a model of the first `num_layers` layers on the same weights, to measure a step; its logits are
        meaningless. A model with layers of several kinds cannot be cut, and returns itself."""
        if self.config.delta is not None or self.config.layer_shapes:
            return self
        return CausalLM(
            self.config,
            embedding=self._embedding,
            layers=self.layers[:num_layers],
            norm=self._norm,
            lm_head=self._lm_head,
            rotaries=self._rotaries,
            attention=self.attention,
            dtype=self.dtype,
            device=self.device,
            num_bytes=self.num_bytes,
            mapped_bytes=self.mapped_bytes,
            token_inputs=self.token_inputs,
        )

    @property
    def head_site(self) -> int:
        """Site of the head among those that adapters may change (layers.lora)."""
        return len(self.layers) * SITES_A_LAYER

    def adapter_weights(
        self, sites: Mapping[int, Sequence[LoraPart]], embedding: EmbeddingPart | None
    ) -> AdapterWeights:
        """Return an adapter's matrices, of `dtype` and on `device`, in the format of this model's layers."""
        if not self._is_native:
            return DenseAdapter(sites, embedding)
        linears = [linear for layer in range(len(self.layers)) for linear in site_linears(self.config, layer)]
        # A site that no adapter may change gets no matrices, for any shape.
        each = [(0, False) if linear is None else (linear.shape[0], linear.gated) for linear in linears]
        # The head of a rank has some of the vocabulary.
        shapes = [*each, (self._lm_head.out_features, False)]
        return NativeAdapter(sites, embedding, shapes=shapes, dtype=self.dtype)

    def adapter_copies(self, site: int | None) -> tuple[int, int]:
        """Return the numbers of A and of B that an adapter's matrices at a site have in memory; None: of the
        embedding."""
        return 1, 1

    def blocks_are_copied(self, copies: Sequence[BlockCopy]) -> None:
        """This process is the only one."""

    def adapter_batch(self, adapters: Sequence[AdapterWeights | None], counts: Sequence[int]) -> AdapterBatch:
        """Return the adapters of a step's rows: `counts[i]` rows in turn have `adapters[i]`."""
        return (NativeBatch if self._is_native else DenseBatch)(adapters, counts)

    @torch.inference_mode()
    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        rows_R: Tensor | None = None,
        *,
        embeds_TI: Tensor | None = None,
        keeper: StateKeeper | None = None,
        attention: Attention | None = None,
        adapters: AdapterBatch | None = None,
    ) -> Tensor:
        """Return hidden_RI of `rows_R` (ascending; None: of every row, T) after the final norm, in the model's dtype;
        write all T rows' keys and values to `kv`.

        `input_ids_T` and `positions_T` are integer tensors on the model's device, as `metadata` describes them. Ids
        outside the vocabulary are the caller's error (IndexError on CPU). `embeds_TI` replaces what `embed` returns and
        may be overwritten; `keeper` is filled; `attention` replaces the model's own for this step; `adapters` are
        those of the T rows.
        """
        hidden = self.embed(input_ids_T, adapters) if embeds_TI is None else embeds_TI
        taps = keeper if isinstance(keeper, LayerTaps) else None
        if (
            self._fused is not None
            and keeper is taps
            and attention in (None, self.attention)
            and self._fused.takes(metadata)
        ):
            all_rows = taps is not None and taps.wants(len(self.layers)) and rows_R is not None
            rows = (hidden, self._table_rows(input_ids_T), None if all_rows else rows_R)
            hidden = self._run_fused(self._fused, rows, positions_T, metadata, kv, adapters, taps, draws=False)[0]
            return hidden[rows_R] if all_rows else hidden
        step = self.step(positions_T, metadata, kv, attention, adapters)
        if self.token_inputs is not None:
            step = replace(step, inputs_TX=self.token_inputs(hidden, self.table_ids(input_ids_T)))
        hidden = hidden.to(self.stream_dtype)
        pending: Tensor | None = None
        for number, layer in enumerate(self.layers):
            if keeper is not None and keeper.wants(number):
                keeper.take(number, (hidden if pending is None else hidden + pending).to(self.dtype))
            pending = layer(hidden, pending, step)
        if self.config.delta is not None:
            note_lengths(metadata, kv)
        hidden = self._norm.add(hidden, pending)
        if keeper is not None and keeper.wants(len(self.layers)):
            keeper.take(len(self.layers), hidden)
        return hidden if rows_R is None else hidden[rows_R]

    @torch.inference_mode()
    def forward_and_draw(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        rows_R: Tensor | None = None,
        embeds_TI: Tensor | None = None,
        adapters: AdapterBatch | None = None,
        taps: LayerTaps | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `forward`, and for each row the id of its highest logit (R): the first of equals, -1
        where none is finite. Fill `taps`, which may have rows after the final norm only where `rows_R` is None.

        The logits are never in memory, and nothing runs between layers and head. Call it only for a step that
        `draws_in` accepts.
        """
        if self._fused is None:
            raise RuntimeError("this model's operators are called one by one")
        hidden = self.embed(input_ids_T, adapters) if embeds_TI is None else embeds_TI
        rows = (hidden, self._table_rows(input_ids_T), rows_R)
        return self._run_fused(self._fused, rows, positions_T, metadata, kv, adapters, taps, draws=True)

    def _run_fused(
        self,
        fused: FusedLayers,
        rows: tuple[Tensor, Tensor | None, Tensor | None],
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        adapters: AdapterBatch | None,
        taps: LayerTaps | None,
        *,
        draws: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of FusedLayers, and note the states that it leaves. `rows`: embeddings, rows of tokens'
        vectors, and the wanted rows."""
        if not fused.takes(metadata):
            raise RuntimeError("this step goes layer by layer")
        hidden_TI, table_rows_TX, rows_R = rows
        result = fused(hidden_TI, positions_T, metadata, kv, rows_R, adapters, taps, table_rows_TX, draws=draws)
        if self.config.delta is not None:
            note_lengths(metadata, kv)
        return result

    def decode(
        self,
        ids: list[int],
        lengths: list[int],
        longest: int,
        tables_SB: Tensor,
        kv: KVCachePool,
        adapters: AdapterBatch | None = None,
        taps: LayerTaps | None = None,
    ) -> list[int]:
        """Return the ids that `forward_and_draw` draws for one token of each sequence.

        `ids` are these tokens, `lengths` the sequences' lengths with them, `longest` the greatest of these. `tables_SB`
        is as AttentionMetadata.block_tables. No adapter may change the embedding. Fill `taps`. Call it only where
        `can_draw`, and layers keep no states.
        """
        if self._fused is None:
            raise RuntimeError("this model's operators are called one by one")
        if self._media_rows is not None:
            ids = self._media_rows.listed(ids)
        return self._fused.decode(ids, lengths, longest, tables_SB, kv, adapters, taps)

    @torch.inference_mode()
    def compute_logits(self, hidden_NI: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """Return logits (N, vocab) in float32 of selected rows of `forward`'s result: pass only the rows that need
        logits. `adapters` are those of the N rows; None: none changes the head."""
        if adapters is None or not adapters.changes_site(self.head_site):
            logits_NV = self._lm_head.as_float(hidden_NI)
        else:
            logits_NV = self._lm_head.adapted_as_float(hidden_NI, SiteAdapters(adapters, self.head_site))
        return logits_NV if self._has_plain_logits else self._changed(logits_NV)

    def _changed(self, logits_NV: Tensor) -> Tensor:
        """Return the logits with the family's scale and cap. Both keep the order, so a greedy draw needs neither."""
        logits_NV = logits_NV * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits_NV.div_(cap).tanh_().mul_(cap) if cap else logits_NV

    @torch.inference_mode()
    def normed(self, hidden_NI: Tensor) -> Tensor:
        """Return hidden_NI after the final norm, as at the end of `forward`; the residual stream is not changed."""
        return self._norm(hidden_NI.contiguous())

    @property
    def head(self) -> Linear:
        """Linear layer that gives the logits."""
        return self._lm_head

    def embed(self, input_ids_T: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """Return the residual stream (T, hidden) before the first layer."""
        input_ids_T = self._read(input_ids_T)
        hidden = self._rows(input_ids_T)
        if adapters is not None and adapters.changes_embedding:
            adapters.add_to_embedding(hidden, input_ids_T)
        return hidden

    def table_ids(self, input_ids_T: Tensor) -> Tensor:
        """Return the ids of rows as the table of tokens' vectors has them."""
        return self._read(input_ids_T)

    def _read(self, input_ids_T: Tensor) -> Tensor:
        """Return the ids that rows are read as."""
        return input_ids_T if self._media_rows is None else self._media_rows(input_ids_T)

    def _table_rows(self, input_ids_T: Tensor) -> Tensor | None:
        """Return the table's rows; None: tokens have no vectors."""
        return None if self.token_inputs is None else self.token_inputs.rows(self.table_ids(input_ids_T))

    def step(
        self,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        attention: Attention | None = None,
        adapters: AdapterBatch | None = None,
    ) -> Step:
        """Return the Step that `layers` need to run one by one."""
        turns = [rotary(positions_T) for rotary in self._rotaries]
        return Step(turns, metadata, kv, attention or self.attention, self.stream_dtype, adapters)

    def given_embeds(self, embeds_PI: Tensor) -> Tensor:
        """Return a caller's embeddings as they enter the residual stream."""
        return embeds_PI * self._embedding_scale if self.config.scales_given_embeds else embeds_PI


class _Scaled:
    """Rows of an embedding times a number."""

    def __init__(self, rows: Rows, factor: float) -> None:
        self._rows, self._factor = rows, factor

    def __call__(self, ids_T: Tensor) -> Tensor:
        return self._rows(ids_T) * self._factor
