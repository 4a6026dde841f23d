"""Search with four beams and show three answers, by keywords and by transformers' GenerationConfig."""

import sys

from penstock import Generator
from transformers import GenerationConfig


def main(model: str | None) -> None:
    with Generator(model) as generator:
        answer = generator.generate(
            "Penstock has three", num_beams=4, num_return_sequences=3, no_repeat_ngram_size=3, max_new_tokens=16
        )
        for choice in answer.choices:
            print(f"{choice.cumulative_logprob:8.3f} {choice.text!r}")
        config = GenerationConfig(num_beams=4, num_return_sequences=3, no_repeat_ngram_size=3, max_new_tokens=16)
        same = generator.generate("Penstock has three", config)
        equal = [one.token_ids for one in same.choices] == [one.token_ids for one in answer.choices]
        print(f"the same by GenerationConfig: {equal}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
