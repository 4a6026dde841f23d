"""Makes the demo model's draft head: an EAGLE-3 folder, fitted to the model on its own corpus, in one command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import islice
from pathlib import Path

# Run as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Read when torch loads its OpenMP: see train.py.
os.environ.setdefault("GOMP_SPINCOUNT", "200")

import torch
from rich.console import Console
from safetensors.torch import save_file

from dev.demo.head.fitting import fit
from dev.demo.head.network import INNER, TAPS, Head, frequent_ids
from dev.demo.model.batches import batches
from dev.demo.model.evaluate import load
from dev.demo.model.hf import quiet
from dev.demo.model.tokenizer import PAD_TOKEN, token_id
from dev.demo.train import FOLDER

HEAD_FOLDER = FOLDER.with_name("demo_head")
DRAFT_VOCAB = 1024
"""Number of scored ids: the most frequent ones of the answers."""
CONVERSATIONS, BATCH_TOKENS, NUM_BATCHES = 500, 768, 40
"""Conversations that are drawn at once, tokens of a batch, padding included, and batches that the fit reads."""
_EXAMPLES = """examples:
  python -m dev.demo.fit_head                   make the head again: half a minute of a core
  python -m dev.demo.fit_head --batches 200 --out larger    from five times as much text
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with code 2 on a bad one."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HEAD_FOLDER, help="folder of the head (default: the embedded one)")
    parser.add_argument("--batches", type=int, default=NUM_BATCHES, help="batches to read (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=20261130, help="seed of everything (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    return parser.parse_args(arguments)


def save_head(head: Head, ids_V: torch.Tensor, vocab_size: int, folder: Path) -> None:
    """Write the folder in the layout of SGLang's trainer, weights as bf16."""
    is_scored = torch.zeros(vocab_size, dtype=torch.bool)
    is_scored[ids_V] = True
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    tensors |= {"d2t": ids_V - torch.arange(len(ids_V)), "t2d": is_scored}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": head.norm.weight.shape[0],
        "intermediate_size": INNER,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": head.eps,
        "rope_theta": head.theta,
        "max_position_embeddings": 4096,
        "vocab_size": vocab_size,
        "draft_vocab_size": len(ids_V),
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def main(arguments: list[str] | None = None) -> int:
    """Fit, write the folder, print how many drafts are right; the exit code is 0."""
    options = parse(arguments)
    quiet()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model, tokenizer, template = load(FOLDER)
    source = batches(
        tokenizer,
        template,
        seed=options.seed,
        tokens=BATCH_TOKENS,
        pad=token_id(tokenizer, PAD_TOKEN),
        single_batches=0,
        chunk=CONVERSATIONS,
    )
    read = list(islice(source, options.batches))
    learnt = torch.cat([batch.ids_BT[batch.learn_BT] for batch in read])
    ids_V = frequent_ids(learnt, DRAFT_VOCAB, model.config.vocab_size)
    head = Head(model.config, DRAFT_VOCAB)
    right = fit(head, model, read, ids_V)
    save_head(head, ids_V, model.config.vocab_size, options.out)
    Console().print(f"first drafts that are the model's own choice, in the text of the fit: {right:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
