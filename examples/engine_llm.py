"""Drive a model by hand, graph by graph, as drivers of SAIL's EngineLLM do. The tokens are those that Generate gives.

    penstock serve generation --port 50052
    python examples/engine_llm.py "What is Penstock?"

Only the import names Penstock: `import sophon.sail as sail` is what it replaces. The prompt is padded to the length of
the first stage, keys and values stay in tensors here, and each layer is one call.
"""

from __future__ import annotations

import argparse

import numpy as np
import penstock_client.sail as sail
from penstock.common.checkpoint import demo_folder
from tokenizers import Tokenizer

HIDDEN = -10000.0


class Driver:
    """A loop over the graphs of one engine."""

    def __init__(self, handle: sail.Handle, engine: sail.EngineLLM) -> None:
        self.engine = engine
        self.handle = handle
        names = engine.get_graph_names()
        self.num_layers = sum(name.startswith("block_cache_") for name in names)
        _, self.length, self.hidden_size = engine.get_input_shape("block_0", 0)
        # Inputs and outputs of the prompt's graphs, and of those for one more token.
        self.ids, self.next_id = self.input("embedding", 0), self.input("embedding_cache", 0)
        self.hidden, self.next_hidden = self.output("embedding", 0), self.output("embedding_cache", 0)
        self.positions, self.next_position = self.input("block_0", 1), self.input("block_cache_0", 1)
        self.mask, self.next_mask = self.input("block_0", 2), self.input("block_cache_0", 2)
        self.keys = [self.output("block_0", 1) for _ in range(self.num_layers)]
        self.values = [self.output("block_0", 2) for _ in range(self.num_layers)]
        self.key, self.value = self.output("block_cache_0", 1), self.output("block_cache_0", 2)
        self.last_hidden = self.input("lm_head", 0)
        self.logits, self.token = self.output("lm_head", 0), self.output("greedy_head", 0)
        self.num_tokens = 0

    def input(self, graph: str, index: int) -> sail.Tensor:
        """Make a tensor for an input, of the first stage's shape."""
        engine = self.engine
        shape, dtype = engine.get_input_shape(graph, index), engine.get_input_dtype(graph, index)
        return sail.Tensor(self.handle, shape, dtype, False, True)

    def output(self, graph: str, index: int) -> sail.Tensor:
        """Make a tensor for an output, of the first stage's shape."""
        engine = self.engine
        shape, dtype = engine.get_output_shape(graph, index), engine.get_output_dtype(graph, index)
        return sail.Tensor(self.handle, shape, dtype, False, True)

    def first(self, ids: list[int]) -> int:
        """Compute a prompt; return the token after it."""
        self.num_tokens = len(ids)
        padding = self.length - len(ids)
        mask = np.full((self.length, self.length), HIDDEN, np.float32)
        mask[: len(ids)] = np.where(np.tri(len(ids), self.length, dtype=bool), 0.0, HIDDEN)
        self.ids.update_data(np.array([*ids, *[0] * padding], np.int32))
        self.positions.update_data(np.array([*range(len(ids)), *[0] * padding], np.int32))
        self.mask.update_data(mask)
        self.engine.process("embedding", {0: self.ids}, {0: self.hidden})
        for layer in range(self.num_layers):
            self.engine.process(
                f"block_{layer}",
                {0: self.hidden, 1: self.positions, 2: self.mask},
                {0: self.hidden, 1: self.keys[layer], 2: self.values[layer]},
            )
        self.last_hidden.sync_d2d(self.hidden, (len(ids) - 1) * self.hidden_size, 0, self.hidden_size)
        return self.head()

    def next(self) -> int:
        """Compute the newest token; return the one after it."""
        mask = np.zeros(self.length + 1, np.float32)
        mask[self.num_tokens : self.length] = HIDDEN
        self.next_id.update_data(self.token.asnumpy())
        self.next_position.update_data(np.array([self.num_tokens], np.int32))
        self.next_mask.update_data(mask)
        self.engine.process("embedding_cache", {0: self.next_id}, {0: self.next_hidden})
        size = self.key.array.size
        for layer in range(self.num_layers):
            self.engine.process(
                f"block_cache_{layer}",
                {
                    0: self.next_hidden,
                    1: self.next_position,
                    2: self.next_mask,
                    3: self.keys[layer],
                    4: self.values[layer],
                },
                {0: self.next_hidden, 1: self.key, 2: self.value},
            )
            self.keys[layer].sync_d2d(self.key, 0, self.num_tokens * size, size)
            self.values[layer].sync_d2d(self.value, 0, self.num_tokens * size, size)
        self.num_tokens += 1
        self.last_hidden.sync_d2d(self.next_hidden, 0, 0, self.hidden_size)
        return self.head()

    def head(self) -> int:
        """Return the most likely token after the last hidden state."""
        self.engine.process("lm_head", {0: self.last_hidden}, {0: self.logits})
        self.engine.process("greedy_head", {0: self.logits}, {0: self.token})
        return int(self.token.asnumpy()[0, 0])

    def generate(self, ids: list[int], max_new_tokens: int, ends: set[int]) -> list[int]:
        """Return the tokens after a prompt, up to one of `ends`."""
        found = [self.first(ids)]
        while found[-1] not in ends and len(found) < max_new_tokens and self.num_tokens < self.length:
            found.append(self.next())
        return found


def main() -> None:
    """Answer one prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Penstock serves")
    parser.add_argument("--engine", default="127.0.0.1:50052", help="address of a generation service")
    parser.add_argument("--tokenizer", default=str(demo_folder() / "tokenizer.json"), help="of the served model")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--end", type=int, action="append", default=[], help="a token that ends the answer")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(given.tokenizer)
    with sail.EngineLLM(given.engine, [0]) as engine:
        driver = Driver(sail.Handle(0), engine)
        ids = driver.generate(tokenizer.encode(given.prompt).ids, given.max_new_tokens, set(given.end))
    print(ids)
    print(given.prompt + tokenizer.decode(ids))


if __name__ == "__main__":
    main()
