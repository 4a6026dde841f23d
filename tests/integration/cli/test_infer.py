"""`penstock infer` over a model in this process: transformers' outputs at the script's settings, and no line lost."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from factories.engine.local_generators import SETTINGS
from factories.models.adapters import lora_folder
from factories.models.checkpoints import reference_model, tiny_checkpoint
from factories.models.tokenizer_folders import bundle_of
from penstock.cli.infer import command
from penstock.cli.infer import command as infer_command
from penstock.cli.infer.command import run_infer
from penstock.cli.infer.config import InferConfig
from penstock.cli.infer.conversation import TypedConversation
from penstock.cli.infer.line_batch import SOME_FAILED, LineBatch
from penstock.cli.infer.targets import LocalTarget, vllm_options
from penstock.common.checkpoint import demo_folder
from penstock.common.config import from_env_and_flags
from penstock.common.errors import InvalidArgument, StartupError, Unavailable
from penstock.compat.inference_hf import SYSTEM_PROMPT
from penstock.generator import local_engine
from penstock.tokenizer import local_bundle
from penstock.tokenizer.bundle import TokenizerBundle
from tokenizers import processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

CONTEXT = 256
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
WORDS = [
    "the",
    "river",
    "runs",
    "光",
    "past",
    "a",
    "mill",
    "and",
    "Zoë's",
    "3",
    "old",
    "barns;",
    "why?",
    "Because",
    "水",
    "falls",
]
LINES = [" ".join(WORDS[(number * 7 + place) % len(WORDS)] for place in range(1 + number % 9)) for number in range(100)]
SYSTEM = f"<|start_header_id|>system<|end_header_id|>\n\n{SYSTEM_PROMPT}<|eot_id|>"
SCRIPT = {"temperature": 0.2, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}


def written(line: str) -> str:
    """The script's prompt of one line."""
    return (
        f"{SYSTEM}<|start_header_id|>user<|end_header_id|>\n\n{line}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with Llama 3's control tokens, whose tokenizer puts <|begin_of_text|> in front."""
    made = tmp_path_factory.mktemp("llama3")
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    tokenizer.add_special_tokens({"additional_special_tokens": list(LLAMA3)})
    begin, end = (tokenizer.convert_tokens_to_ids(one) for one in LLAMA3[:2])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{LLAMA3[0]} $A", pair=None, special_tokens=[(LLAMA3[0], begin)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token=LLAMA3[0], eos_token=LLAMA3[1]
    )
    fast.save_pretrained(made)
    sizes = {"vocab_size": 4104, "max_position_embeddings": CONTEXT, "bos_token_id": begin, "eos_token_id": end}
    # Flat enough that answers are not one token again and again.
    return tiny_checkpoint(made, "llama", initializer_range=0.08, **sizes)


@pytest.fixture(scope="module", autouse=True)
def bundles() -> Iterator[None]:
    """Tokenizers are loaded in this process, which has transformers already: seconds less for each engine."""

    async def load_here(folder: Path) -> TokenizerBundle:
        return bundle_of(folder)

    with pytest.MonkeyPatch.context() as patched:
        for module in (local_engine, local_bundle):
            patched.setattr(module, "load_local_bundle", load_here)
        yield


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return reference_model(folder)


def config_of(folder: Path, **given: Any) -> InferConfig:
    return from_env_and_flags(InferConfig, {"base_model": str(folder), **given})


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[LocalTarget]:
    torch.set_num_threads(1)
    with LocalTarget(
        config_of(folder), {name: value for name, value in SETTINGS.items() if name != "kv_memory"}
    ) as made:
        yield made


def data_file(path: Path, lines: list[str] | bytes) -> str:
    path.write_bytes(lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode())
    return str(path)


def answered(target: LocalTarget, folder: Path, tmp_path: Path, lines: list[str] | bytes, **given: Any) -> list[Any]:
    """Run a batch and return its predictions."""
    file = tmp_path / "out" / "answers.json"
    config = config_of(folder, data_file=data_file(tmp_path / "data.txt", lines), predictions_file=str(file), **given)
    code = LineBatch(config, target).run()
    predictions: list[Any] = json.loads(file.read_text(encoding="utf-8"))
    assert code == (SOME_FAILED if any("Error" in one for one in predictions) else 0)
    return predictions


@functools.cache
def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def scripted(folder: Path, model: PreTrainedModel, text: str, tokens: int) -> str:
    """Text that the script decodes for a prompt, but with the likeliest tokens."""
    tokenizer = tokenizer_of(folder)
    terminators = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    ids = tokenizer(text, return_tensors="pt")
    wanted = GenerationConfig(do_sample=False, num_beams=1, repetition_penalty=1.1, max_new_tokens=tokens)
    with torch.no_grad():
        out = model.generate(
            **ids, generation_config=wanted, eos_token_id=terminators, pad_token_id=tokenizer.eos_token_id
        )
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


@pytest.mark.parametrize("tokens", [4, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("with_prompt", [False, True], ids=["plain", "with prompt"])
def test_a_hundred_lines_are_answered_as_transformers_does(
    target: LocalTarget, folder: Path, model: PreTrainedModel, tmp_path: Path, with_prompt: bool, tokens: int
) -> None:
    given = {"with_prompt": with_prompt, "do_sample": "false", "max_new_tokens": str(tokens)}
    found = answered(target, folder, tmp_path, LINES, **given)
    texts = [written(line) if with_prompt else line for line in LINES]
    outputs = [scripted(folder, model, text, tokens) for text in texts]
    if with_prompt:
        outputs = [output.split("assistant\n\n")[1].strip() for output in outputs]
    expected = [{"Input": text, "Output": output} for text, output in zip(texts, outputs, strict=True)]
    assert found == expected
    assert len({one["Output"] for one in found}) > 50
    out = tmp_path / "out"
    assert (out / "answers.json").read_text("utf-8") == json.dumps(expected, ensure_ascii=False, indent=2)
    saved = GenerationConfig.from_pretrained(out)
    assert (saved.do_sample, saved.repetition_penalty, saved.max_new_tokens) == (False, 1.1, tokens)
    assert sorted(path.name for path in out.iterdir()) == ["answers.json", "generation_config.json"]


def test_the_sampled_distribution_is_that_of_transformers(
    target: LocalTarget, folder: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    """Chi-squared of the first tokens of one prompt on many lines, each with a seed of its own."""
    tokenizer = tokenizer_of(folder)
    draws = 600
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.1),
            TemperatureLogitsWarper(0.2),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
        ]
    )

    def probabilities(line: str) -> torch.Tensor:
        ids = tokenizer(line, return_tensors="pt").input_ids
        with torch.no_grad():
            return torch.softmax(chain(ids, model(ids).logits[:, -1].float()), -1)[0]

    # The line whose answer is the least certain.
    line = max(LINES[:30], key=lambda one: int((probabilities(one) > 0.02).sum()))
    chances = probabilities(line)
    expected: Counter[str] = Counter()
    for index in chances.nonzero().flatten().tolist():
        whole = tokenizer.decode([*tokenizer(line).input_ids, index], skip_special_tokens=True)
        # Tokens that are no whole character have one text together.
        expected[whole.removeprefix(line)] += float(chances[index]) * draws
    answers = answered(target, folder, tmp_path, [line] * draws, max_new_tokens="1", seed="7")
    seen = Counter(one["Output"].removeprefix(line) for one in answers)
    assert seen.keys() <= expected.keys()
    large = [text for text, mean in expected.items() if mean >= 5]
    assert len(large) >= 10
    pairs = [(seen[text], expected[text]) for text in large]
    rest = draws - sum(count for count, _ in pairs), draws - sum(mean for _, mean in pairs)
    statistic = sum((count - mean) ** 2 / max(mean, 1.0) for count, mean in [*pairs, rest])
    # Five standard deviations of a chi-squared variable with so many degrees of freedom.
    assert statistic < len(large) + 5 * (2 * len(large)) ** 0.5, (statistic, len(large))


KILLED = """
import os, signal, sys
import torch; torch.set_num_threads(1)
from penstock.cli.infer import journal
from penstock.cli.infer import command
from penstock.cli.infer.command import run_infer
import json
add, most = journal.Journal.add, int(sys.argv[1])
def killing(self, line, record):
    add(self, line, record)
    if len(self) == most:
        # Half of a record, as the end of a process amid a write leaves it.
        self._file.write(b'{"line": 1, "dig'); self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
journal.Journal.add = killing
run_infer(json.loads(sys.argv[2]))
"""


@pytest.mark.parametrize("sampled", [pytest.param(False, marks=pytest.mark.slow), True], ids=["greedy", "sampled"])
def test_a_run_that_was_killed_goes_on_and_leaves_the_same_file(
    target: LocalTarget, folder: Path, tmp_path: Path, sampled: bool
) -> None:
    lines = [*LINES[:30], ""]
    given: dict[str, Any] = {"max_new_tokens": "6", "do_sample": str(sampled).lower(), "temperature": "1.5"}
    # Without --seed a run draws one, and goes on with it.
    given |= {"with_prompt": True} if sampled else {"seed": "3"}
    engine = {name: str(SETTINGS[name]) for name in ("kv_memory", "threads", "tune_seconds", "dtype", "kernels")}
    file = tmp_path / "out" / "answers.json"
    flags = {"base_model": str(folder), "data_file": data_file(tmp_path / "data.txt", lines), **given}
    arguments = [sys.executable, "-c", KILLED, "13", json.dumps({**engine, **flags, "predictions_file": str(file)})]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    journal = file.with_name("answers.json.journal")
    records = [json.loads(one) for one in journal.read_text("utf-8").splitlines()[:-1]]
    assert len(records) == 14
    assert not file.exists()
    whole = answered(target, folder, tmp_path, lines, **given)
    seed = json.loads((tmp_path / "out" / "generation_config.json").read_text())["seed"]
    assert seed == records[0]["settings"]["seed"]
    resumed = file.read_bytes()
    assert not journal.exists()
    again = answered(target, folder, tmp_path, lines, **{**given, "seed": str(seed)})
    assert (again, file.read_bytes()) == (whole, resumed)
    if sampled:
        assert answered(target, folder, tmp_path, lines, **{**given, "seed": "9"}) != whole


def test_only_changed_lines_are_computed_again_and_other_settings_are_refused(
    target: LocalTarget, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that ends amid a run loses nothing of it."""
    asked: list[Any] = []
    answers = target.answers

    def ending(requests: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        for number, answer in enumerate(answers(asked.append(one) or one for one in requests)):
            yield answer if number < 5 else (answer[0], Unavailable("the engine has failed", reason="ENGINE_FAILED"))

    given = {"max_new_tokens": "4", "do_sample": "false"}
    with monkeypatch.context() as patched:
        patched.setattr(target, "answers", ending)
        with pytest.raises(Unavailable):
            answered(target, folder, tmp_path, LINES[:10], **given)
    with pytest.raises(StartupError, match=r"other settings \(options\).*--no-resume"):
        answered(target, folder, tmp_path, LINES[:10], **{**given, "max_new_tokens": "5"})
    path = tmp_path / "out" / "answers.json.journal"
    done = [json.loads(one)["line"] for one in path.read_text("utf-8").splitlines()[1:]]
    assert len(done) == 5
    changed = [f"{line} more" if number == done[0] else line for number, line in enumerate(LINES[:10], 1)]
    asked.clear()
    with monkeypatch.context() as patched:
        patched.setattr(target, "answers", lambda requests: answers(asked.append(one) or one for one in requests))
        found = answered(target, folder, tmp_path, changed, **given)
        assert len(asked) == 6
        assert [one["Input"] for one in found] == changed
        assert answered(target, folder, tmp_path, changed, resume="false", **given) == found


def test_bad_lines_are_reported_and_kept(
    target: LocalTarget, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "word " * (2 * CONTEXT)
    lines = "\n".join(["good", "\udcff\udcfe bad", long, "", "zum Schluß"]).encode("utf-8", "surrogateescape")
    found = answered(target, folder, tmp_path, lines, max_new_tokens="3")
    assert ["Error" in one for one in found] == [False, True, True, False, False]
    assert found[1] == {"Input": "\ufffd\ufffd bad", "Output": "", "Error": "it is not UTF-8"}
    assert found[2]["Input"] == long.strip()
    assert found[4]["Output"].startswith("zum Schluß")
    output = capsys.readouterr()
    assert "3 of 5 lines are answered" in output.out
    assert "line 2: it is not UTF-8" in output.err
    assert "line 3: " in output.err


def test_an_option_that_is_refused_for_every_line_ends_the_run(
    target: LocalTarget, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="num_beams"):
        answered(target, folder, tmp_path, LINES[:3], num_beams="5000")


def test_a_template_without_a_place_for_system_prompts_ends_the_run(
    target: LocalTarget, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target.tokenizer is not None
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages }}"
    strict = target.tokenizer.with_template(template)
    monkeypatch.setattr(target, "tokenizer", strict)
    monkeypatch.setattr(target._generator._requests, "_tokenizer", strict)
    given = {"with_prompt": True, "prompt_template": "chat", "max_new_tokens": "2"}
    with pytest.raises(StartupError, match="--system-prompt ''"):
        answered(target, folder, tmp_path, LINES[:3], **given)
    assert len(answered(target, folder, tmp_path, LINES[:3], system_prompt="", resume="false", **given)) == 3


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"use_vllm": "true", "load_in_8bit": "true"}, "--load-in-8bit"),
        ({"use_vllm": "true", "quantization": "int4"}, "--quantization"),
        ({"use_vllm": "true", "only_cpu": "true"}, "--only-cpu"),
        ({"use_vllm": "true", "interactive": "true"}, "--interactive"),
        ({"use_vllm": "true", "endpoint": "127.0.0.1:1"}, "vllm://HOST:PORT"),
        ({"endpoint": "vllm://127.0.0.1:1", "tls": "true"}, "--tls is for a router"),
        ({"endpoint": "vllm://127.0.0.1:1", "quantization": "int8"}, "--quantization is for a model"),
        ({"load_in_8bit": "true", "load_in_4bit": "true"}, "--load-in-8bit and --load-in-4bit"),
        ({"load_in_8bit": "true", "quantization": "int4"}, "--quantization and --load-in-8bit"),
        ({"use_vllm": "true"}, "needs the package vllm"),
        ({"endpoint": "127.0.0.1:1", "quantization": "int8"}, "--quantization is for a model that is loaded here"),
        ({"endpoint": "127.0.0.1:1", "alpha": "2"}, "--alpha"),
        ({"endpoint": "127.0.0.1:1", "connect_timeout_seconds": "0.1"}, "no server answers"),
        ({"tls": "true"}, "--tls is for an --endpoint"),
        ({"model": "x"}, "--base-model"),
        ({"interactive": "true", "data_file": "x"}, "--interactive reads no --data-file"),
        ({"prompt_template": "alpaca"}, "expected one of auto, llama3, chat, none"),
        ({"temperature": "-1"}, "--temperature"),
        ({"base_model": "/no/such/folder"}, "MODEL"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_refused_names_the_flag(given: dict[str, Any], names: str) -> None:
    with pytest.raises(StartupError) as error:
        run_infer(given)
    assert names in error.value.message


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"data_file": "/no/such"}, "--data-file /no/such: No such file"),
        ({"predictions_file": "/"}, "is a folder"),
        ({"predictions_file": "/dev/null/answers.json"}, "/dev/null is not a folder to write into"),
        ({"temperature": "-1"}, "--temperature"),
        ({"top_p": "2"}, "--top-p"),
        ({"temperature": "-1", "interactive": "true"}, "--temperature"),
    ],
    ids=str,
)
def test_files_and_options_are_checked_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], names: str
) -> None:
    monkeypatch.setattr(infer_command, "LocalTarget", lambda *_: pytest.fail("a model is loaded"))
    with pytest.raises(StartupError) as error:
        run_infer(given)
    assert names in error.value.message


def test_gpus_that_change_nothing_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartupError):
        run_infer({"gpus": "0,1", "data_file": "/no/such"})
    assert "--gpus 0,1 has no effect" in capsys.readouterr().err


def test_files_and_templates_that_cannot_be_used_are_refused(target: LocalTarget, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--data-file /no/such: No such file"):
        LineBatch(config_of(folder, data_file="/no/such", predictions_file=str(tmp_path / "x.json")), target)
    with pytest.raises(StartupError, match="is a folder"):
        LineBatch(config_of(folder, predictions_file=str(tmp_path)), target)
    with pytest.raises(StartupError, match=r"no chat template.*--prompt-template llama3"):
        LineBatch(
            config_of(folder, with_prompt=True, prompt_template="chat", predictions_file=str(tmp_path / "x")), target
        )
    held = LineBatch(config_of(folder, predictions_file=str(tmp_path / "y.json")), target)
    with pytest.raises(StartupError, match="another run writes"):
        LineBatch(config_of(folder, predictions_file=str(tmp_path / "y.json"), seed=str(held._seed)), target)


def test_options_in_the_words_of_vllm() -> None:
    asked = config_of(Path("x")).asked_options()
    assert vllm_options({**asked, "eos_token_id": [1, 2], "stop_strings": ["a"], "echo": True}) == {
        **SCRIPT,
        "max_tokens": 400,
        "stop_token_ids": [1, 2],
        "stop": ["a"],
    }
    assert vllm_options({"do_sample": False}) == {"temperature": 0.0}
    with pytest.raises(StartupError, match="--num-beams does not work with --use-vllm"):
        vllm_options({"num_beams": 2})


def talk(target: LocalTarget, config: InferConfig, *lines: str) -> TypedConversation:
    conversation = TypedConversation(config, target)
    rest = iter(lines)

    def read() -> str:
        with contextlib.suppress(StopIteration):
            return next(rest)
        raise EOFError

    conversation.run(read)
    return conversation


def test_a_conversation_sees_its_turns_and_obeys_its_commands(
    target: LocalTarget,
    folder: Path,
    model: PreTrainedModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_of(folder, do_sample="false", max_new_tokens="5", interactive="true")
    saved = tmp_path / "turns.json"
    talk(
        target, config, "Who is there?", "And who else?", f"!save {saved}", "!status", "!help", "!what", "!set top_q 1"
    )
    (first, second) = json.loads(saved.read_text("utf-8"))
    prompt = written(first["Input"])
    assert scripted(folder, model, prompt, 5).split("assistant\n\n")[1].strip() == first["Output"]
    both = f"{prompt}{first['Output']}<|eot_id|>{written('And who else?').removeprefix(SYSTEM)}"
    assert scripted(folder, model, both, 5).split("assistant\n\n")[2].strip() == second["Output"]
    output = capsys.readouterr()
    assert first["Output"] in output.out
    assert "turns    2; the next one sees 2" in output.out
    assert "!save [FILE]" in output.out
    assert "!what is unknown" in output.err
    assert "!set top_q: is no option" in output.err
    # Cleared, with other options and instructions.
    talk(target, config, "One?", "!clear", "!set max_new_tokens 2", "!set system Be brief.", "Who?", f"!save {saved}")
    (only,) = json.loads(saved.read_text("utf-8"))
    text = written("Who?").replace(SYSTEM_PROMPT, "Be brief.")
    assert scripted(folder, model, text, 2).split("assistant\n\n")[1].strip() == only["Output"]


def test_old_turns_leave_for_the_budget_and_a_question_that_fails_is_forgotten(
    target: LocalTarget, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(folder, max_new_tokens="4", interactive="true", history_tokens="90", seed="1")
    lines = [f"Question number {number}, and it is not short?" for number in range(5)]
    conversation = talk(target, config, *lines, "!status")
    output = capsys.readouterr().out
    assert "old turns are no longer seen" in output
    assert "turns    5; the next one sees" in output
    assert not conversation.has_failed
    conversation = talk(target, config, "word " * (2 * CONTEXT), "Hello?", f"!save {tmp_path / 'turns.json'}")
    assert conversation.has_failed
    assert [one["Input"] for one in json.loads((tmp_path / "turns.json").read_text())] == ["Hello?"]


def test_without_a_template_an_input_is_completed(target: LocalTarget, folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, do_sample="false", max_new_tokens="4", prompt_template="none", interactive="true")
    talk(target, config, "the river", f"!save {tmp_path / 'turns.json'}")
    (turn,) = json.loads((tmp_path / "turns.json").read_text("utf-8"))
    (line,) = answered(target, folder, tmp_path, ["the river"], do_sample="false", max_new_tokens="4")
    assert line["Output"].removeprefix("the river").strip() == turn["Output"]


def test_alpha_scales_the_rotary_base(folder: Path, tmp_path: Path) -> None:
    """As transformers computes with a base of alpha^(d/(d-2)) times, and alpha times the context."""
    config = config_of(folder, alpha="4", do_sample="false", max_new_tokens="8")
    with LocalTarget(config, dict(SETTINGS)) as scaled:
        assert scaled.context == 4 * CONTEXT
        found = answered(scaled, folder, tmp_path, LINES[:20], alpha="4", do_sample="false", max_new_tokens="8")
    reference = reference_model(folder)
    dim = reference.config.head_dim
    rope = reference.config.rope_parameters
    rope["rope_theta"] *= 4 ** (dim / (dim - 2))
    made = type(reference)(reference.config).eval()
    made.load_state_dict(reference.state_dict())
    assert [one["Output"] for one in found] == [scripted(folder, made, line, 8) for line in LINES[:20]]


def test_a_draft_model_changes_nothing_and_an_adapter_does(
    target: LocalTarget, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"do_sample": "false", "max_new_tokens": "8"}
    plain = answered(target, folder, tmp_path, LINES[:10], **given)
    adapter = lora_folder(tmp_path / "adapter", folder, seed=1)
    found: list[list[Any]] = []
    shared = {name: str(SETTINGS[name]) for name in ("kv_memory", "threads", "tune_seconds", "dtype", "kernels")}
    lines = data_file(tmp_path / "data.txt", LINES[:10])
    file = tmp_path / "b.json"
    asked = {**shared, **given, "base_model": str(folder), "data_file": lines, "predictions_file": str(file)}
    assert run_infer({**asked, "assistant_model": str(folder)}) == 0
    found.append(json.loads(file.read_text("utf-8")))
    # The only adapter is the one that is meant.
    assert run_infer({**asked, "lora": [f"odd={adapter}"]}) == 0
    found.append(json.loads(file.read_text("utf-8")))
    assert found[0] == plain
    assert found[1] != plain


class Vllm:
    """Module vllm as far as the command calls it: it answers with the number of ids."""

    class SamplingParams(dict[str, Any]):
        pass

    class LLM:
        def __init__(self, **settings: Any) -> None:
            Vllm.settings = settings

        def generate(self, prompts: list[Any], params: list[Any]) -> list[Any]:
            def output(prompt: Any, param: Any) -> Any:
                text = f" {len(prompt['prompt_token_ids'])} {param['max_tokens']} {param['seed']}"
                return SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason="stop", token_ids=[1])])

            return [output(prompt, param) for prompt, param in zip(prompts, params, strict=True)]

    settings: dict[str, Any]


def test_vllm_gets_prompts_options_and_gpus(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", Vllm)  # type: ignore[arg-type]
    monkeypatch.setattr("penstock.cli.infer.targets.util.find_spec", lambda _: True)
    file = tmp_path / "a.json"
    lines = data_file(tmp_path / "data.txt", LINES[:3])
    asked = {"base_model": str(folder), "data_file": lines, "predictions_file": str(file), "seed": "1"}
    assert run_infer({**asked, "use_vllm": "true", "gpus": "0,1", "dtype": "float16"}) == 0
    assert (Vllm.settings["tensor_parallel_size"], Vllm.settings["dtype"]) == (2, "float16")
    outputs = [one["Output"] for one in json.loads(file.read_text("utf-8"))]
    tokenizer = tokenizer_of(folder)
    for line, output in zip(LINES[:3], outputs, strict=True):
        assert output.startswith(f"{line} {len(tokenizer(line).input_ids)} 400 ")
    assert len({output.rpartition(" ")[2] for output in outputs}) == 3


def test_both_spellings_of_flags_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(command, "run_infer", lambda given: asked.append(given) or 0)
    flags = "--base_model m --tokenizer_path=t --data_file f --with_prompt --load_in_8bit --no_do_sample --gpus 0_1"
    ours = flags.replace("_", "-").replace("0-1", "0_1")
    for spelling in (flags, ours):
        typer.main.get_command(command.commands).main(spelling.split(), standalone_mode=False)
    first, second = asked
    assert first == second
    assert (first["base_model"], first["gpus"], first["load_in_8bit"], first["do_sample"]) == ("m", "0_1", True, False)


@pytest.mark.slow
def test_the_command_in_a_process_and_its_exit_code(tmp_path: Path) -> None:
    """In a process of its own, on the embedded model."""
    lines = data_file(tmp_path / "data.txt", b"The capital of France is\n\xff\n")
    flags = ["--data_file", lines, "--max_new_tokens=4", "--only_cpu", "--load_in_8bit", "--gpus", "", "--seed", "1"]
    flags += ["--predictions_file", str(tmp_path / "a.json"), "--kv-memory", "8MiB", "--tune-seconds", "0"]
    arguments = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "infer",
        *flags,
        "--use_flash_attention_2",
        "--threads",
        "1",
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == SOME_FAILED, done.stderr
    assert "1 of 2 lines are answered" in done.stdout
    assert "--use-flash-attention-2" in done.stderr
    first, second = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert first["Output"].startswith("The capital of France is ")
    assert second["Error"] == "it is not UTF-8"
