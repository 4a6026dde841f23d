"""The training loop: Muon for the matrices, AdamW for the rest, a fixed number of steps, one seed."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from .assets import model_config
from .batches import Batch, batches
from .hf import new_model, set_training
from .priors import add_priors
from .tokenizer import PAD_TOKEN, token_id


@dataclass(frozen=True)
class TrainingConfig:
    """Settings that the weights depend on, besides the corpus, the torch build and the CPU."""

    steps: int = 2400
    """Optimizer steps; the learning rate's schedule spans exactly these."""
    seed: int = 20261121
    """Seeds weights, tokenizer text and batches."""
    threads: int = 1
    """CPU threads; sums are split by thread, so the weights depend on it. One is a third slower than two on idle cores
    and twice as fast on busy ones, where two threads wait for each other."""
    batch_tokens: int = 3072
    """Tokens in a batch, padding included."""
    matrix_lr: float = 0.015
    """Muon's peak learning rate, for the projection matrices."""
    other_lr: float = 2e-3
    """AdamW's peak learning rate, for embeddings, norms and biases."""
    warmup: int = 60
    """Steps of linear warm-up."""
    decay: int = 1700
    """Last steps, over which the rate falls linearly to zero."""
    single_steps: int = 1200
    """First steps, on single dialogues; mixed conversations follow (see batches.ConversationSource)."""


@dataclass(frozen=True)
class Progress:
    """Report of the loop after each step. `loss` is the mean cross-entropy in nats of this batch's targets."""

    step: int
    loss: float
    seconds: float
    tokens: int


def _rate(config: TrainingConfig, step: int) -> float:
    """The share of the peak rate at this step: warm-up, plateau, linear decay."""
    left = (config.steps - step) / config.decay
    return min(1.0, (step + 1) / config.warmup, left)


def _optimizers(model: Qwen2ForCausalLM, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=config.matrix_lr, weight_decay=0.1, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=config.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def batch_loss(model: Qwen2ForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the learnt tokens; logits are made for those alone, which saves a fifth of the step."""
    targets = batch.learn_BT[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        # No mask: padding is on the right, where a causal model cannot see it.
        hidden_BTD = model.model(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
        logits_NV = F.linear(hidden_BTD[:, :-1][targets], model.lm_head.weight)
    return F.cross_entropy(logits_NV.float(), batch.ids_BT[:, 1:][targets])


def train(
    tokenizer: Tokenizer, template: str, config: TrainingConfig, report: Callable[[Progress, Qwen2ForCausalLM], bool]
) -> Qwen2ForCausalLM:
    """Trains a fresh model in fp32 (products in bf16). `report` is called after each step and ends training by True."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    settings = model_config(tokenizer)
    settings.dtype = torch.float32
    model = new_model(settings)
    add_priors(model)
    optimizers = _optimizers(model, config)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    pad = token_id(tokenizer, PAD_TOKEN)
    source = batches(
        tokenizer,
        template,
        seed=config.seed,
        tokens=config.batch_tokens,
        pad=pad,
        single_batches=config.single_steps,
    )
    started, step, tokens = time.monotonic(), 0, 0
    while step < config.steps:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * _rate(config, step)
        batch = next(source)
        loss = batch_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        tokens += batch.ids_BT.numel()
        step += 1
        if report(Progress(step, loss.item(), time.monotonic() - started, tokens), model):
            break
    set_training(model, False)
    return model
