"""Train a small policy by groups of answers (GRPO): the engine draws them, the trainer writes its weights back.

The log-probabilities that the engine drew by are the old policy's: nothing is computed twice, and no token is decoded
and encoded again. The reward is the share of the letter e: enough to see that the loop learns.
"""

import sys

import torch
from penstock import Generator
from penstock.common.checkpoint import demo_folder
from transformers import AutoModelForCausalLM

PROMPTS = ("Once upon a time", "The old river", "In the morning")
GROUP, TOKENS = 8, 12
CLIP = 0.2


def main(model: str | None, updates: int) -> None:
    folder = str(demo_folder()) if model in (None, "penstock-demo") else model
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    # The engine's numbers must be the trainer's, so both have one dtype.
    with Generator(folder, dtype="float32") as engine:
        for update in range(updates):
            answers = [
                engine.generate(
                    prompt,
                    num_return_sequences=GROUP,
                    do_sample=True,
                    # Nothing but the model's own distribution.
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=TOKENS,
                    ignore_eos=True,
                    top_logprobs=0,
                    seed=update,
                )
                for prompt in PROMPTS
            ]
            rewards, worst, loss = [], 0.0, torch.zeros(())
            for prompt, answer in zip(PROMPTS, answers, strict=True):
                assert answer.finished.last_weights_version == update
                drawn = [[entry.logprob for entry in choice.logprobs] for choice in answer.choices]
                reward = torch.tensor([choice.text.count("e") / max(1, len(choice.text)) for choice in answer.choices])
                ours = logprobs(policy, engine.tokenizer.encode(prompt), [one.token_ids for one in answer.choices])
                old = torch.tensor(drawn)
                worst = max(worst, float((ours.detach() - old).abs().max()))
                advantage = ((reward - reward.mean()) / (reward.std() + 1e-6))[:, None]
                ratio = (ours - old).exp()
                loss = loss - torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
                rewards.append(float(reward.mean()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            version = engine.write_weights(policy.state_dict())
            reward_mean = sum(rewards) / len(rewards)
            print(f"update {version}: reward {reward_mean:.3f}, engine and trainer differ by {worst:.1e}", flush=True)


def logprobs(policy: torch.nn.Module, prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    """Return the policy's log-probability of every token of the answers, (answers, tokens)."""
    ids = torch.tensor([prompt + answer for answer in answers])
    logits = policy(ids).logits[:, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, len(prompt) :, None])[..., 0]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None, int(sys.argv[2]) if len(sys.argv) > 2 else 20)
