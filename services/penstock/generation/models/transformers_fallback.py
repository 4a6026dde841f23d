"""A model of transformers' own modules as layers, on the scheduler and the paged pool of the native models."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn

from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.cache_layout import LayerSight
from penstock.generation.attention.transformers_interface import (
    NAME,
    OWN_NAME,
    AttentionCall,
    BoundLayers,
    PagedStep,
    UnsupportedAttention,
    paged,
    register,
)
from penstock.generation.models.expert_module import ExpertModule
from penstock.generation.models.own_attention import reference_attention
from penstock.generation.models.pass_graph import PassGraph, Unreadable
from penstock.generation.models.row_positions import give_positions

if TYPE_CHECKING:
    from penstock.generation.attention.base import Attention
    from penstock.generation.attention.kv_cache import KVCachePool
    from penstock.generation.attention.state_pool import StateTensor
    from penstock.generation.core.model_config import ModelConfig
    from penstock.generation.core.step import BlockCopy
    from penstock.generation.layers.lora import AdapterBatch, AdapterWeights
    from penstock.generation.models.hidden_keeper import LayerTaps, StateKeeper

# Reasons of requests that are refused.
NO_ATTENTIONS = "is not possible with this model: transformers' modules run it, with chunks, odd heads or biases"
NO_HIDDEN_STATES = "is not possible with this model: transformers' modules give no hidden states of its layers"
NO_EMBEDS = "is not possible with this model: its layers look at token ids"
# Kind of layers with an indexer, by which transformers' modules look for their mask.
_INDEXED = "indexed_attention"


class TransformersModel:
    """A LanguageModel with the methods of CausalLM. Rows of a step go through the modules as one sequence (1, T)
    without padding; the attention function tells the step's sequences apart. Steps are computed whole: no fused layers,
    no adapters."""

    def __init__(
        self,
        causal: Any,
        decoder: Any,
        config: ModelConfig,
        calls: Sequence[AttentionCall],
        attention: Attention,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_bytes: int,
        unsupported: Mapping[str, str],
        states: Sequence[StateTensor] = (),
    ) -> None:
        """Take a `PreTrainedModel` with a head, in evaluation mode, and the module in it that gives the hidden states;
        `calls` are those of its attention in one pass."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self.num_bytes = num_bytes
        self.mapped_bytes = 0
        self.attention = attention
        self.causal = causal
        self.calls = tuple(calls)
        self._layers = BoundLayers()
        self._unsupported = dict(unsupported)
        self._states = tuple(states)
        self._decoder = decoder
        self._embedding: Any = self.causal.get_input_embeddings()
        self._head = Head(causal, decoder)
        self._pass_graph, self._head_graph = self._new_graph(), PassGraph()
        # Modules that attended by themselves look for several texts in one row, by numbers, where they have no mask.
        self._has_mask = reference_attention(causal) is not None
        give_positions(causal)
        _warn_of_no_padding(causal)

    @property
    def can_draw(self) -> bool:
        return False

    def draws_in(self, metadata: AttentionMetadata) -> bool:
        return False

    @property
    def head_site(self) -> int:
        return 0

    @property
    def unsupported(self) -> Mapping[str, str]:
        return self._unsupported

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

    @property
    def windows(self) -> Sequence[int | None]:
        """Layers with chunks count as seeing all."""
        return [call.window if call.chunk is None else None for call in self.calls]

    @property
    def sights(self) -> Sequence[LayerSight]:
        """Layers that are computed here, and not by the device's attention, read nothing behind."""
        return [self._sight(call) for call in self.calls]

    def _sight(self, call: AttentionCall) -> LayerSight:
        if call.chunk is not None:
            # A layer with both reads less than its chunk: that is kept.
            return LayerSight(chunk=call.chunk)
        if call.window is None:
            return LayerSight()
        behind = self.attention.reads_behind if call.is_plain(self.num_kv_heads) else 0
        return LayerSight(call.window, align=behind + 1)

    @property
    def state_layout(self) -> Sequence[StateTensor]:
        return self._states

    def with_calls(self, calls: Sequence[AttentionCall]) -> TransformersModel:
        """Return a model on the same weights with another attention."""
        twin = copy.copy(self)
        twin.calls, twin._layers = tuple(calls), BoundLayers()
        twin._pass_graph = self._new_graph()
        # It is about the calls.
        twin.__dict__.pop("_is_fixed", None)
        return twin

    def _new_graph(self) -> PassGraph:
        handles = [module.handle for module in self.causal.modules() if isinstance(module, ExpertModule)]
        return PassGraph([handle for handle in handles if handle is not None])

    def shallow(self, num_layers: int) -> TransformersModel:
        """Return the model itself: it cannot be cut."""
        return self

    def blocks_are_copied(self, copies: Sequence[BlockCopy]) -> None:
        """This process is the only one."""

    def adapter_batch(self, adapters: Sequence[AdapterWeights | None], counts: Sequence[int]) -> AdapterBatch:
        """Raise RuntimeError: no adapter can be loaded for such a model."""
        _refuse("adapters")

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
        if adapters is not None:
            _refuse("adapters")
        if embeds_TI is None and keeper is None and attention is None and self._is_fixed and kv.is_plain:
            hidden = self._by_graph(input_ids_T, positions_T, metadata, kv)
        else:
            hidden = self._by_modules(input_ids_T, positions_T, metadata, kv, embeds_TI, keeper, attention)
        return hidden if rows_R is None else hidden[rows_R]

    @cached_property
    def _is_fixed(self) -> bool:
        """True when passes may differ in the numbers of their tensors alone."""
        return self.device.type == "cpu" and all(call.is_plain(self.num_kv_heads) for call in self.calls)

    def _by_graph(
        self, input_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, kv: KVCachePool
    ) -> Tensor:
        """Return hidden states (T, hidden) by the graph of a pass, where there is one."""
        (hidden,) = self._pass_graph(
            (kv.geometry, metadata.view_tables is None),
            (input_ids_T, positions_T, *step_tensors(metadata), *kv.layer_tensors),
            lambda: (self._by_modules(input_ids_T, positions_T, metadata, kv),),
            lambda *tensors: (self._pass_over(kv, *tensors),),
        )
        return hidden

    def _pass_over(
        self,
        kv: KVCachePool,
        input_ids_T: Tensor,
        positions_T: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        tables: Tensor,
        slots: Tensor,
        *memory: Tensor,
    ) -> Tensor:
        """Return hidden states (T, hidden) of a pass that is to be recorded; nothing on the host tells of its rows."""
        metadata = recorded_metadata(query_start, context_lens, tables, slots)
        return self._by_modules(input_ids_T, positions_T, metadata, kv.over(memory))

    def _by_modules(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        kv: KVCachePool,
        embeds_TI: Tensor | None = None,
        keeper: StateKeeper | None = None,
        attention: Attention | None = None,
    ) -> Tensor:
        """Return hidden states (T, hidden) by one call of the decoder."""
        inputs: dict[str, Any] = {"position_ids": positions_T.unsqueeze(0), "use_cache": False, "return_dict": True}
        if embeds_TI is None:
            inputs["input_ids"] = input_ids_T.unsqueeze(0)
        else:
            inputs["inputs_embeds"] = embeds_TI.unsqueeze(0)
        if self._has_mask:
            inputs["attention_mask"] = torch.ones_like(positions_T).unsqueeze(0)
        if self.config.index is not None:
            # Indexers cut it; sequences and positions tell what a row sees.
            inputs["attention_mask"] = {_INDEXED: positions_T.new_zeros((1, 1, 1, 1))}
        if keeper is not None:
            inputs["output_hidden_states"] = True
        step = PagedStep(self.calls, metadata, kv, attention or self.attention, positions_T, self._layers)
        with paged(step):
            output = self._decoder(**inputs)
        if step.num_calls != len(self.calls):
            raise UnsupportedAttention(f"it attends {step.num_calls} times instead of {len(self.calls)}")
        if keeper is not None:
            for number, state in enumerate(output.hidden_states):
                keeper.take(number, state[0])
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

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
        """Raise RuntimeError: `can_draw` is false."""
        _refuse("fused layers")

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
        """Raise RuntimeError: `can_draw` is false."""
        _refuse("fused layers")

    @torch.inference_mode()
    def compute_logits(self, hidden_NI: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """The model's own head computes them, with its soft cap, scale and multipliers."""
        if self.device.type != "cpu":
            return self._head(hidden_NI)
        (logits,) = self._head_graph(
            None, (hidden_NI,), lambda: (self._head(hidden_NI),), lambda hidden: (self._head(hidden),)
        )
        return logits

    @torch.inference_mode()
    def embed(self, input_ids_T: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        rows: Tensor = self._embedding(input_ids_T)
        return rows

    def given_embeds(self, embeds_PI: Tensor) -> Tensor:
        """A decoder that multiplies embeddings does so itself."""
        return embeds_PI


def step_tensors(metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of a step that a recorded pass reads: for `recorded_metadata`."""
    lengths = (metadata.query_start, metadata.context_lens)
    if metadata.view_tables is not None and metadata.view_slots is not None:
        return (*lengths, metadata.view_tables, metadata.view_slots)
    return (*lengths, metadata.block_tables, metadata.slot_mapping)


def recorded_metadata(query_start: Tensor, context_lens: Tensor, tables: Tensor, slots: Tensor) -> AttentionMetadata:
    """Return the metadata of a pass that is to be recorded: nothing on the host tells of its rows."""
    has_views = slots.dim() > 1
    return AttentionMetadata(
        query_start,
        context_lens,
        tables[0] if has_views else tables,
        slots[0] if has_views else slots,
        cast("list[int]", Unreadable()),
        cast("list[int]", Unreadable()),
        0,
        view_tables=tables if has_views else None,
        view_slots=slots if has_views else None,
    )


def _warn_of_no_padding(causal: nn.Module) -> None:
    """Leave out a warning that some modules read each step's ids for: there is no padding."""
    for module in causal.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            object.__setattr__(module, "warn_if_padding_and_no_attention_mask", _nothing)


def _nothing(*_: object) -> None:
    pass


class Head:
    """The rest of a model after its decoder, as its own `forward` computes it."""

    def __init__(self, causal: nn.Module, decoder: nn.Module) -> None:
        """Take the model, without changing it: a copy that shares every weight leaves out the decoder."""
        self._ready = _Ready(decoder)
        # The modules on the way to the decoder are copied, so that it can be replaced in the copies.
        self._model: Any = _with(causal, decoder, self._ready)

    def __call__(self, hidden_NI: Tensor) -> Tensor:
        """Return logits (N, vocabulary) in float32."""
        self._ready.output = _Output(hidden_NI.unsqueeze(0))
        ids = torch.zeros((1, hidden_NI.shape[0]), dtype=torch.int64, device=hidden_NI.device)
        try:
            logits: Tensor = self._model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        finally:
            self._ready.output = None
        return logits.float()


class _Output:
    """Output of a decoder that has hidden states (1, N, hidden) and nothing else."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Ready(nn.Module):
    """Stand-in for a decoder with a ready output."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.output: _Output | None = None
        # Not a child: its weights are in its own place.
        object.__setattr__(self, "_decoder", decoder)

    def __getattr__(self, name: str) -> Any:
        # Some heads read numbers of the decoder, such as a multiplier.
        return getattr(self.__dict__["_decoder"], name)

    def forward(self, *arguments: object, **named: object) -> _Output | None:
        return self.output


@contextmanager
def attending_by(causal: Any, name: str) -> Iterator[None]:
    """Let the model attend by transformers' attention function `name` inside the block, and by ours afterwards.

    Raises UnsupportedAttention where the model has attention of its own.
    """
    register()
    _set_attention(causal, name)
    try:
        yield
    finally:
        _set_attention(causal, NAME)


def _set_attention(causal: Any, name: str) -> None:
    own = reference_attention(causal)
    if own is not None:
        # Transformers refuses other names for such modules.
        name = {"eager": own, NAME: OWN_NAME}.get(name, name)
        for module in causal.modules():
            if hasattr(module, "set_attn_implementation"):
                module.config._attn_implementation = name
        return
    causal.set_attn_implementation(name)
    # Parts such as rotary embeddings may have copies of their own, which attend to nothing; encoders of images do not
    # run, and may attend by themselves.
    if causal.config.get_text_config(decoder=True)._attn_implementation != name:
        raise UnsupportedAttention("its attention does not go through transformers' AttentionInterface")


def _with(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Return a copy of `module` with `new` in place of `old`; everything else is shared."""
    twin = copy.copy(module)
    children = dict(module._modules)
    for name, child in children.items():
        if child is old:
            children[name] = new
        elif child is not None and any(one is old for one in child.modules()):
            children[name] = _with(child, old, new)
    object.__setattr__(twin, "_modules", children)
    return twin


def _refuse(feature: str) -> NoReturn:
    raise RuntimeError(f"transformers' modules run this model: there are no {feature}")
