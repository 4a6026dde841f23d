"""A decoder's layers one after the other, by transformers' own modules: one layer's weights are in memory at a time.

A first pass through a decoder with layers that do nothing tells what each is called with (masks, angles), which does
not depend on the states. Calibration documents have one length, so one record of it serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.common.errors import StartupError
from penstock.generation.quantise.gptq_rounding import Covariance
from penstock.generation.weights.safetensors_folder import Checkpoint


class LayerStream:
    """The decoder of a folder, and the states of the calibration documents before its next layer."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, documents: Tensor) -> None:
        """Read the embeddings of `documents` (documents, tokens).

        Raises StartupError naming MODEL for a model that transformers does not know, or one of other parts.
        """
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        self._checkpoint = checkpoint
        try:
            config = AutoConfig.from_pretrained(folder)
            # Tables that it computes have their numbers; the memory of weights is never written, and so never taken.
            with no_init_weights():
                causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        except (ValueError, KeyError, OSError) as error:
            raise StartupError(f"MODEL {folder}: transformers cannot make it: {error}", flag="MODEL") from error
        causal.eval()
        decoder = causal.get_decoder()
        name = next((name for name, module in causal.named_modules() if module is decoder), None)
        layers = getattr(decoder, "layers", None)
        if name is None or not isinstance(layers, nn.ModuleList):
            raise StartupError(f"MODEL {folder}: {type(causal).__name__} is no plain decoder of layers", flag="MODEL")
        self.layers = list(layers)
        self.prefixes = [f"{name}.layers.{index}." for index in range(len(self.layers))]
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.states = self._begin(decoder, f"{name}.embed_tokens.weight", documents)

    def load(self, index: int) -> nn.Module:
        """Read a layer's weights in float32 and return it. Raises StartupError naming a missing tensor."""
        layer, prefix = self.layers[index], self.prefixes[index]
        names = list(layer.state_dict())
        missing = [name for name in names if prefix + name not in self._checkpoint]
        if missing:
            raise StartupError(
                f"MODEL has no tensor {prefix}{missing[0]}, which transformers' modules of its type have: it is of a "
                "layout that `penstock quantize` does not read",
                flag="MODEL",
            )
        values = {name: whole_tensor(self._checkpoint, prefix + name).float() for name in names}
        layer.load_state_dict(values, strict=True, assign=True)
        return layer

    def unload(self, index: int) -> None:
        """Forget a layer's weights."""
        self.layers[index].to("meta")

    def covariances(self, index: int, names: list[str], count: Callable[[int], None]) -> dict[str, Covariance]:
        """Run the documents through a layer, and return the covariance of the inputs of each of its linear layers.

        Linear layers with the same input share one. `count` gets the number of documents that are done.
        """
        found: dict[str, Covariance] = {}
        last: list[tuple[Tensor, str]] = []

        def note(name: str, value: Tensor) -> None:
            # q, k and v have the very same tensor.
            if last and last[-1][0] is value:
                found.setdefault(name, found[last[-1][1]])
                return
            last[:] = [(value, name)]
            found.setdefault(name, Covariance(value.shape[-1])).add(value.flatten(0, -2).float())

        with self._noting(index, names, note):
            for done, _ in enumerate(self.outputs(index, self.states), 1):
                count(done)
        return found

    def shared_inputs(self, index: int, names: list[str]) -> list[list[str]]:
        """Return the names of a layer's linear layers, those with the same input together, as its first document goes
        through them."""
        found: list[tuple[Tensor, list[str]]] = []

        def note(name: str, value: Tensor) -> None:
            if found and found[-1][0] is value:
                found[-1][1].append(name)
            else:
                found.append((value, [name]))

        with self._noting(index, names, note):
            list(self.outputs(index, self.states[:1]))
        return [together for _, together in found]

    @contextmanager
    def _noting(self, index: int, names: list[str], note: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Call `note` with the name and the input of each of the layer's modules `names` that is called."""

        def hook_of(name: str) -> Callable[..., None]:
            return lambda _module, args: note(name, args[0])

        layer = self.layers[index]
        hooks = [layer.get_submodule(name).register_forward_pre_hook(hook_of(name)) for name in names]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def advance(self, index: int, count: Callable[[int], None]) -> None:
        """Make the states those behind a layer. `count` gets the number of documents that are done."""
        for done, states in enumerate(self.outputs(index, self.states), 1):
            self.states[done - 1] = states
            count(done)

    def outputs(self, index: int, documents: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield what a layer makes of each document's states (tokens, width)."""
        args, settings = self._calls[index]
        for states in documents:
            answer = self.layers[index](states[None], *args, **settings)
            yield (answer[0] if isinstance(answer, tuple) else answer)[0]

    def _begin(self, decoder: Any, table: str, documents: Tensor) -> Tensor:
        """Run the embeddings, and note each layer's call; return the states (documents, tokens, width)."""
        used, places = torch.unique(documents, return_inverse=True)
        if table not in self._checkpoint:
            raise StartupError(f"MODEL has no tensor {table}", flag="MODEL")
        count, largest = self._checkpoint.shape(table)[0], int(used.max())
        if largest >= count:
            raise StartupError(
                f"MODEL: tokenizer.json gives id {largest}, and the embedding has {count} rows: it is another's",
                flag="MODEL",
            )
        rows = whole_tensor(self._checkpoint, table)[used].float()
        decoder.embed_tokens.weight = nn.Parameter(rows, requires_grad=False)
        decoder.embed_tokens.padding_idx = None
        for name, child in list(decoder.named_children()):
            # Norms: nothing behind the layers is of interest here.
            if name not in ("layers", "embed_tokens") and any(True for _ in child.parameters()):
                setattr(decoder, name, nn.Identity())
        decoder.layers = nn.ModuleList(_NotedLayer(layer, self._calls) for layer in self.layers)
        states = []
        for number, ids in enumerate(places):
            states.append(decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0])
            if not number:
                del self._calls[len(self.layers) :]
                calls = list(self._calls)
        self._calls = calls
        return torch.stack(states)


class _NotedLayer(nn.Module):
    """A layer that notes its call and returns the states; what the decoder asks of it is the layer's."""

    def __init__(self, layer: nn.Module, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__()
        # Not as a module: it would be called, counted and moved.
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "_calls", calls)

    def forward(self, states: Tensor, *args: Any, **settings: Any) -> Tensor:
        """Note the call."""
        self._calls.append((args, settings))
        return states

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)


def whole_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a copy of a tensor in its stored dtype."""
    if len(checkpoint.shape(name)) < 2:
        return checkpoint.take(name).clone()
    return torch.cat([piece.clone() for piece in checkpoint.pieces(name)])
