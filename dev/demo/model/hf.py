"""transformers behind annotated functions: its own annotations do not pass a strict check."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import chat_template_utils, logging

_hf: Any = transformers
_templates: Any = chat_template_utils
_logging: Any = logging


def render(
    template: str,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] = (),
    add_generation_prompt: bool = False,
    thinking: bool | None = None,
) -> str:
    """The chat as text, by the renderer that apply_chat_template uses; `thinking` None leaves enable_thinking unset."""
    options = {} if thinking is None else {"enable_thinking": thinking}
    texts, _ = _templates.render_jinja_template(
        [list(messages)],
        tools=list(tools) or None,
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **options,
    )
    return str(texts[0])


def new_model(config: Qwen2Config) -> Qwen2ForCausalLM:
    """A freshly initialised model."""
    model: Qwen2ForCausalLM = _hf.Qwen2ForCausalLM(config)
    return model


def load_model(folder: Path, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """The model of `folder`, in evaluation mode."""
    model: Qwen2ForCausalLM = _hf.Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model


def set_training(model: Qwen2ForCausalLM, training: bool) -> None:
    """Switches between training and evaluation mode."""
    switch: Any = model.train
    switch(training)


def save_bf16(model: Qwen2ForCausalLM, folder: Path, *, eos_token_ids: list[int], pad_token_id: int) -> None:
    """Writes config, generation defaults (greedy: the answers are facts and sums) and a bf16 copy of the weights."""
    half: Any = _hf.Qwen2ForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    half.config.dtype = torch.bfloat16
    half.generation_config = _hf.GenerationConfig(
        do_sample=False, eos_token_id=eos_token_ids, pad_token_id=pad_token_id
    )
    half.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it 0600, which other users' services cannot read


@torch.inference_mode()
def greedy(model: Qwen2ForCausalLM, prompts: Sequence[list[int]], max_new_tokens: int, pad: int) -> list[list[int]]:
    """Greedy continuations of one left-padded batch; after its end token a row holds `pad`."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    untyped: Any = model
    output = untyped.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    return [row[width:].tolist() for row in output]


def quiet() -> None:
    """Only errors of transformers are printed."""
    _logging.set_verbosity_error()
    _logging.disable_progress_bar()
