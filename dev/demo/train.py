"""Makes the embedded demo model: corpus, tokenizer, training, evaluation and the model card, in one command."""

import argparse
import os
import sys
from pathlib import Path

# Run as a script, from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Read when torch loads its OpenMP: waiting threads sleep soon instead of spinning, three times faster on shared cores.
os.environ.setdefault("GOMP_SPINCOUNT", "200")

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from dev.demo.corpus import held_out_prompts, held_out_thinking_prompts
from dev.demo.model import training
from dev.demo.model.assets import save_model
from dev.demo.model.card import Run, write_card
from dev.demo.model.evaluate import Outcome, accuracy, evaluate, load
from dev.demo.model.hf import quiet, set_training
from dev.demo.model.tokenizer import train_tokenizer
from dev.demo.model.training import TrainingConfig

FOLDER = Path(__file__).resolve().parents[2] / "services" / "penstock" / "assets" / "demo"

_EXAMPLES = """examples:
  python -m dev.demo.train                      make the model again, with the committed settings
  python -m dev.demo.train --steps 300 --decay 100 --out demo-weak    a weak model in a few minutes
  python -m dev.demo.train --minutes 20         stop after 20 minutes (not reproducible)
  python -m dev.demo.train --evaluate-only      measure the model that is there
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with code 2 on a bad one."""
    defaults = TrainingConfig()
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the model (default: the embedded one)")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--decay", type=int, default=defaults.decay, help="last steps, with a falling learning rate")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of everything (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=defaults.threads, help="CPU threads (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=None, help="stop at this wall time even if steps are left")
    parser.add_argument("--check-every", type=int, default=500, help="steps between short evaluations; 0: none")
    parser.add_argument("--evaluate-only", action="store_true", help="train nothing, measure the model in --out")
    return parser.parse_args(arguments)


def show(console: Console, outcomes: list[Outcome], title: str) -> None:
    """Prints right answers per family, and up to three wrong ones of each."""
    table = Table("family", "right", "asked", "share", title=title)
    for family, (right, asked) in accuracy(outcomes).items():
        table.add_row(family, str(right), str(asked), f"{right / asked:.0%}")
    console.print(table)
    wrong = [outcome for outcome in outcomes if not outcome.right]
    for outcome in wrong[:24]:
        asked = outcome.prompt.messages[-1]["content"]
        console.print(f"  {outcome.prompt.family}: {asked!r} → {outcome.answer!r}", markup=False)


class Reporter:
    """The progress bar, and a short evaluation every `check_every` steps (its seconds count as training)."""

    def __init__(self, console: Console, options: argparse.Namespace, tokenizer: Tokenizer, template: str) -> None:
        self._console, self._options, self._tokenizer, self._template = console, options, tokenizer, template
        self._prompts = held_out_prompts(per_family=8)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, TimeRemainingColumn(), console=console)
        self._task = self.bar.add_task("training", total=options.steps)
        self._loss = 0.0
        self.last = training.Progress(0, 0.0, 0.0, 0)

    def __call__(self, progress: training.Progress, model: Qwen2ForCausalLM) -> bool:
        """Called after each step; True ends training."""
        self.last = progress
        self._loss = progress.loss if progress.step == 1 else 0.98 * self._loss + 0.02 * progress.loss
        self.bar.update(self._task, completed=progress.step, description=f"loss {self._loss:.3f}")
        every = self._options.check_every
        if every and progress.step % every == 0 and progress.step < self._options.steps:
            set_training(model, False)
            table = accuracy(evaluate(model, self._tokenizer, self._template, self._prompts))
            set_training(model, True)
            scores = " ".join(f"{family} {right}/{asked}" for family, (right, asked) in table.items())
            self._console.print(f"step {progress.step}, {progress.seconds:.0f} s, loss {self._loss:.3f}: {scores}")
        limit = self._options.minutes
        return limit is not None and progress.seconds > 60 * limit


def train(console: Console, options: argparse.Namespace) -> Run:
    """Trains tokenizer and model and writes both to `--out`."""
    template = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    config = TrainingConfig(steps=options.steps, decay=options.decay, seed=options.seed, threads=options.threads)
    tokenizer = train_tokenizer(config.seed)
    reporter = Reporter(console, options, tokenizer, template)
    with reporter.bar:
        model = training.train(tokenizer, template, config, reporter)
    options.out.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, options.out)
    (options.out / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Run(config, reporter.last)


def main(arguments: list[str] | None = None) -> int:
    """Trains (unless told not to), measures the saved files, prints the tables; the exit code is 0."""
    options, console = parse(arguments), Console()
    quiet()
    run = None if options.evaluate_only else train(console, options)
    model, tokenizer, template = load(options.out)
    outcomes = evaluate(model, tokenizer, template, held_out_prompts())
    thinking = evaluate(model, tokenizer, template, held_out_thinking_prompts(), thinking=True)
    show(console, outcomes, "held-out prompts")
    show(console, thinking, "held-out prompts, thinking")
    if run is not None:
        write_card(options.out / "README.md", run, model, accuracy(outcomes), accuracy(thinking))
        console.print(f"{run.last.step} steps, {run.last.seconds / 60:.1f} min, {run.last.tokens / 1e6:.1f} M tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
