"""Flags and commands of other servers' command lines, with ours: what an unknown one is answered by."""

from __future__ import annotations

from dataclasses import dataclass

VLLM, LLAMA_CPP = "vLLM", "llama.cpp"


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """Flags of other servers that mean one thing, and what does it here."""

    theirs: tuple[str, ...]
    of: str
    # Our flags, by name; empty where no flag does it.
    ours: tuple[str, ...]
    # What to know besides, or what does it in place of a flag.
    note: str = ""

    @property
    def hint(self) -> str:
        """Words that follow the name of the unknown flag."""
        here = " and ".join(self.ours)
        says = f"here it is {here}{', ' if self.note else ''}{self.note}" if here else self.note
        return f"{self.of}'s; {says}"


# Of `penstock serve` and its services.
SERVE_FLAGS = (
    ForeignFlag(("--max-model-len", "--max_model_len"), VLLM, ("--max-context",)),
    ForeignFlag(("--api-key",), VLLM, ("--auth-token-file",), "a file with a token in each line"),
    ForeignFlag(("--gpu-memory-utilization",), VLLM, ("--kv-memory",), "a size of the pool of keys and values"),
    ForeignFlag(("--kv-cache-memory-bytes",), VLLM, ("--kv-memory",)),
    ForeignFlag(("--max-num-seqs",), VLLM, ("--max-running-sequences",)),
    ForeignFlag(("--max-num-batched-tokens",), VLLM, ("--max-batch-tokens",)),
    ForeignFlag(("--tensor-parallel-size", "-tp"), VLLM, ("--tensor-parallel",)),
    ForeignFlag(("--data-parallel-size", "-dp"), VLLM, ("--generation-replicas",)),
    ForeignFlag(
        ("--enable-prefix-caching",), VLLM, (), "prompts' prefixes are shared unless --no-prefix-cache is given"
    ),
    ForeignFlag(("--no-enable-prefix-caching",), VLLM, ("--no-prefix-cache",)),
    ForeignFlag(("--swap-space", "--cpu-offload-gb"), VLLM, ("--host-kv-memory",), "for keys and values"),
    ForeignFlag(("--lora-modules",), VLLM, ("--lora",), "NAME=FOLDER for each"),
    ForeignFlag(("--enable-lora",), VLLM, ("--lora",), "NAME=FOLDER: adapters need no other flag"),
    ForeignFlag(("--max-loras",), VLLM, ("--adapter-memory",), "adapters are bounded by their bytes"),
    ForeignFlag(("--speculative-config", "--speculative-model"), VLLM, ("--assistant-model", "--draft-head")),
    ForeignFlag(
        ("--tokenizer",),
        VLLM,
        (),
        "give it to services of their own: the tokenizer's MODEL, and generation's --tokenizer-path",
    ),
    ForeignFlag(("--ssl-keyfile",), VLLM, ("--tls-key",)),
    ForeignFlag(("--ssl-certfile",), VLLM, ("--tls-cert",)),
    ForeignFlag(("--ssl-ca-certs",), VLLM, ("--tls-client-ca",)),
    ForeignFlag(("--enforce-eager",), VLLM, ("--no-capture-steps",)),
    ForeignFlag(("--allowed-origins",), VLLM, ("--allowed-origin",)),
    ForeignFlag(("--uvicorn-log-level",), VLLM, ("--log-level",)),
    ForeignFlag(("--otlp-traces-endpoint",), VLLM, ("--tracing-endpoint",)),
    ForeignFlag(
        ("--download-dir", "--hf-cache-dir"), VLLM, (), "the variable HF_HOME says where models from a hub are kept"
    ),
    ForeignFlag(
        ("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"),
        VLLM,
        (),
        "tool calls and reasoning are recognised by the model's chat template",
    ),
    ForeignFlag(("--seed",), VLLM, (), "requests have a seed, the field `seed`"),
    ForeignFlag(("--chat-template",), VLLM, (), "MODEL's own template is used: its folder's chat_template.jinja"),
    ForeignFlag(("--chat-template-content-format",), VLLM, (), "what a template reads is found by itself"),
    ForeignFlag(("--enable-chunked-prefill",), VLLM, (), "long prompts are always computed in parts"),
    ForeignFlag(
        ("--pipeline-parallel-size", "-pp"), VLLM, (), "a model over many machines runs in vLLM, behind --backend"
    ),
    ForeignFlag(("--load-format",), VLLM, (), "safetensors, GGUF and packed folders are told by their files"),
    ForeignFlag(("--disable-log-requests",), VLLM, (), "no prompt or answer is ever logged"),
    ForeignFlag(
        ("--guided-decoding-backend", "--structured-outputs-config"), VLLM, (), "every constraint is always on"
    ),
    ForeignFlag(("--ctx-size", "-c"), LLAMA_CPP, ("--max-context",)),
    ForeignFlag(("--parallel", "-np"), LLAMA_CPP, ("--max-running-sequences",)),
    ForeignFlag(("--batch-size", "--ubatch-size", "-b", "-ub"), LLAMA_CPP, ("--max-batch-tokens",)),
    ForeignFlag(("--n-gpu-layers", "--gpu-layers", "-ngl"), LLAMA_CPP, ("--device",), "the whole model runs on it"),
    ForeignFlag(("--cache-type-k", "--cache-type-v", "-ctk", "-ctv"), LLAMA_CPP, ("--kv-cache-dtype",)),
    ForeignFlag(("--model-draft", "-md"), LLAMA_CPP, ("--assistant-model",)),
    ForeignFlag(("--hf-repo", "-hf", "-hfr"), LLAMA_CPP, (), "give the hub id as MODEL, without a flag"),
    ForeignFlag(("-m",), LLAMA_CPP, (), "give the file as MODEL, without a flag"),
    ForeignFlag(("-t",), LLAMA_CPP, ("--threads",)),
    ForeignFlag(("--alias", "-a"), LLAMA_CPP, ("--served-model-name",)),
    ForeignFlag(("--api-key-file",), LLAMA_CPP, ("--auth-token-file",)),
    ForeignFlag(("--ssl-key-file",), LLAMA_CPP, ("--tls-key",)),
    ForeignFlag(("--ssl-cert-file",), LLAMA_CPP, ("--tls-cert",)),
    ForeignFlag(
        ("--no-mmap",), LLAMA_CPP, ("--no-map-embeddings",), "other weights are mapped from packed folders only"
    ),
    ForeignFlag(("--cont-batching", "-cb"), LLAMA_CPP, (), "requests always share a batch"),
    ForeignFlag(("--metrics",), LLAMA_CPP, ("--metrics-port",), "they are on unless it is -1"),
    ForeignFlag(("--jinja", "--embedding", "--embeddings"), LLAMA_CPP, (), "it is always on"),
    ForeignFlag(("--n-predict", "-n"), LLAMA_CPP, (), "requests say it, by `max_tokens` or `max_new_tokens`"),
    ForeignFlag(("--threads-batch", "-tb"), LLAMA_CPP, ("--threads",), "the same for prompts and answers"),
    ForeignFlag(("--flash-attn", "-fa"), LLAMA_CPP, (), "it is always on"),
    ForeignFlag(("--mlock",), LLAMA_CPP, (), "weights are in memory; those of packed folders are mapped"),
    ForeignFlag(("--numa",), LLAMA_CPP, (), "`numactl` starts a process on one node"),
    ForeignFlag(
        ("--chat-template-file",), LLAMA_CPP, (), "MODEL's own template is used: its folder's chat_template.jinja"
    ),
    ForeignFlag(("--slots", "--props"), LLAMA_CPP, (), "`penstock debug state` shows what runs"),
)
# Of `penstock chat` and `penstock complete`.
ASK_FLAGS = (
    ForeignFlag(("--max-tokens", "--max-completion-tokens"), VLLM, ("--max-new-tokens",)),
    ForeignFlag(("--url", "--base-url", "--host"), VLLM, ("--address",), "HOST:PORT of the router"),
    ForeignFlag(("--model-name",), VLLM, ("--model",)),
    ForeignFlag(("--system-prompt", "-sys"), VLLM, (), "/system TEXT in a conversation"),
    ForeignFlag(("--n-predict", "--predict", "-n"), LLAMA_CPP, ("--max-new-tokens",)),
    ForeignFlag(("--temp",), LLAMA_CPP, ("--temperature",)),
    ForeignFlag(("--repeat-penalty",), LLAMA_CPP, ("--repetition-penalty",)),
    ForeignFlag(("--prompt", "-p"), LLAMA_CPP, (), "give the text without a flag"),
    ForeignFlag(("--json-schema-file", "-jf"), LLAMA_CPP, ("--json-schema",), "@FILE"),
    ForeignFlag(("--grammar-file",), LLAMA_CPP, ("--grammar",), "@FILE, in Lark's form"),
)
BY_COMMAND = {"serve": SERVE_FLAGS, "chat": ASK_FLAGS, "complete": ASK_FLAGS}


def flag_hint(command: str, flag: str) -> str | None:
    """Return words about a flag that the command `command` of ours does not have; None for one that nobody has."""
    return next((row.hint for row in BY_COMMAND.get(command, ()) if flag in row.theirs), None)


# Commands of other programs that are called as ours.
SAME_COMMANDS = {
    "pull": "download",
    "generate": "complete",
    "status": "health",
    "ps": "health",
    "start": "serve",
    "show": "inspect",
    "benchmark": "bench",
}
# Commands of other programs that none of ours is.
COMMAND_HINTS = {
    "run": "`penstock serve MODEL` serves a model and `penstock chat` talks to it; `penstock demo MODEL` does both",
    "list": "`penstock models info` shows the model of a server, and /v1/models lists them over HTTP",
    "ls": "`penstock models info` shows the model of a server, and /v1/models lists them over HTTP",
    "rm": "models of a hub are files of its own cache: `hf cache rm` removes them",
    "stop": "Ctrl-C in its terminal, or SIGTERM, stops a server; `penstock admin drain` lets its work finish first",
    "embed": "POST /v1/embeddings over HTTP, or Client.embed in Python",
    "tokenize": "POST /tokenize over HTTP, or Client.tokenize in Python",
    "convert": "safetensors and GGUF are read as they are; `penstock pack` writes weights as the kernels read them",
}
