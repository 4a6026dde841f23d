"""Make tests/goldens/*.json: what generate() gave in the last transformers release that had a mode.

transformers 5.x has no contrastive, group beam and constrained beam search and no DoLa. The first three come from
4.41.1, the release that Penstock follows; DoLa from 4.55.4, the last that carried it (4.56 sends for code from a hub).
Each needs an environment of its own, with Python 3.11 (numpy < 2 has wheels for it); from the repository root:

    python3.11 -m venv goldens-441 && goldens-441/bin/pip install transformers==4.41.1 torch==2.13.0 'numpy<2'
    goldens-441/bin/python tools/make_goldens.py contrastive group_beam constrained_beam beam guidance
    python3.11 -m venv goldens-455 && goldens-455/bin/pip install transformers==4.55.4 torch==2.13.0 'numpy<2'
    goldens-455/bin/python tools/make_goldens.py dola

A case is written only when its ids survive noise on the final hidden states and on the logits, many times what another
order of fp32 additions changes: a golden file must not hold what a rounding decided. What was dropped is printed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DisjunctiveConstraint, PhrasalConstraint

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from factories.engine.placeholders import fill_ids  # noqa: E402
from factories.models.golden_models import EOS, GOLDEN_MODELS, PAD, fingerprint, golden_checkpoint  # noqa: E402

from tools.golden_cases import PROMPTS, GoldenCase, all_cases  # noqa: E402

RELEASES = {"dola": "4.55.4"}
DEFAULT_RELEASE = "4.41.1"
# Noise is this much of each hidden state, and this much added to each logit.
HIDDEN_NOISE, LOGIT_NOISE = 2e-5, 1e-4
NOISY_RUNS = 3
BEAM_MODES = ("group_beam", "constrained_beam", "beam")


def main() -> None:
    """Write one file per mode named on the command line."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or "").splitlines()[0])
    parser.add_argument("modes", nargs="+", choices=sorted({case.mode for case in all_cases()}))
    modes = parser.parse_args().modes
    for mode in modes:
        wanted = RELEASES.get(mode, DEFAULT_RELEASE)
        if transformers.__version__ != wanted:
            parser.error(f"{mode} is made with transformers {wanted}, this is {transformers.__version__}")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    models = _load_models()
    for mode in modes:
        _write(mode, [case for case in all_cases() if case.mode == mode], models)


def _load_models() -> dict[str, Any]:
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in GOLDEN_MODELS:
            path = golden_checkpoint(Path(folder) / name, name)
            models[name] = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    return models


def _write(mode: str, cases: list[GoldenCase], models: Mapping[str, Any]) -> None:
    lines = []
    for number, case in enumerate(cases):
        entry = _entry(f"{mode}-{number:02d}", case, models[case.model])
        if entry is not None:
            lines.append(json.dumps(entry))
    used = sorted({case.model for case in cases})
    head = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "hidden_noise": HIDDEN_NOISE,
        "logit_noise": LOGIT_NOISE,
        "models": {name: fingerprint(name) for name in used},
    }
    fields = "".join(f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    path = ROOT / "tests" / "goldens" / f"{mode}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + fields + '"cases": [\n' + ",\n".join(lines) + "\n]\n}\n", encoding="utf-8")
    print(f"{mode}: {len(lines)} of {len(cases)} cases, {path.stat().st_size} bytes")


def _entry(name: str, case: GoldenCase, model: Any) -> dict[str, Any] | None:
    """The case as it is written; None when noise changes its ids."""
    case = case._replace(kwargs=_with_ids(case, model))
    ids, scores = _generate(case, model)
    for run in range(NOISY_RUNS):
        with _noise(model, seed=run):
            if _generate(case, model)[0] != ids:
                print(f"{name}: dropped, a near tie: {dict(case.kwargs)}")
                return None
    return {
        "name": name,
        "mode": case.mode,
        "transformers": transformers.__version__,
        "model": case.model,
        "prompt": PROMPTS[case.prompt],
        "kwargs": dict(case.kwargs),
        "ids": ids,
        "scores": scores,
    }


def _with_ids(case: GoldenCase, model: Any) -> dict[str, Any]:
    """The case's arguments with "@fraction" replaced by ids of the answer to the others."""
    return fill_ids(case.kwargs, lambda plain: _generate(case._replace(kwargs=plain), model)[0][0])


def _generate(case: GoldenCase, model: Any) -> tuple[list[list[int]], list[float] | None]:
    """New ids of every returned sequence up to its end, and the beam scores in beam modes."""
    kwargs = {"eos_token_id": EOS, **case.kwargs}
    ends = kwargs["eos_token_id"] if isinstance(kwargs["eos_token_id"], list) else [kwargs["eos_token_id"]]
    prompt = torch.tensor([PROMPTS[case.prompt]])
    with torch.no_grad():
        answer = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            pad_token_id=PAD,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **_as_arguments(kwargs),
        )
    ids = [_cut(row, ends) for row in answer.sequences[:, prompt.shape[1] :].tolist()]
    return ids, answer.sequences_scores.tolist() if case.mode in BEAM_MODES else None


def _as_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists as the objects that generate() takes."""
    arguments = {name: value for name, value in kwargs.items() if value is not None}
    if "constraints" in arguments:
        arguments["constraints"] = [
            PhrasalConstraint(entry["phrasal"]) if "phrasal" in entry else DisjunctiveConstraint(entry["disjunctive"])
            for entry in arguments["constraints"]
        ]
    if "sequence_bias" in arguments:
        arguments["sequence_bias"] = {tuple(ids): bias for ids, bias in arguments["sequence_bias"]}
    if "negative_prompt_ids" in arguments:
        arguments["negative_prompt_ids"] = torch.tensor([arguments["negative_prompt_ids"]])
    if "exponential_decay_length_penalty" in arguments:
        arguments["exponential_decay_length_penalty"] = tuple(arguments["exponential_decay_length_penalty"])
    return arguments


def _cut(row: list[int], ends: list[int]) -> list[int]:
    """`row` without the padding after its end. (An end within a forced phrase ends nothing.)"""
    length = len(row)
    while length and row[length - 1] == PAD:
        length -= 1
    return row[:length] if length and row[length - 1] in ends else row


@contextmanager
def _noise(model: Any, seed: int) -> Iterator[None]:
    generator = torch.Generator().manual_seed(seed)

    def on_hidden(module: Any, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + HIDDEN_NOISE * torch.randn(hidden.shape, generator=generator))

    def on_logits(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits + LOGIT_NOISE * torch.randn(logits.shape, generator=generator)

    hooks = [model.model.norm.register_forward_hook(on_hidden), model.lm_head.register_forward_hook(on_logits)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    main()
