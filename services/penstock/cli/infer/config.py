"""Configuration of `penstock infer`: the flags and defaults of Chinese-LLaMA-Alpaca-3's inference_hf.py, and ours."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from penstock.cli.client.connection import ConnectionConfig
from penstock.cli.client.sampling import SamplingConfig
from penstock.common.checkpoint import model_name
from penstock.common.errors import InvalidArgument, StartupError
from penstock.common.options import BoundOption, option, options_of
from penstock.compat import inference_hf
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.options.checks import check_options
from penstock.generation.options.hf_json import options_of as options_of_json
from penstock.generation.options.kinds import BadValue
from penstock.generation.options.table import CONFIG, DRAFTS

MODEL, PROMPTS, OUTPUT, ENDPOINT = "Model", "Prompts", "Output", "Endpoint"
# Beginning of an endpoint that is a vLLM.
ENGINE = "vllm://"
# Templates that --prompt-template names.
AUTO, LLAMA3, CHAT, NONE = "auto", "llama3", "chat", "none"
# Flags of `penstock serve generation` for the model in this process.
ENGINE_OPTIONS = (
    "device", "dtype", "quantization", "threads", "kernels", "compact_weights", "lora", "adapter_memory", "kv_memory",
    "kv_cache_dtype", "block_size", "max_context", "prefix_cache", "max_batch_tokens", "max_running_sequences",
    "tune_seconds",
)  # fmt: skip
# Options that only sampling reads.
_DRAWN = ("temperature", "top_k", "top_p", "min_p")
# Options that transformers' GenerationConfig does not have: a text, a name.
_NOT_IN_FILE = {"negative_prompt_text", "assistant_model"}
_PRESETS = {field.name: field for field in dataclasses.fields(SamplingConfig)}


def _preset(name: str) -> Any:
    """Return the field of the option `name` with the script's default."""
    return dataclasses.field(default=inference_hf.DEFAULTS[name], metadata=_PRESETS[name].metadata)


@dataclass(frozen=True, kw_only=True)
class InferConfig(SamplingConfig):
    """Options of `penstock infer`, except those of the engine and of the connection."""

    base_model: str | None = option(
        None, "Folder or hub id of the model; the embedded one when left out.", group=MODEL, metavar="MODEL"
    )
    tokenizer_path: str | None = option(
        None, "Folder or hub id of the tokenizer, when it is not the model's own.", group=MODEL, metavar="MODEL"
    )
    load_in_8bit: bool = option(False, "Weights in int8: --quantization int8.", group=MODEL)
    load_in_4bit: bool = option(False, "Weights in int4: --quantization int4.", group=MODEL)
    alpha: float | None = option(
        None,
        "NTK scaling of the rotary embedding: multiply its base by alpha^(d/(d-2)), for alpha times the context.",
        group=MODEL,
        minimum=1.0,
    )
    gpus: str | None = option(
        None, "GPUs for --use-vllm, such as 0,1; Penstock's own engine has --device.", group=MODEL
    )
    only_cpu: bool = option(False, "Use the CPU alone.", group=MODEL)
    use_vllm: bool = option(False, "Run the prompts on vLLM, where it is installed.", group=MODEL)
    use_flash_attention_2: bool = option(
        False, "Accepted without effect: the engine chooses its own attention over the paged pool.", group=MODEL
    )

    data_file: str | None = option(
        None,
        "File with a prompt on each line, UTF-8; two sample questions when left out.",
        group=PROMPTS,
        metavar="FILE",
    )
    with_prompt: bool = option(False, "Put each line into the prompt template, after a system prompt.", group=PROMPTS)
    prompt_template: str = option(
        AUTO,
        "llama3: the script's own; chat: the model's chat template; auto: llama3 if the tokenizer has its tokens, "
        "else chat; none: interactive input is completed as it is.",
        group=PROMPTS,
        choices=(AUTO, LLAMA3, CHAT, NONE),
    )
    system_prompt: str = option(
        inference_hf.SYSTEM_PROMPT, "System prompt of the template; empty: none.", group=PROMPTS, parse=str
    )
    allow_control_tokens_in_text: bool = option(
        False, "Lines may spell control tokens, as in transformers.", group=PROMPTS
    )
    interactive: bool = option(False, "Converse; !help lists the commands.", group=PROMPTS)
    history_tokens: int | None = option(
        None,
        "Most tokens of a conversation that the next turn sees; the oldest turns are dropped. Default: the context "
        "less --max-new-tokens.",
        group=PROMPTS,
        minimum=1,
    )

    predictions_file: str = option(
        inference_hf.PREDICTIONS_FILE,
        "Answers: [{Input, Output}] in the order of the lines; generation_config.json comes beside it.",
        group=OUTPUT,
        metavar="FILE",
    )
    resume: bool = option(
        True, "Continue from the journal that an interrupted run left beside the predictions file.", group=OUTPUT
    )
    show: bool = option(False, "Also write each answer to standard output at the end.", group=OUTPUT)

    endpoint: str | None = option(
        None,
        "host:port of a router, such as that of `penstock serve`: it answers, and no model is loaded here. "
        "http://host:port of a gateway: the lines become a batch, which runs on idle capacity. vllm://host:port of a "
        "vLLM that serves gRPC (several with commas): this command routes to it, with the tokenizer of --base-model.",
        group=ENDPOINT,
        metavar="HOST:PORT|URL",
    )
    completion_window: str = option(
        "24h", "Time for the batch of a gateway; then it expires.", group=ENDPOINT, metavar="DURATION"
    )
    concurrency: int = option(16, "Prompts that are with the endpoint at once.", group=ENDPOINT, minimum=1)

    assistant_model: str | None = option(
        None,
        "Draft model: a folder or hub id, or its name at the --endpoint. The output ids are the same without it.",
        group=DRAFTS,
        metavar="MODEL",
    )
    do_sample: bool = _preset("do_sample")
    temperature: float | None = _preset("temperature")
    top_k: int | None = _preset("top_k")
    top_p: float | None = _preset("top_p")
    repetition_penalty: float | None = _preset("repetition_penalty")
    max_new_tokens: int | None = _preset("max_new_tokens")

    def check(self, engine: dict[str, Any]) -> None:
        """Refuse flags that contradict each other. `engine`: the engine's flags. Raises StartupError naming one."""
        if self.load_in_8bit and self.load_in_4bit:
            raise StartupError("--load-in-8bit and --load-in-4bit exclude each other", flag="--load-in-8bit")
        loads = "--load-in-8bit" if self.load_in_8bit else "--load-in-4bit" if self.load_in_4bit else None
        if self.use_vllm and (loads or engine.get("quantization") not in (None, "none")):
            flag = loads or "--quantization"
            raise StartupError(f"--use-vllm does not go with {flag}: leave one of them out", flag=flag)
        if self.use_vllm and not self.is_engine and (self.only_cpu or engine.get("device") == "cpu"):
            raise StartupError("--use-vllm needs a GPU: leave --only-cpu out, or --use-vllm", flag="--only-cpu")
        if self.use_vllm and not self.is_engine and (self.interactive or self.endpoint):
            flag = "--interactive" if self.interactive else "--endpoint"
            raise StartupError(
                f"--use-vllm runs a file of prompts here: leave {flag} out, or give a vLLM that serves as --endpoint "
                "vllm://HOST:PORT",
                flag=flag,
            )
        if loads and "quantization" in engine:
            raise StartupError(
                f"--quantization and {loads} say the same thing: give one of them", flag="--quantization"
            )
        if self.endpoint:
            self._check_endpoint(loads, engine)
        elif self.model:
            raise StartupError("--model is for an --endpoint; the model here is --base-model", flag="--model")
        if self.interactive and self.is_batch:
            raise StartupError("--interactive needs a router: give its host:port as --endpoint", flag="--endpoint")
        if self.interactive and self.data_file:
            raise StartupError("--interactive reads no --data-file: give one of them", flag="--data-file")

    @property
    def is_batch(self) -> bool:
        """True when the endpoint is a gateway, which answers by batches."""
        return (self.endpoint or "").startswith(("http://", "https://"))

    @property
    def is_engine(self) -> bool:
        """True when the endpoint is a vLLM, which this command routes to by itself."""
        return (self.endpoint or "").startswith(ENGINE)

    def _check_endpoint(self, loads: str | None, engine: dict[str, Any]) -> None:
        """Refuse flags that apply only to a model loaded here."""
        flags = ["--" + name.replace("_", "-") for name in engine]
        flags += [loads] if loads else []
        flags += ["--alpha"] if self.alpha is not None else []
        if flags:
            raise StartupError(f"{flags[0]} is for a model that is loaded here: leave --endpoint out", flag=flags[0])

    def asked_options(self) -> dict[str, Any]:
        """Return the options of every request by their names. Raises StartupError for a bad one.

        Greedy decoding leaves sampling options out where they are defaults of this command.
        """
        plain = SamplingConfig(**{name: getattr(self, name) for name in _PRESETS})
        asked: dict[str, Any] = dict(plain.request_options())
        if self.assistant_model and not self.endpoint:
            asked["assistant_model"] = model_name(self.assistant_model)
        if not asked.get("do_sample") or asked.get("temperature") == 0:
            asked["do_sample"] = False
            defaults = {bound.name: bound.default for bound in options_of(InferConfig)}
            for name in _DRAWN:
                if asked.get(name) in (0, defaults[name]):
                    asked.pop(name, None)
        return asked


def check_asked(options: dict[str, Any]) -> None:
    """Check each option by itself, before a model is loaded. Raises StartupError naming its flag.

    Options in a form that only requests have are left to the engine.
    """
    for name, value in options.items():
        try:
            check_options(options_of_json({name: value}), prefix="")
        except BadValue:
            continue
        except InvalidArgument as error:
            flag = f"--{name.replace('_', '-')}"
            raise StartupError(f"{flag} {error.message}", flag=flag) from error


def generation_config(options: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `options` that transformers' GenerationConfig has, for generation_config.json."""
    known = {*CONFIG, "stop_strings"} - _NOT_IN_FILE
    return {name: value for name, value in sorted(options.items()) if name in known}


def engine_options() -> list[BoundOption]:
    """Return the flags of the engine that this command has, too."""
    found = {bound.name: bound for bound in options_of(GenerationServiceConfig)}
    return [found[name] for name in ENGINE_OPTIONS]


def connection_options() -> list[BoundOption]:
    """Return the flags of the connection; --endpoint is its address."""
    return [bound for bound in options_of(ConnectionConfig) if bound.name != "address"]
