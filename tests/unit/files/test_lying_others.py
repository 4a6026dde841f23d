"""Other files that lie, of a model's folder and of the command line: read, or refused by an error that names them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories.engine.model_engine import load_tiny
from factories.models.checkpoints import tiny_checkpoint
from factories.models.draft_heads import eagle3_config, eagle3_folder
from factories.models.lies import Outcomes, damaged, lies, opened, rewrite, safetensors, texts
from factories.models.packed import load, packed, use_packing
from factories.models.run_kernels import cpu_device
from factories.source_tree import ROOT
from penstock.cli.bench.config import BenchConfig
from penstock.cli.bench.dataset import DatasetPrompts
from penstock.cli.download import _check_whole, _checksums
from penstock.cli.infer.journal import Journal
from penstock.cli.infer.targets import scaled_folder
from penstock.cli.inspect_model import _lines, inspect_model
from penstock.cli.trace import read_spans
from penstock.common.checkpoint import demo_folder
from penstock.common.credentials import TokenFile, channel_tls_context, tls_context
from penstock.common.errors import StartupError
from penstock.common.modelscope import CHECKSUMS
from penstock.compat.mindie.model_settings import ModelSettings
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.grammar.grammar_tokenizer import GrammarTokenizer
from penstock.generation.models.eagle3 import load_eagle3
from penstock.generation.models.registry import read_model_config
from penstock.generation.startup.draft_model import _token_ids
from penstock.generation.startup.vocabulary import read_token_tables
from penstock.generation.weights.files import INDEX_FILE, PACKED_FILE
from penstock.tokenizer.bundle import TokenizerBundle, checked
from penstock.tokenizer.load_bundle import check_folder
from penstock.tokenizer.load_process import _limit

TLS = ROOT / "tests" / "factories" / "servers" / "tls"


def some(lying: list[tuple[str, Any]], part: int, parts: int) -> list[tuple[str, Any]]:
    """One of `parts` parts of them."""
    return [lie for number, lie in enumerate(lying) if number % parts == part % parts]


def read_all(path: Path, document: Any, load: Callable[[], object], least: int, *, parts: int = 1, **how: Any) -> None:
    """Load the file of the document, and of every lie about it."""
    outcomes = Outcomes()
    for name, lie in [("as it is", document), *some([*lies(document, **how), *texts(document)], 0, parts)]:
        rewrite(path, lie if isinstance(lie, bytes) else json.dumps(lie).encode())
        outcomes.note(name, load)
    outcomes.check(least)


def small_tokenizer() -> dict[str, Any]:
    """The embedded model's tokenizer.json with fewer words."""
    document: dict[str, Any] = json.loads((demo_folder() / "tokenizer.json").read_text())
    document["model"]["vocab"] = dict(list(document["model"]["vocab"].items())[:4])
    document["model"]["merges"] = document["model"]["merges"][:2]
    return document


def test_tokenizer_json(tmp_path: Path) -> None:
    shutil.copy(demo_folder() / "config.json", tmp_path)
    model = read_model_config(demo_folder())

    def use() -> None:
        check_folder(tmp_path)
        if (found := read_token_tables(tmp_path, model)) is not None:
            found.token_bytes.bytes_of(0)

    read_all(tmp_path / "tokenizer.json", small_tokenizer(), use, 400, parts=3)


def test_tokenizer_json_of_a_draft_model(tmp_path: Path) -> None:
    read_all(tmp_path / "tokenizer.json", small_tokenizer(), lambda: max(_token_ids(tmp_path).values(), default=0), 500)


def test_config_json_of_a_draft_head(tmp_path: Path) -> None:
    model = load_tiny(tiny_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=4))
    folder = eagle3_folder(tmp_path / "head")
    fields = ("eagle_config", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size")
    lying = some([*lies(eagle3_config(), added=fields)], 0, 3)
    outcomes = Outcomes()
    for name, document in lying:
        rewrite(folder / "config.json", json.dumps(document).encode())
        outcomes.note(name, lambda: load_eagle3(folder, model.config, cpu_device(), model.dtype, "none"))
    outcomes.check(100)


def test_tokenizer_config_json(tmp_path: Path) -> None:
    shutil.copy(demo_folder() / "tokenizer.json", tmp_path)
    model = read_model_config(demo_folder())
    values = {
        "added_tokens_decoder": {"1": {"content": "<|im_start|>", "special": True}},
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": "{{ messages }}",
        "model_max_length": 2048,
    }

    def use() -> None:
        check_folder(tmp_path)
        read_token_tables(tmp_path, model)

    read_all(tmp_path / "tokenizer_config.json", values, use, 100, parts=3)


def test_facts_of_a_tokenizer_that_transformers_lets_pass() -> None:
    """They reach requests: a wrong one is told as the service starts."""
    told = {
        "special_tokens": {"bos_token": "<s>"},
        "templates": {"default": "{{ messages }}"},
        "padding_side": "left",
        "truncation_side": "right",
        "pad_token_type_id": 0,
    }
    outcomes = Outcomes(typed=(TypeError,))
    for name, lie in [("as it is", told), *lies(told)]:
        if isinstance(lie, dict) and all(isinstance(lie.get(one, {}), dict) for one in ("special_tokens", "templates")):
            facts = {"special_tokens": {}, "templates": {}, **lie}
            if facts.keys() - {"backend"} <= told.keys():
                outcomes.note(name, lambda facts=facts: checked(TokenizerBundle(backend="", **facts)))
    outcomes.check(100)
    assert outcomes.refused > 50
    for limit, expected in (
        (7, 7),
        (1e30, None),
        (2**40, None),
        (0, None),
        (-1, None),
        (float("nan"), None),
        (None, None),
    ):
        assert _limit(limit) == expected
    for limit in ("7", [], True):
        with pytest.raises(TypeError, match="model_max_length"):
            _limit(limit)


def test_config_json_of_the_fallback(tmp_path: Path) -> None:
    values = json.loads((tiny_checkpoint(tmp_path / "model", "llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text("{}")
    values = {**values, "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    read_all(tmp_path / "config.json", values, lambda: read_model_config(tmp_path), 150, parts=5)


@pytest.mark.parametrize("parts", [12, pytest.param(4, marks=pytest.mark.slow)])
def test_inspect(parts: int, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "qwen2_moe")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, folder)
    values = json.loads((folder / "config.json").read_text())
    values |= {"quantization_config": {"quant_method": "gptq", "bits": 4}, "text_config": {"layer_types": ["x"]}}

    def inspect() -> None:
        facts = inspect_model(str(folder), measures=False)
        json.dumps(facts)
        list(_lines(facts))

    read_all(folder / "config.json", values, inspect, 96 // parts, parts=12 * parts)
    (folder / "config.json").write_text(json.dumps(values))
    small = {**small_tokenizer(), "truncation": None}
    read_all(folder / "tokenizer.json", small, inspect, 96 // parts, parts=8 * parts)
    (folder / "tokenizer.json").write_text(json.dumps(small))
    settings = {"bos_token": "x", "eos_token": {"content": "x"}, "chat_template": "x"}
    read_all(folder / "tokenizer_config.json", settings, inspect, 36 // parts, parts=3 * parts)


def test_a_packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_packing(monkeypatch)
    folder = packed(tiny_checkpoint(tmp_path / "model", "llama"), tmp_path / "packed", quantization="int8")
    content = (folder / PACKED_FILE).read_bytes()
    header, data = opened(content)
    names = ["__metadata__", *[name for name in header if name != "__metadata__"][:3]]
    rest = {name: entry for name, entry in header.items() if name not in names}
    outcomes = Outcomes()
    files = [("as it is", content), *damaged(content, 60, within=len(content) - len(data))]
    for name, lie in some(list(lies({name: header[name] for name in names})), 0, 4):
        files.append((name, safetensors(lie | rest if isinstance(lie, dict) else lie, data)))
    for name, damage in files:
        rewrite(folder / PACKED_FILE, damage)
        outcomes.note(name, lambda: load(folder))
    outcomes.check(200)


def test_model_config(tmp_path: Path) -> None:
    values = {
        "backend_type": "torch",
        "world_size": 1,
        "rank": 0,
        "npu_device_id": 0,
        "local_rank": 0,
        "num_threads": 8,
        "trust_remote_code": False,
        "model_name": "x",
        "inference_mode": None,
        "max_position_embeddings": 100,
        "load_tokenizer": True,
        "tokenizer_path": "x",
        "model_id": "x",
    }
    read_all(tmp_path / "file", values, lambda: ModelSettings.from_file(str(tmp_path / "file")), 400)


def test_a_folder_scaled_by_alpha(tmp_path: Path) -> None:
    values = json.loads((tiny_checkpoint(tmp_path / "model", "llama") / "config.json").read_text())

    def scaled() -> None:
        with scaled_folder(tmp_path / "model", 2.0) as folder:
            read_model_config(folder, ModelRoute("native"))

    read_all(tmp_path / "model" / "config.json", values, scaled, 300, parts=2)


def test_records_of_a_dataset(tmp_path: Path) -> None:
    record = {"prompt": "x", "output_tokens": 3}
    conversation = {"messages": [{"role": "user", "content": "x"}, {"from": "gpt", "value": "y"}]}
    path = tmp_path / "records.json"
    read_all(path, [record, conversation, "x"], lambda: DatasetPrompts(BenchConfig(), str(path)), 400, of_lists=3)
    lines = tmp_path / "records.jsonl"
    read_all(lines, record, lambda: DatasetPrompts(BenchConfig(), str(lines)), 100)


def test_spans_of_a_trace(tmp_path: Path) -> None:
    span = {
        "traceId": "1" * 32,
        "spanId": "2" * 16,
        "name": "x",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        "attributes": [{"key": "a", "value": {"intValue": "1"}}],
        "status": {"code": 2},
    }
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "x"}}]}
    document = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]}
    read_all(tmp_path / "file", document, lambda: read_spans(str(tmp_path / "file")), 500)


def test_a_journal_of_an_interrupted_run(tmp_path: Path) -> None:
    settings = {"model": "x"}
    path = tmp_path / "out.journal"
    begin = json.dumps({"penstock_infer": 1, "settings": settings}).encode() + b"\n"
    record = {"line": 1, "digest": "x", "text": "y"}
    outcomes = Outcomes()

    def resume() -> None:
        Journal.settings_in(tmp_path / "out")
        journal = Journal(tmp_path / "out", settings, resume=True)
        try:
            journal.has(SimpleNamespace(number=1, digest="x"))  # type: ignore[arg-type]
        finally:
            journal.close()

    for name, lie in [("as it is", record), *lies(record), *texts(record)]:
        rewrite(path, begin + (lie if isinstance(lie, bytes) else json.dumps(lie).encode()) + b"\n")
        outcomes.note(name, resume)
    for name, lie in [*lies(json.loads(begin)), *texts(json.loads(begin))]:
        rewrite(path, (lie if isinstance(lie, bytes) else json.dumps(lie).encode()) + b"\n")
        outcomes.note(name, resume)
    outcomes.check(200)


def test_lists_of_a_download(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "x.safetensors"}}
    read_all(tmp_path / INDEX_FILE, index, lambda: _check_whole(tmp_path, "a/b"), 50)
    (tmp_path / INDEX_FILE).unlink()
    (tmp_path / "x").write_text("x")
    read_all(tmp_path / CHECKSUMS, {"x": "0" * 64}, lambda: _checksums(tmp_path), 50)


def test_token_files_and_certificates(tmp_path: Path) -> None:
    """A token is any bytes; certificates and keys are refused by their flag."""
    outcomes = Outcomes()
    path = tmp_path / "tokens"
    for content in (b"a", b"", b"\0", b"\xff\xfe", b"\n" * 9, b"a" * 1_000_000, b"\xe2\x80\xa8", b"a\rb"):
        path.write_bytes(content)
        outcomes.note(str(content[:9]), lambda: TokenFile(str(path), "--auth-token-file").accepts("Bearer x"))
    whole = {name: (TLS / name).read_bytes() for name in ("server.pem", "server.key", "ca.pem")}
    for name in whole:
        for label, content in [
            ("as it is", whole[name]),
            *damaged(whole[name], 30),
            ("empty", b""),
            ("NULs", bytes(99)),
        ]:
            for other, found in whole.items():
                rewrite(tmp_path / other, content if other == name else found)
            places = [str(tmp_path / one) for one in ("server.pem", "server.key", "ca.pem")]
            server = SimpleNamespace(tls_cert=places[0], tls_key=places[1], tls_client_ca=places[2])
            client = SimpleNamespace(
                channel_tls=True, channel_tls_ca=places[2], channel_tls_cert=places[0], channel_tls_key=places[1]
            )
            outcomes.note(f"{name}: {label}", lambda server=server: tls_context(server))
            outcomes.note(f"{name}: {label}", lambda client=client: channel_tls_context(client))
    outcomes.check(300)


def test_a_vocabulary_of_grammars(tmp_path: Path) -> None:
    """It is read in a process that compiles constraints, which must not end by a panic."""
    vocabulary = read_model_config(demo_folder()).vocab_size
    document = small_tokenizer()
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    assert len(GrammarTokenizer(tmp_path, vocabulary).native.greedy_tokenize("a") or [0])
    path.write_text("{")
    with pytest.raises(StartupError):
        check_folder(tmp_path)
