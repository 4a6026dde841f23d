"""The file of models: what it says, and that each mistake is told by its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.common.errors import StartupError
from penstock.router.models_file import ModelEntry, ModelsFile, read_models

ONE = '[[models]]\nname = "a"\ntokenizer = ["t:1"]\nbackends = ["b:1"]\n'
ON_DEMAND = 'slots = ["s:1"]\n' + ONE.replace('backends = ["b:1"]', 'path = "x"')


def read(tmp_path: Path, text: str, max_models: int = 8) -> ModelsFile:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return read_models(str(path), max_models)


def test_a_file_says_names_shares_and_addresses(tmp_path: Path) -> None:
    text = """
    default = "chat"
    slots = ["s:1", "s:2"]
    memory = "2GiB"

    [[models]]
    name = "v1"
    aliases = ["chat", "gpt"]
    weight = 9
    tokenizer = ["t:1", "t:2"]
    backends = ["b:1"]

    [[models]]
    name = "cold"
    tokenizer = ["t:3"]
    path = "folder"
    memory = "1GiB"
    options = {quantization = "int8"}
    """
    warm = ModelEntry(name="v1", aliases=("chat", "gpt"), weight=9.0, tokenizer=("t:1", "t:2"), backends=("b:1",))
    cold = ModelEntry(name="cold", tokenizer=("t:3",), path="folder", memory=1 << 30, options={"quantization": "int8"})
    assert read(tmp_path, text) == ModelsFile(models=(warm, cold), default="chat", slots=("s:1", "s:2"), memory=2 << 30)
    assert cold.is_on_demand
    assert not warm.is_on_demand


def test_backends_may_be_other_engines_and_services(tmp_path: Path) -> None:
    backends = ("vllm://b:1", "k8s://models/b:grpc", "vllm+k8s://b:8000")
    text = ONE.replace('["b:1"]', str(list(backends)).replace("'", '"'))
    assert read(tmp_path, text).models[0].backends == backends
    with pytest.raises(StartupError, match=r"models\[0\].tokenizer: 'k8s://t:1' is not host:port"):
        read(tmp_path, ONE.replace('"t:1"', '"k8s://t:1"'))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models = 3", "models: must be a list"),
        ("", "models: there must be at least one"),
        ("[[models]\n", "is not TOML"),
        ("memory = " + "9" * 5000, "is not TOML"),
        ("memory = " + "[" * 5000, "is nested too deep"),
        ("memory = inf\n" + ONE, "memory: must be a size"),
        (ONE + "weight = 1" + "0" * 400, r"models\[0\].weight: must be a number"),
        (ONE + "wieght = 2\n", r"models\[0\].wieght: is unknown"),
        ("port = 1\n" + ONE, "port: is unknown"),
        (ONE + ONE, "models: has the name a twice"),
        (ONE.replace('"a"', '"a b"'), r"models\[0\].name: must be"),
        (ONE.replace('tokenizer = ["t:1"]\n', ""), r"models\[0\].tokenizer: needs"),
        (ONE.replace('"t:1"', '"t"'), r"models\[0\].tokenizer: 't' is not host:port"),
        (ONE.replace('backends = ["b:1"]\n', ""), r"models\[0\].backends: or `path` must be set"),
        (ONE + 'path = "x"\n', r"models\[0\].backends: or `path` must be set, and not both"),
        (ONE.replace('backends = ["b:1"]', 'path = "x"'), r"models\[0\].path: needs `slots`"),
        (ONE + "options = {dtype = 'bfloat16'}\n", r"models\[0\].options: are for a model with `path`"),
        (ON_DEMAND + "options = {dtpye = 'bfloat16'}\n", r"models\[0\].options: must be those of LoadModel"),
        (ON_DEMAND + "options = {max_context = 'long'}\n", r"models\[0\].options: must be those of LoadModel"),
        ("memory = 1\n" + ON_DEMAND + "memory = 2\n", "memory: is less than a takes alone"),
        (ONE + "weight = -1\n", r"models\[0\].weight: must be a number"),
        (ONE + "weight = true\n", r"models\[0\].weight: must be a number"),
        (ONE + "memory = 'much'\n", r"models\[0\].memory: must be a size"),
        (ONE + "aliases = ['x']\nweight = 0\n", "models: no model with the alias x has a weight above 0"),
        (ONE + "aliases = ['a']\n", "models: has a as a name and as an alias"),
        ("default = 'x'\n" + ONE, "default: is x, which no model has"),
        (ONE + ONE.replace('"a"', '"c"'), "models: has b:1 twice"),
        ("models = [3]", r"models\[0\]: must be a table"),
    ],
)
def test_a_mistake_is_told_by_its_key(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(StartupError, match=told) as refused:
        read(tmp_path, text)
    assert refused.value.flag == "--models"


def test_the_number_of_models_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="are 1, and --max-models allows 0"):
        read(tmp_path, ONE, max_models=0)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        read_models(str(tmp_path / "none.toml"), 1)
