"""Engines that answer prompts of `penstock infer`: one in this process, a router, or vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock_client._options import is_conversation

from penstock.cli.client.connection import ConnectionConfig, open_client
from penstock.cli.console import complain
from penstock.cli.infer.config import InferConfig
from penstock.cli.infer.prompts import AskedPrompt
from penstock.cli.progress_display import LiveLine, PlainLines, ProgressDisplay, is_live
from penstock.common.checkpoint import model_name, resolve_model, source_name
from penstock.common.errors import ResourceExhausted, StartupError
from penstock.compat.option_names import VLLM_SAMPLING
from penstock.generation.core.model_config import CONFIG_FILE, ConfigReader, read_json

if TYPE_CHECKING:
    from penstock_client import Client, Completion, Stream

    from penstock.generator.generator import Generator
    from penstock.generator.stream import TextStream
    from penstock.generator.text import LocalTokenizer

# Options of the engine that decide answers: a resumed run must have the same.
_DECIDING = ("dtype", "quantization", "lora", "tokenizer_path", "kv_cache_dtype", "max_context", "assistant_model")
_FILES = ("*.safetensors", "config.json", "tokenizer.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Answer:
    """Texts of one prompt's sequences."""

    texts: list[str]
    finish_reason: str
    # Tokens of all sequences.
    tokens: int
    # Reasoning texts of a chat model, one a sequence; empty without reasoning.
    reasoning: list[str]

    @staticmethod
    def of(completion: Completion) -> Answer:
        """Make it from a Completion."""
        choices = completion.choices
        reasoning = [one.reasoning for one in choices]
        return Answer(
            [one.text for one in choices],
            completion.finish_reason or "",
            completion.usage.completion_tokens,
            reasoning if any(reasoning) else [],
        )


Asked = tuple[AskedPrompt, Mapping[str, Any]]
Answers = Iterator[tuple[int, "Answer | Exception"]]


class Target(Protocol):
    """An engine that answers."""

    # Name of the model, and its other settings that decide answers.
    name: str
    facts: dict[str, Any]
    # Tokenizer in this process; None: only the engine has it.
    tokenizer: LocalTokenizer | None
    # Longest prompt and answer together; None: not known.
    context: int | None

    def answers(self, requests: Iterator[Asked]) -> Answers:
        """Yield (index, answer or error) of each request, as they end."""


class TalkingTarget(Target, Protocol):
    """An engine that can also stream."""

    def stream(self, prompt: AskedPrompt, options: Mapping[str, Any]) -> Stream | TextStream:
        """Begin one answer."""


class LocalTarget:
    """Target that is a Generator in this process. A context manager: its exit ends the engine."""

    def __init__(self, config: InferConfig, engine: dict[str, Any]) -> None:
        """Load the model. Raises StartupError naming the flag to change."""
        self._held = contextlib.ExitStack()
        display = ProgressDisplay(LiveLine(sys.stderr) if is_live(sys.stderr) else PlainLines(complain))
        try:
            folder = resolve_model(config.base_model, show=display.show)
            options = {**engine, **_engine_settings(config)}
            self.facts: dict[str, Any] = {name: options[name] for name in _DECIDING if name in options}
            self.facts |= {"checkpoint": _checkpoint(folder), "alpha": config.alpha}
            if config.alpha is not None and config.alpha != 1.0:
                folder = self._held.enter_context(scaled_folder(folder, config.alpha))
            # Imports torch.
            from penstock.generator.generator import Generator

            made = Generator(
                folder,
                allow_control_tokens_in_text=config.allow_control_tokens_in_text,
                show=display.show,
                served_model_name=model_name(config.base_model),
                **options,
            )
            self._generator: Generator = self._held.enter_context(made)
        except BaseException:
            self._held.close()
            raise
        finally:
            display.close()
        self.name = self._generator.name
        self.tokenizer = self._generator.tokenizer
        self.context: int | None = self._generator.max_context_tokens

    def __enter__(self) -> LocalTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def answers(self, requests: Iterator[Asked]) -> Answers:
        asked = ((prompt.asked, options) for prompt, options in requests)
        for index, answer in self._generator.generate_each(asked):
            yield index, answer if isinstance(answer, Exception) else Answer.of(answer)

    def stream(self, prompt: AskedPrompt, options: Mapping[str, Any]) -> TextStream:
        return self._generator.stream(prompt.asked, None, **options)


def _checkpoint(folder: Path) -> str:
    """Return the name of a checkpoint's folder with a digest of its files' names, sizes and times."""
    files = sorted(path for pattern in _FILES for path in folder.glob(pattern))
    states = [(path.name, (state := path.stat()).st_size, state.st_mtime_ns) for path in files]
    return f"{source_name(folder)} {hashlib.sha256(repr(states).encode()).hexdigest()[:16]}"


def _engine_settings(config: InferConfig) -> dict[str, Any]:
    """Return the engine's options that this command's flags set."""
    settings: dict[str, Any] = {}
    if config.load_in_8bit or config.load_in_4bit:
        settings["quantization"] = "int8" if config.load_in_8bit else "int4"
    if config.only_cpu:
        settings["device"] = "cpu"
    if config.tokenizer_path is not None:
        settings["tokenizer_path"] = config.tokenizer_path
    if config.assistant_model:
        settings["assistant_model"] = config.assistant_model
    return settings


@contextlib.contextmanager
def scaled_folder(folder: Path, alpha: float) -> Iterator[Path]:
    """Make a folder for the life of a context: the files of `folder`, with config.json's rotary base scaled for `alpha`
    times the context (NTK-aware scaling).

    The base becomes base · alpha^(d / (d - 2)) for d dimensions a head. Raises StartupError naming --alpha for a model
    with its own scaling, or without such a base.
    """
    values = read_json(folder / CONFIG_FILE)
    config = ConfigReader(values, str(folder / CONFIG_FILE))
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    scaling = config.mapping(name) or ConfigReader({}, config.source)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind != "default" or not config.has("num_attention_heads") or not config.has("hidden_size"):
        has = f"rope_type {kind!r}" if kind != "default" else "no rotary base"
        raise StartupError(f"--alpha: config.json has {has}: leave --alpha out", flag="--alpha")
    base = scaling.number("rope_theta", config.number("rope_theta", 10_000.0))
    dim = config.integer("head_dim", max(1, config.integer("hidden_size") // config.integer("num_attention_heads")))
    if dim < 4:
        raise config.error("head_dim", "must be at least 4 with --alpha")
    scaled = base * alpha ** (dim / (dim - 2))
    # Both spellings: readers differ in the one that they use.
    values["rope_theta"] = scaled
    if scaling.values:
        values[name] = {**scaling.values, "rope_theta": scaled}
    if config.has("max_position_embeddings"):
        values["max_position_embeddings"] = int(config.integer("max_position_embeddings") * alpha)
    with tempfile.TemporaryDirectory(prefix="penstock-alpha-") as made:
        for path in folder.iterdir():
            if path.name != "config.json":
                (Path(made) / path.name).symlink_to(path.resolve())
        (Path(made) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        yield Path(made)


class RemoteTarget:
    """Target that is a model behind a router. A context manager: its exit closes the connection."""

    def __init__(self, config: InferConfig, connection: ConnectionConfig) -> None:
        """Connect. Raises StartupError naming the flag, NotFound for an unknown --model."""
        self._client: Client = open_client(connection)
        try:
            self.tokenizer = tokenizer_of(config)
            model = self._client.get_model(config.model or "")
        except BaseException:
            self._client.close()
            raise
        self.name = model.name
        self.context: int | None = model.max_context_tokens or None
        self.facts: dict[str, Any] = {"model": self.name, "tokenizer": model.tokenizer_fingerprint}
        self._concurrency = config.concurrency
        self._closing = threading.Event()

    def __enter__(self) -> RemoteTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._client.close()

    def answers(self, requests: Iterator[Asked]) -> Answers:
        running: dict[Future[Answer], int] = {}
        numbered = enumerate(requests)
        pool = ThreadPoolExecutor(self._concurrency, "infer")
        try:
            while True:
                while len(running) < self._concurrency and (request := next(numbered, None)) is not None:
                    running[pool.submit(self._answer, request[1])] = request[0]
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    error = future.exception()
                    if error is not None and not isinstance(error, Exception):
                        raise error
                    yield running.pop(future), future.result() if error is None else error
        finally:
            # If the caller leaves early, the calls end with the connection.
            if running:
                self._closing.set()
                self._client.close()
            pool.shutdown()

    def _answer(self, request: Asked) -> Answer:
        """Ask until the router has room. Raises PenstockError, TypeError and ValueError."""
        while True:
            try:
                return Answer.of(self.stream(*request).result())
            except ResourceExhausted as error:
                # The queue is full for now; the request itself exceeds no limit.
                if error.retry_after_seconds is None or self._closing.wait(error.retry_after_seconds):
                    raise

    def stream(self, prompt: AskedPrompt, options: Mapping[str, Any]) -> Stream:
        return self._client.stream(prompt.asked, **options)


def tokenizer_of(config: InferConfig) -> LocalTokenizer | None:
    """Load the tokenizer that writes an endpoint's prompts here; None when none is named."""
    named = config.tokenizer_path or config.base_model
    if named is None:
        return None
    from penstock.generator.text import LocalTokenizer
    from penstock.tokenizer.local_bundle import load_local_bundle

    bundle = asyncio.run(load_local_bundle(resolve_model(named)))
    return LocalTokenizer(bundle, allow_control_tokens=config.allow_control_tokens_in_text)


def check_vllm() -> None:
    """Raise StartupError naming the package when vLLM is not installed."""
    if util.find_spec("vllm") is None:
        raise StartupError(
            "--use-vllm needs the package vllm, which is not installed here: pip install vllm, or leave the flag out",
            flag="--use-vllm",
        )


def vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under the names of vLLM's SamplingParams. Raises StartupError naming one that it lacks."""
    made: dict[str, Any] = {}
    for name, value in options.items():
        if name == "do_sample":
            made.update({} if value else {"temperature": 0.0})
        elif name in VLLM_SAMPLING:
            made[VLLM_SAMPLING[name]] = value
        elif name != "echo":
            flag = f"--{name.replace('_', '-')}"
            raise StartupError(f"{flag} does not work with --use-vllm: leave one of them out", flag=flag)
    return made


class VllmTarget:
    """Target that is vLLM in this process, which batches all prompts itself. A context manager like the others."""

    def __init__(self, config: InferConfig, engine: Mapping[str, Any]) -> None:
        """Load the model on the GPUs of --gpus. Raises StartupError when vLLM is not installed."""
        check_vllm()
        vllm: Any = import_module("vllm")
        folder = resolve_model(config.base_model)
        self.name = model_name(config.base_model)
        self.context: int | None = None
        self.tokenizer = tokenizer_of(replace(config, base_model=str(folder)))
        self.facts: dict[str, Any] = {"checkpoint": _checkpoint(folder), "engine": "vllm"}
        self._params = vllm.SamplingParams
        self._model = vllm.LLM(
            model=str(folder),
            tokenizer=str(folder if config.tokenizer_path is None else resolve_model(config.tokenizer_path)),
            tensor_parallel_size=len((config.gpus or "0").split(",")),
            dtype=engine.get("dtype", "auto"),
        )

    def __enter__(self) -> VllmTarget:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: vLLM ends with the process."""

    def answers(self, requests: Iterator[Asked]) -> Answers:
        """All at once, in order."""
        asked = list(requests)
        prompts = [{"prompt_token_ids": self._ids(prompt)} for prompt, _ in asked]
        params = [self._params(**vllm_options(options)) for _, options in asked]
        outputs = self._model.generate(prompts, params) if prompts else []
        for index, (output, (prompt, options)) in enumerate(zip(outputs, asked, strict=True)):
            before = prompt.asked if options.get("echo") and isinstance(prompt.asked, str) else ""
            tokens = sum(len(one.token_ids) for one in output.outputs)
            texts = [before + one.text for one in output.outputs]
            yield index, Answer(texts, str(output.outputs[0].finish_reason or ""), tokens, [])

    def _ids(self, prompt: AskedPrompt) -> list[int]:
        assert self.tokenizer is not None
        if isinstance(prompt.asked, str):
            return self.tokenizer.encode(prompt.asked)
        if is_conversation(prompt.asked):
            return self.tokenizer.apply_chat_template(prompt.asked)  # type: ignore[arg-type]
        return prompt.asked  # type: ignore[return-value]
