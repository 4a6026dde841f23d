"""Print a chat's answer as it is made, then leave another one early."""

import sys

from penstock import Generator


def main(model: str | None) -> None:
    with Generator(model) as generator:
        messages = [{"role": "user", "content": "What is Penstock?"}]
        with generator.stream(messages, max_new_tokens=64, temperature=0.0) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
            answer = stream.result()
        print(f"\n{answer.finish_reason}, {answer.usage}, {answer.timings}")
        with generator.stream("Once upon a time", max_new_tokens=500, ignore_eos=True) as stream:
            for delta in stream:
                if delta.seq == 4:
                    # The request is aborted, and its blocks are free before the engine's next step.
                    break
        print("left early")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
