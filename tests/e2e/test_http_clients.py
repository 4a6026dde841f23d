"""Unmodified clients of OpenAI's HTTP against the gateway of a running tree, each in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from factories.servers.stack import START_TIMEOUT, Process, free_port, start

pytestmark = pytest.mark.clients
PROGRAMS = Path(__file__).resolve().parents[1] / "clients" / "http"
# litellm 1.106 imports mcp for tools, and does not ask for it.
CLIENTS = {"litellm": ("litellm>=1.80,<2", "mcp"), "langchain": ("langchain-openai>=1,<2",)}
DEMO = Path(__file__).resolve().parents[2] / "services" / "penstock" / "assets" / "demo"
NODE = "openai-node"
QUESTION = "What is a penstock?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Base of OpenAI's paths of `penstock serve` with the demo model."""
    port = free_port()
    tree = start(None, "--http-port", str(port))
    try:
        _wait_ready(f"http://127.0.0.1:{port}/readyz", tree)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        tree.terminate()
        tree.log.unlink(missing_ok=True)


def _wait_ready(address: str, tree: Process) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        assert tree.popen.poll() is None, tree.output()
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise AssertionError(tree.output())


def _run(command: list[str], **options: Any) -> str:
    """Standard output of a program that must end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _installed(name: str, command: list[str], folder: Path) -> None:
    """Install a client, or skip."""
    if shutil.which(command[0]) is None or subprocess.run(command, check=False, timeout=900, cwd=folder).returncode:
        pytest.skip(f"{name} cannot be installed; last run recorded in docs/learn/testing.md")


def _python(name: str, packages: Iterable[str], folder: Path) -> str:
    """Python of a new environment with packages."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    _installed(name, [python, "-m", "pip", "install", "-q", *packages], folder)
    return python


@pytest.fixture(scope="module", params=[*CLIENTS, NODE])
def seen(request: pytest.FixtureRequest, url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of a client's program."""
    name, folder = str(request.param), tmp_path_factory.mktemp(request.param)
    asked = [url, QUESTION, json.dumps(TOOL)]
    if name == NODE:
        program = shutil.copy(PROGRAMS / f"{name}_client.mjs", folder)
        (folder / "package.json").write_text('{"private": true}')
        _installed(name, ["npm", "install", "--silent", "openai@6"], folder)
        command = ["node", str(program), *asked]
    else:
        command = [_python(name, CLIENTS[name], folder), "-I", str(PROGRAMS / f"{name}_client.py"), *asked]
    answer: dict[str, Any] = json.loads(_run(command).splitlines()[-1])
    return answer


def test_an_answer_is_that_of_the_plain_api(seen: dict[str, Any], url: str) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16, "temperature": 0}
    plain = _asked(f"{url}/chat/completions", body)
    assert seen["text"] == "".join(seen["pieces"]) == plain["choices"][0]["message"]["content"]
    assert len([piece for piece in seen["pieces"] if piece]) > 2
    assert seen["usage"] == [plain["usage"]["prompt_tokens"], 16]


def test_a_forced_call_comes_with_its_arguments(seen: dict[str, Any]) -> None:
    name, arguments = seen["call"]
    assert name == "get_weather"
    assert arguments["city"] in ("Oslo", "Paris")


def test_a_refusal_names_its_field(seen: dict[str, Any]) -> None:
    assert "max_" in seen["refused"]
    assert "tokens" in seen["refused"]


def test_a_client_made_from_the_openapi_document_chats(url: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("made")
    packages = ("openapi-python-client>=0.29,<0.30", "openapi-spec-validator>=0.7,<1", "ruff")
    python = Path(_python("openapi-python-client", packages, folder / "venv"))
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/openapi.json", timeout=60) as answer:
        (folder / "openapi.json").write_bytes(answer.read())
    (folder / "settings.yml").write_text("package_name_override: made\n")
    _run([str(python.with_name("openapi-spec-validator")), "openapi.json"], cwd=folder)
    maker = [str(python.with_name("openapi-python-client")), "generate", "--path", "openapi.json", "--meta", "none"]
    # With warnings some routes would be missing.
    maker += ["--output-path", "made", "--config", "settings.yml", "--fail-on-warning"]
    # It calls ruff.
    told = _run(maker, cwd=folder, env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"})
    program = [str(python), str(PROGRAMS / "made_client.py"), url, QUESTION]
    seen = json.loads(_run(program, env={**os.environ, "PYTHONPATH": str(folder)}))
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16, "temperature": 0}
    plain = _asked(f"{url}/chat/completions", body)
    text = plain["choices"][0]["message"]["content"]
    assert [seen["text"], seen["message"], seen["response"]] == [text] * 3, told
    assert seen["usage"] == [plain["usage"]["prompt_tokens"], 16]
    assert (seen["completion"], seen["models"]) == (4, ["penstock-demo"])
    assert seen["tokens"] == _asked(f"{url.removesuffix('/v1')}/tokenize", {"prompt": QUESTION})["tokens"]
    assert "max_tokens" in seen["refused"]


ITEMS = [
    {"q": "Penstock serves", "options": ["generate()", "soup", "nothing"], "right": 0},
    {"q": "A penstock carries", "options": ["letters", "water"], "right": 1},
    {"q": "The router speaks", "options": ["gRPC", "French", "slowly"], "right": 0},
]
CHOICES = """task: penstock_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: options
doc_to_target: right
metric_list: [{{metric: acc}}]
"""
CONTINUED = """task: penstock_continued
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{options[right]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def test_lm_eval_has_the_services_own_scores_and_continuations(
    url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lm-eval")
    python = _python("lm-eval", ("lm-eval[api]>=0.4.9,<0.5", "transformers>=5,<6"), folder)
    data = folder / "items.jsonl"
    data.write_text("\n".join(json.dumps(item) for item in ITEMS))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, text in (("choices", CHOICES), ("continued", CONTINUED)):
        (tasks / f"{name}.yaml").write_text(text.format(data=data))
    made = f"model=penstock-demo,base_url={url}/completions,num_concurrent=2,tokenizer={DEMO},max_retries=1"
    command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", made]
    command += ["--tasks", "penstock_choices,penstock_continued", "--include_path", str(tasks)]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    _run(command, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")})
    samples = {
        name: [json.loads(line) for line in next(folder.glob(f"out/**/samples_penstock_{name}_*")).open()]
        for name in ("choices", "continued")
    }
    for sample in samples["choices"]:
        item = sample["doc"]
        scored = _asked(f"{url}/score", {"prompt": item["q"], "continuation": [f" {one}" for one in item["options"]]})
        ours = [one["score"] for one in scored["data"]]
        assert [float(resp[0][0]) for resp in sample["resps"]] == pytest.approx(ours, abs=1e-3)
    for sample in samples["continued"]:
        body = {"prompt": sample["doc"]["q"], "max_tokens": 12, "temperature": 0, "stop": ["."]}
        assert sample["resps"][0][0] == _asked(f"{url}/completions", body)["choices"][0]["text"]


SERVE = """from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())"""


def test_vllm_bench_serve(url: str, tmp_path: Path) -> None:
    python = Path("~/.cache/penstock/vllm-venv/bin/python").expanduser()
    if not python.exists():
        pytest.skip("no vLLM: make peers; last run recorded in docs/learn/testing.md")
    # `vllm bench serve` asks for metadata of a distribution that the one for CPUs has under another name.
    command = [str(python), "-c", SERVE, "--base-url", url.removesuffix("/v1"), "--model", "penstock-demo"]
    command += ["--tokenizer", str(DEMO), "--dataset-name", "random", "--num-prompts", "12", "--random-input-len", "24"]
    command += ["--random-output-len", "8", "--max-concurrency", "4", "--ignore-eos", "--save-result"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "result.json"]
    _run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (12, 96)
    assert result["mean_ttft_ms"] > 0


def _asked(address: str, body: Any) -> Any:
    asked = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)
