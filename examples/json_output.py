"""Make answers follow a JSON schema, several questions in one batch."""

import json
import sys

from penstock import Generator

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "boolean"}, "confidence": {"enum": ["low", "high"]}},
    "required": ["answer", "confidence"],
    "additionalProperties": False,
}
QUESTIONS = ("Does Penstock need a GPU?", "Does Penstock have metrics?", "Is Paris in France?")


def main(model: str | None) -> None:
    with Generator(model) as generator:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = generator.generate(chats, json_schema=SCHEMA, max_new_tokens=64, do_sample=False)
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(question, json.loads(answer.text))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
