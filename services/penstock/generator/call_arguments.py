"""Arguments of transformers' generate() beside options: tensors of a prompt, and objects of the caller.

They are told apart from options here, once a call, and become what the engine knows: ids, plugins, drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_client._options import GenerationOptions
from penstock_client._wrong_values import found

from penstock.common.hf_fields import REFUSED, WITHOUT_EFFECT, is_nothing, no_effect
from penstock.generation.core.plugins import NO_OBJECTS, CallerObjects, Plugin
from penstock.generator.prefix_handle import PrefixHandle, prefix_handle

_PROMPTS = ("input_ids", "inputs")


class GenerateArguments(GenerationOptions, total=False):
    """Options, and the arguments of transformers' generate() that are no fields of its GenerationConfig."""

    # Ids of a prompt, or of several of equal length: (rows, tokens).
    input_ids: Any
    inputs: Any
    # Ones; zeros in front mark padding, which is left out.
    attention_mask: Any
    # Those that the mask gives; anything else is refused.
    position_ids: Any
    # (batch_id, ids so far) -> ids that may come next. Called for each row.
    prefix_allowed_tokens_fn: Callable[[int, Any], Iterable[int]] | None
    # An object with put(ids) and end(), as transformers' TextStreamer.
    streamer: Any
    # Tokenizer of a draft model with another vocabulary.
    assistant_tokenizer: Any
    tokenizer: Any
    # A prefix that the caller holds, see Generator.hold_prefix.
    past_key_values: Any
    negative_prompt_attention_mask: Any
    # As OpenAI has it: the number of sequences that are made. The num_return_sequences with the highest mean
    # log-probability are returned.
    best_of: int | None
    synced_gpus: bool | None
    use_model_defaults: bool | None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Arguments of one call, taken apart."""

    prompt: Any
    # Options by their names.
    options: dict[str, Any]
    objects: CallerObjects = NO_OBJECTS
    allows: Callable[[int, Any], Iterable[int]] | None = None
    streamer: Any = None
    # The caller's draft model: an object or a folder; None: the options name the server's, or none.
    assistant: Any = None
    assistant_tokenizer: Any = None
    prefix: PrefixHandle | None = None
    # Number of the best_of sequences that are returned; None: all.
    num_best: int | None = None
    warnings: tuple[str, ...] = field(default_factory=tuple)

    def of_row(self, row: int) -> CallerObjects:
        """Return the objects of the prompt with this place in the batch."""
        if self.allows is None:
            return self.objects
        return self.objects._replace(allowing=(Plugin("prefix_allowed_tokens_fn", _Allowing(self.allows, row)),))


def take_apart(
    prompt: Any, options: Mapping[str, Any], *, pad_token_id: int | None = None, eos_token_ids: Sequence[int] = ()
) -> CallArguments:
    """Take a call's arguments apart. `pad_token_id` and `eos_token_ids` are the model's own.

    Raises TypeError and ValueError naming an argument, InvalidArgument.
    """
    left = dict(options)
    warnings = []
    for name in [one for one in left if one in REFUSED or one in WITHOUT_EFFECT]:
        value = left.pop(name)
        if name in REFUSED and not is_nothing(value):
            raise TypeError(f"option {name!r}: {REFUSED[name]}")
        if name in WITHOUT_EFFECT and value is not None:
            warnings.append(no_effect(name))
    known = {"pad_token_id": pad_token_id, "eos_token_id": list(eos_token_ids)}
    special = {name: value if left.get(name) is None else left[name] for name, value in known.items()}
    prompt = _prompt(prompt, left, special)
    if left.pop("tokenizer", None) is not None:
        warnings.append("tokenizer has no effect: stop strings are matched with the model's own")
    if "negative_prompt_ids" in left or "negative_prompt_attention_mask" in left:
        _negative_prompt(left)
    if left.get("eos_token_id") is not None:
        _ends(left)
    processors = _objects(left, "logits_processor")
    criteria = _objects(left, "stopping_criteria")
    allows = left.pop("prefix_allowed_tokens_fn", None)
    if allows is not None and not callable(allows):
        raise TypeError("option 'prefix_allowed_tokens_fn': must be a function of a batch's row and its ids")
    streamer = left.pop("streamer", None)
    if streamer is not None and not (callable(getattr(streamer, "put", None)) and hasattr(streamer, "end")):
        raise TypeError("option 'streamer': must have the methods put and end, as transformers' TextStreamer")
    assistant, tokenizer = left.get("assistant_model"), left.pop("assistant_tokenizer", None)
    return CallArguments(
        prompt,
        left,
        CallerObjects(processors=processors, criteria=criteria),
        allows,
        streamer,
        None if assistant is None or isinstance(assistant, str) else assistant,
        tokenizer,
        prefix_handle(left.pop("past_key_values", None)),
        _best_of(left),
        tuple(warnings),
    )


def is_row_of_mappings(value: Any) -> bool:
    """True for what a tokenizer returns: a mapping with input_ids."""
    return isinstance(value, Mapping) and "input_ids" in value


def _best_of(left: dict[str, Any]) -> int | None:
    """Ask for best_of sequences with their log-probabilities; return the number that is wanted of them."""
    best_of = left.pop("best_of", None)
    if best_of is None:
        return None
    wanted = left.get("num_return_sequences") or 1
    if isinstance(best_of, bool) or not isinstance(best_of, int) or best_of < 1:
        raise TypeError("option 'best_of': must be a whole number of at least 1")
    if best_of < wanted:
        raise ValueError("option 'best_of': must be at least num_return_sequences")
    if (left.get("num_beams") or 1) > 1:
        raise ValueError("option 'best_of': beams are ranked by themselves, set num_beams and num_return_sequences")
    left["num_return_sequences"] = best_of
    if left.get("top_logprobs") is None:
        left["top_logprobs"] = 0
    return int(wanted)


def _prompt(prompt: Any, left: dict[str, Any], special: Mapping[str, Any]) -> Any:
    """Return the prompt or prompts without padding; `left` loses what is about them."""
    if is_row_of_mappings(prompt):
        # generate(tokenizer(text)), without the stars.
        for name, value in prompt.items():
            left.setdefault(name, value)
        prompt = ""
    given = [name for name in _PROMPTS if left.get(name) is not None]
    mask, positions = left.pop("attention_mask", None), left.pop("position_ids", None)
    # Of no meaning to a decoder; some tokenizers return them all the same.
    left.pop("token_type_ids", None)
    ids = left.pop("input_ids", None)
    ids = left.pop("inputs", None) if ids is None else ids
    left.pop("inputs", None)
    if given:
        if len(given) > 1 or not (isinstance(prompt, str) and not prompt):
            raise TypeError(f"option {given[0]!r}: the prompt is given twice")
        prompt = ids
    if mask is None and (given or hasattr(prompt, "shape")):
        mask = _mask_of_padding(prompt, special)
    if mask is None and positions is None:
        return prompt
    if isinstance(prompt, str) or not hasattr(prompt, "__len__") or not len(prompt):
        if left.get("inputs_embeds") is not None:
            _check_ones(mask)
            return prompt
        raise TypeError("option 'attention_mask': goes with input_ids")
    return _without_padding(prompt, mask, positions)


def _mask_of_padding(prompt: Any, special: Mapping[str, Any]) -> list[list[int]] | None:
    """Return the mask that transformers' generate() infers: by a pad_token_id that the ids have and that ends nothing.

    None: there is nothing to infer, or the ids are wrong, which is told where they are read. Raises ValueError for one
    behind other tokens.
    """
    pad, ends = special["pad_token_id"], special["eos_token_id"]
    if not isinstance(pad, int) or isinstance(pad, bool):
        return None
    try:
        rows = _rows("input_ids", prompt)
    except TypeError:
        return None
    told = ends.tolist() if hasattr(ends, "tolist") else ends
    if pad in ([*told] if isinstance(told, list | tuple) else [told]) or not any(pad in row for row in rows):
        return None
    masks = [[int(one != pad) for one in row] for row in rows]
    if any(row != sorted(row) or not any(row) for row in masks):
        raise ValueError(
            f"option 'input_ids': has pad_token_id {pad} behind other tokens, or nothing else: give attention_mask"
        )
    return masks


def _check_ones(mask: Any) -> None:
    if mask is not None and not all(value == 1 for row in _rows("attention_mask", mask) for value in row):
        raise ValueError("option 'attention_mask': must be ones beside inputs_embeds")


def _without_padding(prompt: Any, mask: Any, positions: Any) -> Any:
    rows = _rows("input_ids", prompt)
    masks = [[1] * len(row) for row in rows] if mask is None else _rows("attention_mask", mask)
    if [len(row) for row in masks] != [len(row) for row in rows]:
        raise ValueError("option 'attention_mask': must have the shape of input_ids")
    kept = []
    for row, seen in zip(rows, masks, strict=True):
        begin = seen.index(1) if 1 in seen else len(seen)
        if any(value != 0 for value in seen[:begin]) or any(value != 1 for value in seen[begin:]):
            raise ValueError(
                "option 'attention_mask': must be ones, behind zeros where the row is padded on the left; tokens in "
                "the middle cannot be hidden"
            )
        if begin == len(seen) and seen:
            raise ValueError("option 'attention_mask': must have a one in every row")
        kept.append(row[begin:])
    if positions is not None:
        given = _rows("position_ids", positions)
        if len(given) == 1 and len(rows) > 1:
            given *= len(rows)
        for row, places in zip(kept, given, strict=False):
            if places[len(places) - len(row) :] != list(range(len(row))):
                raise ValueError("option 'position_ids': must count the tokens of each row from 0, padding left out")
    single = len(getattr(prompt, "shape", (0,) if not _is_nested(prompt) else (0, 0))) == 1
    return kept[0] if single else kept


def _is_nested(value: Any) -> bool:
    return len(value) > 0 and not isinstance(value[0], int) and hasattr(value[0], "__len__")


def _rows(name: str, value: Any) -> list[list[int]]:
    """Return whole numbers in rows; a tensor, an array or lists. Raises TypeError naming the argument."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    try:
        if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
            raise TypeError
        rows = [list(row) for row in plain] if _is_nested(plain) else [list(plain)]
        if all(
            type(one) in (int, bool) or (hasattr(one, "__index__") and not isinstance(one, str))
            for row in rows
            for one in row
        ):
            return [[int(one) for one in row] for row in rows]
    except TypeError:
        pass
    raise TypeError(f"option {name!r}: must be whole numbers, in rows")


def _negative_prompt(left: dict[str, Any]) -> None:
    """Take transformers' (1, tokens) with a mask for what the option takes: ids."""
    mask, ids = left.pop("negative_prompt_attention_mask", None), left.get("negative_prompt_ids")
    if ids is None:
        if mask is not None:
            raise TypeError("option 'negative_prompt_attention_mask': goes with negative_prompt_ids")
        return
    rows = _without_padding(_rows("negative_prompt_ids", ids), mask, None)
    if len(rows) != 1:
        raise ValueError("option 'negative_prompt_ids': must be the ids of one prompt")
    left["negative_prompt_ids"] = rows[0]


def _ends(left: dict[str, Any]) -> None:
    """Take a tensor of ids for a list of them."""
    value = left["eos_token_id"]
    if hasattr(value, "tolist"):
        left["eos_token_id"] = value.tolist()


def _objects(left: dict[str, Any], name: str) -> tuple[Plugin, ...]:
    """Take the objects out of an option of plugins, and leave the names."""
    value = left.get(name)
    if value is None or isinstance(value, str | Mapping):
        return ()
    entries = [*value] if isinstance(value, list | tuple) else [value]
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], Mapping):
        entries = [value]
    own = [one for one in entries if callable(one) and not isinstance(one, type)]
    names = [one for one in entries if not (callable(one) and not isinstance(one, type))]
    for one in names:
        named = one[0] if isinstance(one, tuple | list) and len(one) == 2 else one
        if not isinstance(named, str):
            raise TypeError(
                f"option {name!r}: an entry must be an object that can be called with ids and scores, or a name of the "
                f"server's own, found {found(one)}"
            )
    if names:
        left[name] = names
    else:
        left.pop(name)
    return tuple(Plugin(type(one).__name__, one) for one in own)


class _Allowing:
    """prefix_allowed_tokens_fn of one row as a processor of transformers' signature."""

    def __init__(self, allows: Callable[[int, Any], Iterable[int]], row: int) -> None:
        self._allows = allows
        self._row = row

    def __call__(self, ids_1T: Any, scores_1V: Any) -> Any:
        """Return scores that are -inf but for allowed tokens. Raises ValueError where none is."""
        import torch

        allowed = [int(one) for one in self._allows(self._row, ids_1T[0])]
        if not allowed:
            raise ValueError("prefix_allowed_tokens_fn returned an empty list: one token at least must be allowed")
        kept = torch.full_like(scores_1V, -torch.inf)
        kept[:, allowed] = scores_1V[:, allowed]
        return kept


def check_streamed(options: Mapping[str, Any], prompts: int) -> None:
    """Raise ValueError where a streamer cannot follow: several prompts, beams or answers."""
    if prompts > 1 or (options.get("num_beams") or 1) > 1 or (options.get("num_return_sequences") or 1) > 1:
        raise ValueError("option 'streamer': follows one prompt and one answer, without beams")
