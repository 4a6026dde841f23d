"""Answer a thousand prompts, as many at a time as the engine runs well."""

import sys

from penstock import BatchFailed, Generator

TOPICS = ("the sea", "a train", "bread", "the night sky", "a small town")


def main(model: str | None, count: int) -> None:
    prompts: list[str | list[int]] = [
        f"Write a line about {TOPICS[i % len(TOPICS)]}, number {i}." for i in range(count)
    ]
    # No model has this id: the prompt fails, and the others are answered all the same.
    prompts[count // 2] = [10**9]
    with Generator(model) as generator:
        try:
            answers = generator.generate(prompts, max_new_tokens=16, do_sample=True, seed=1)
        except BatchFailed as failed:
            print(f"failed: {failed}")
            answers = failed.results
        tokens = sum(len(answer.token_ids) for answer in answers if answer is not None)
        print(f"answered {sum(answer is not None for answer in answers)} of {count} prompts, {tokens} tokens")
        print(f"the first: {answers[0].text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None, int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
