"""Facts of a model of transformers, read from one short pass of its own: its attention, and its plain linear layers.

Windows are read from the masks that transformers makes for the model, since some models pass no window to their
attention although their masks have one. A mask is a function of positions there; it is called for positions far beyond
the pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.generation.attention.state_pool import StateTensor
from penstock.generation.attention.transformers_interface import (
    AttentionCall,
    OwnCall,
    SeesLaterRows,
    UnsupportedAttention,
    check_biases,
)
from penstock.generation.models.module_swaps import linear_types
from penstock.generation.models.transformers_fallback import attending_by
from penstock.generation.models.transformers_states import cache_argument, empty_cache, has_states, read_layout

NUM_TOKENS = 6
_NAME = "penstock_recording"
# Farthest position that a mask is called for.
_FARTHEST = 1 << 16
# The sight of plain attention, without heads.
_CAUSAL = AttentionCall(0, 0, 0, 0)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Recording:
    """Facts of a pass."""

    # Module that returns the hidden states: the outermost one that the model calls.
    decoder: nn.Module
    # In the order of the pass.
    calls: tuple[AttentionCall, ...]
    # Linear layers, GPT-2's Conv1D among them, with a weight that other modules read: they must stay as they are.
    read_linears: frozenset[nn.Module]
    # True when the decoder gives a hidden state for the embedding and each of `num_layers` layers.
    has_hidden_states: bool
    # True when embeddings in place of ids give the same result.
    takes_embeds: bool
    # Of a pass of NUM_TOKENS tokens.
    seconds: float
    # Tensors of a sequence's state, if layers keep one.
    states: tuple[StateTensor, ...] = ()


def record(causal: Any, num_layers: int, longest: int, *, has_indexers: bool = False) -> Recording:
    """Run the model once on a few ids. `longest`: most positions of a sequence. `has_indexers`: indices in its calls
    are positions that an indexer chose.

    Raises UnsupportedAttention for a model with an unknown kind of attention, or without any.
    """
    device = causal.get_input_embeddings().weight.device
    ids = torch.arange(1, NUM_TOKENS + 1, device=device).unsqueeze(0)
    arguments: dict[str, Any] = {
        "position_ids": torch.arange(NUM_TOKENS, device=device).unsqueeze(0),
        "use_cache": False,
        "return_dict": True,
        "output_hidden_states": True,
    }
    keeps_states = has_states(causal.config)
    if keeps_states:
        name = cache_argument(causal)
        arguments |= {"use_cache": True, name: empty_cache(causal)}
    recorder = _Recorder(longest, has_indexers)
    with torch.inference_mode(), _registered(recorder), attending_by(causal, _NAME), _watched(causal) as read:
        decoder, output = _called(causal, input_ids=ids, **arguments)
        calls = tuple(recorder.calls)
        states: tuple[StateTensor, ...] = ()
        if keeps_states:
            states = read_layout(arguments[name])
            arguments[name] = empty_cache(causal)
        began = time.perf_counter()
        embeds = _with_embeds(causal, decoder, ids, arguments)
        seconds = time.perf_counter() - began
    if not calls and not keeps_states:
        raise UnsupportedAttention("its attention does not go through transformers' AttentionInterface")
    if len(calls) < num_layers and not keeps_states:
        raise UnsupportedAttention(
            f"{num_layers - len(calls)} of its {num_layers} layers have no attention, and no state in transformers' "
            "cache"
        )
    hidden_states = None if keeps_states else output.hidden_states
    hidden: Tensor = output.last_hidden_state
    # Requests give rows of the hidden size.
    is_whole = causal.get_input_embeddings().weight.shape[1] == hidden.shape[2]
    takes_embeds = embeds is not None and is_whole and bool(torch.allclose(embeds, hidden, rtol=1e-3, atol=1e-3))
    return Recording(
        decoder,
        calls,
        frozenset(read),
        _are_states(hidden_states, num_layers, hidden) and num_layers == len(calls),
        takes_embeds,
        seconds,
        states,
    )


def _are_states(states: Any, num_layers: int, hidden: Tensor) -> bool:
    """True when there is a hidden state of the usual shape for the embedding and each layer."""
    return states is not None and len(states) == num_layers + 1 and all(one.shape == hidden.shape for one in states)


def _called(causal: Any, **arguments: Any) -> tuple[nn.Module, Any]:
    """Run the model; return the first module that it calls with its embedding inside, and that module's output."""
    embedding = causal.get_input_embeddings()
    found: list[nn.Module] = []
    outputs: dict[nn.Module, Any] = {}
    hooks = []
    for module in causal.modules():
        if module not in (causal, embedding) and any(inner is embedding for inner in module.modules()):
            hooks.append(module.register_forward_pre_hook(lambda module, _: found.append(module)))
            hooks.append(module.register_forward_hook(lambda module, _, output: outputs.update({module: output})))
    try:
        causal(**arguments)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise UnsupportedAttention("its decoder cannot be told from its head")
    return found[0], outputs[found[0]]


def _with_embeds(causal: Any, decoder: Any, ids: Tensor, arguments: dict[str, Any]) -> Tensor | None:
    """Return the hidden states for the ids' embeddings; None: the model does not accept embeddings."""
    try:
        found: Tensor = decoder(inputs_embeds=causal.get_input_embeddings()(ids), **arguments).last_hidden_state
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
        return None
    return found


@dataclass
class _Recorder:
    """Functions that transformers calls in place of its own."""

    longest: int
    has_indexers: bool = False
    calls: list[AttentionCall] = field(default_factory=list)
    # Masks of the pass, and the window of each by its memory.
    _masks: list[Tensor] = field(default_factory=list)
    _sights: dict[int, AttentionCall | UnsupportedAttention] = field(default_factory=dict)

    def mask(self, mask_function: MaskFunction, local_size: int | None = None, **arguments: Any) -> Tensor:
        """Make a mask as transformers' eager attention needs it, and note the positions that it lets a row see."""
        from transformers.masking_utils import eager_mask

        arguments.pop("allow_is_bidirectional_skip", None)
        mask: Tensor = eager_mask(mask_function=mask_function, local_size=local_size, **arguments)
        self._masks.append(mask)
        seen: AttentionCall | UnsupportedAttention
        try:
            seen = sight(mask_function, local_size, self.longest, mask.device)
        except UnsupportedAttention as error:
            # Nobody may use it, such as that of an encoder that is not there.
            seen = error
        self._sights[mask.untyped_storage().data_ptr()] = seen
        return mask

    def _seen(self, attention_mask: Tensor | None, own_call: OwnCall | None) -> AttentionCall:
        """Return the sight of a call. Raises UnsupportedAttention for one that is not known here."""
        seen: AttentionCall | UnsupportedAttention | None
        if own_call is not None:
            # Which of the masks it was given is not known: some modules change theirs.
            known = (_CAUSAL, replace(_CAUSAL, window=own_call.window))
            wrong = [one for one in self._sights.values() if one not in known]
            if not wrong:
                facts = {one.name: getattr(own_call, one.name) for one in fields(own_call)}
                return replace(_CAUSAL, **facts)
            seen = wrong[0] if isinstance(wrong[0], UnsupportedAttention) else None
        elif attention_mask is None:
            raise UnsupportedAttention("it attends without a mask of transformers")
        else:
            seen = self._sights.get(attention_mask.untyped_storage().data_ptr())
        if isinstance(seen, UnsupportedAttention):
            raise seen
        if seen is None:
            raise UnsupportedAttention("it makes attention masks by itself")
        return seen

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        own_call: OwnCall | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Attend as transformers' eager attention does, and note the call."""
        indices = arguments.pop("indices", None) if self.has_indexers else None
        check_biases(arguments)
        seen = self._seen(attention_mask, own_call)
        if own_call is not None or attention_mask is None:
            ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            attention_mask = torch.zeros(ones.shape, device=query.device).masked_fill_(ones.triu(1), -torch.inf)
        self.calls.append(
            replace(
                seen,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_width=key.shape[3],
                value_width=value.shape[3],
                softcap=softcap,
                has_sinks=s_aux is not None,
            )
        )
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = (query @ key.transpose(2, 3)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + attention_mask[..., : key.shape[2]]
        if indices is not None:
            unseen = torch.ones(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(unseen.scatter_(-1, indices.long(), False).unsqueeze(1), -torch.inf)
        if s_aux is not None:
            sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def sight(mask_function: MaskFunction, local_size: int | None, longest: int, device: torch.device) -> AttentionCall:
    """Return a call with only the window or chunk of a mask. `local_size` is the size that transformers names. Raises
    UnsupportedAttention for a mask of another kind."""
    farthest = min(longest, _FARTHEST if local_size is None else 4 * local_size + 8) - 1
    size = local_size or 16
    wanted = (0, 1, 2, 7, size - 1, size, size + 1, 2 * size, 2 * size + 3, 3 * size - 1, farthest // 2, farthest)
    rows = sorted({row for row in wanted if 0 <= row <= farthest})
    zero = torch.zeros((), dtype=torch.int64, device=device)
    query_Q1 = torch.tensor(rows, device=device).unsqueeze(1)
    key_1C = torch.arange(farthest + 1, device=device).unsqueeze(0)
    try:
        visible_QC = mask_function(zero, zero, query_Q1, key_1C).expand(len(rows), farthest + 1)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        if not _is_plain_within(mask_function, local_size, device):
            raise UnsupportedAttention("its masks depend on more than positions") from error
        return replace(_CAUSAL, window=local_size)
    causal_QC = key_1C <= query_Q1
    if bool((visible_QC & ~causal_QC).any()):
        raise SeesLaterRows("its rows see later positions")
    if torch.equal(visible_QC, causal_QC):
        return _CAUSAL
    # The last row sees the newest positions.
    window = int(visible_QC[-1].sum())
    if torch.equal(visible_QC, causal_QC & (key_1C > query_Q1 - window)):
        return replace(_CAUSAL, window=window)
    if local_size is None or not torch.equal(visible_QC, causal_QC & (key_1C >= query_Q1 // size * size)):
        raise UnsupportedAttention("its masks are neither causal, nor sliding windows, nor chunks")
    return replace(_CAUSAL, chunk=size)


def _is_plain_within(mask_function: MaskFunction, local_size: int | None, device: torch.device) -> bool:
    """True for a mask that knows the pass's own tokens only, such as which are images, and is causal or a window
    there. The self-check looks at more tokens."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    place = torch.arange(NUM_TOKENS, device=device)
    query_Q1, key_1C = place.unsqueeze(1), place.unsqueeze(0)
    try:
        visible_QC = mask_function(zero, zero, query_Q1, key_1C)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    oldest_Q1 = query_Q1 - (local_size or NUM_TOKENS) + 1
    return torch.equal(visible_QC.expand(NUM_TOKENS, NUM_TOKENS), (key_1C <= query_Q1) & (key_1C >= oldest_Q1))


@contextmanager
def _registered(recorder: _Recorder) -> Iterator[None]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registries = (ALL_ATTENTION_FUNCTIONS, recorder.attend), (ALL_MASK_ATTENTION_FUNCTIONS, recorder.mask)
    for registry, function in registries:
        registry.register(_NAME, function)
    try:
        yield
    finally:
        for registry, _ in registries:
            # It has no way to take a name back.
            registry._global_mapping.pop(_NAME, None)


@contextmanager
def _watched(causal: nn.Module) -> Iterator[set[nn.Module]]:
    """Fill the set with linear layers, if anything but the layer itself reads its weight inside the block."""
    read: set[nn.Module] = set()

    class Watched(nn.Linear):
        @property
        def weight(self) -> Tensor:  # type: ignore[override]
            read.add(self)
            return self._parameters["weight"]  # type: ignore[return-value]

        def forward(self, input: Tensor) -> Tensor:
            weight: Any = self._parameters["weight"]
            return F.linear(input, weight, self._parameters["bias"])

    class WatchedTransposed(Watched):
        def forward(self, input: Tensor) -> Tensor:
            weight: Any = self._parameters["weight"]
            return F.linear(input, weight.t(), self._parameters["bias"])

    linears = [(module, type(module)) for module in causal.modules() if type(module) in linear_types()]
    for linear, kind in linears:
        linear.__class__ = Watched if kind is nn.Linear else WatchedTransposed
    try:
        yield read
    finally:
        for linear, kind in linears:
            linear.__class__ = kind
