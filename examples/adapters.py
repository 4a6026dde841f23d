"""Answer with a LoRA adapter and without it, in one batch: `python examples/adapters.py MODEL PEFT_FOLDER`."""

import sys

from penstock import Generator
from penstock_client import PenstockError


def main(model: str, folder: str) -> int:
    with Generator(model) as generator:
        try:
            generator.load_adapter("mine", folder)
        except PenstockError as error:
            print(f"the adapter is not loaded: {error.message}")
            return 1
        prompt = "Write a line about the sea."
        plain = generator.stream(prompt, max_new_tokens=32, do_sample=False)
        tuned = generator.stream(prompt, max_new_tokens=32, do_sample=False, adapter="mine")
        print(f"without: {plain.result().text!r}")
        print(f"with:    {tuned.result().text!r}")
        generator.unload_adapter("mine")
        return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
