"""Choose among continuations by their log-probability, and compare texts by their embeddings."""

import sys

from penstock import Generator

CITIES = (" Paris", " Rome", " a potato")
TEXTS = ("The cat sleeps.", "A cat is asleep.", "Interest rates rise.")


def main(model: str | None) -> None:
    with Generator(model) as generator:
        prompt = "The capital of France is"
        scores = generator.score([(prompt, city) for city in CITIES], top_logprobs=1).scores
        for city, score in zip(CITIES, scores, strict=True):
            print(f"{score.logprob:8.3f} {prompt}{city}{' (greedy)' if score.is_greedy else ''}")
        print(f"best:{CITIES[max(range(len(CITIES)), key=lambda index: scores[index].logprob)]}")
        first, *others = generator.embed(TEXTS, normalize=True).vectors
        for text, vector in zip(TEXTS[1:], others, strict=True):
            print(f"{sum(a * b for a, b in zip(first, vector, strict=True)):.3f} {TEXTS[0]} / {text}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
