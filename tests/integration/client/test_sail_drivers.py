"""Programs written for Sophon SAIL run with the import changed alone, also where no server is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import penstock_client.sail as sail
import pytest
from factories.engine.local_generators import local_generator
from factories.models.checkpoints import tiny_checkpoint
from factories.models.gguf_converter import convert
from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock_client.compat.sail import EngineLLM

PROMPT = [5, 6, 7, 8, 9]
# The first program of the EngineLLM document.
DOCUMENT = """
import sophon.sail as sail
import os
if __name__ == '__main__':
    bmodel_path = "example_8dev.bmodel"
    dev_ids = [i for i in range(8)]
    engine1 = sail.EngineLLM(bmodel_path, dev_ids)
    file = open(bmodel_path,"rb")
    datas = file.read()
    file_size = os.path.getsize(bmodel_path)
    engine2 = sail.EngineLLM(datas, file_size, dev_ids)
    llm_bmodel_path = "llama.bmodel"
    flag = sail.BmrtFlag.BM_RUNTIME_SHARE_MEM
    engine3 = sail.EngineLLM(llm_bmodel_path, flag, dev_ids)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of models in this process, which variables set as anywhere."""
    for name, value in {"KV_MEMORY": "8MiB", "THREADS": "1", "TUNE_SECONDS": "0", "GRAPH_LENGTHS": "16,32"}.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    monkeypatch.setenv("PENSTOCK_DTYPE", "float32")


@pytest.mark.filterwarnings("ignore:the model runs on device")
def test_the_documents_first_program_makes_three_engines(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("example_8dev.bmodel", "llama.bmodel"):
        Path(name).write_bytes(EngineLLM.archive(folder))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(DOCUMENT.replace("import sophon.sail as sail", "import penstock_client.sail as sail"), names)
    engines = [names[f"engine{number}"] for number in (1, 2, 3)]
    try:
        found = []
        for engine in engines:
            graph = engine.get_graph_names()[0]
            inputs, outputs = engine.get_input_tensors(graph), engine.get_output_tensors(graph)
            assert engine.process(graph, inputs, outputs) == 0
            found.append(outputs[0].asnumpy())
        assert np.array_equal(found[0], found[1])
        assert np.array_equal(found[0], found[2])
        assert engines[2].flags is sail.BmrtFlag.BM_RUNTIME_SHARE_MEM
        engines[1].close()
        assert engines[0].process(graph, {0: np.array([[5]])}, {}) == 0
    finally:
        names["file"].close()
        for engine in engines:
            engine.close()


def test_fresh_tensors_are_valid_inputs_of_every_graph(folder: Path) -> None:
    with sail.EngineLLM(str(folder), [0]) as engine:
        for graph in engine.get_graph_names():
            for inputs in (engine.get_input_tensors(graph), engine.get_input_tensors_addrmode0(graph)):
                assert engine.process(graph, inputs, engine.get_output_tensors_addrmode0(graph)) == 0, graph
            largest = engine.create_max_input_tensors(graph)
            for index, tensor in largest.items():
                assert tensor.shape() == engine.get_input_max_shape(graph, index)
            for index, tensor in engine.create_max_output_tensors(graph).items():
                assert tensor.shape() == engine.get_output_max_shape(graph, index)


class Driver:
    """A whole generation as drivers of SAIL write it: views, memory of the largest shapes, bits of 16-bit numbers."""

    def __init__(self, path: str) -> None:
        sail.set_loglevel(sail.LogLevel.WARN)
        self.handle = sail.Handle(0)
        assert isinstance(self.handle.get_target(), str)
        self.engine = sail.EngineLLM(path, [0])
        self.layers = (len(self.engine.get_graph_names()) - 5) // 2
        _, self.most, self.hidden = self.engine.get_input_tensors("block_0")[0].shape()
        _, _, self.heads, self.size = self.engine.get_input_tensors("block_cache_0")[3].shape()
        self.past = [
            [self.like(self.engine.get_input_tensors(f"block_cache_{layer}")[place]) for place in (3, 4)]
            for layer in range(self.layers)
        ]
        self.states = self.engine.create_max_output_tensors("embedding")[0]
        self.state = self.engine.create_max_output_tensors("embedding_cache")[0]
        self.logits = self.engine.create_max_output_tensors("lm_head")[0]
        self.token = self.engine.get_output_tensors("greedy_head")[0]

    def like(self, tensor: Any) -> sail.Tensor:
        return sail.Tensor(self.handle, tensor.shape(), tensor.dtype(), False, True)

    def first(self, ids: list[int]) -> int:
        length = self.length = len(ids)
        rows = length + 1
        given = self.engine.create_max_input_tensors("embedding")[0]
        tokens = sail.Tensor(given, [1, rows], 0)
        tokens.update_data(np.array([[*ids, 0]], np.int32))
        states = sail.Tensor(self.states, [1, rows, self.hidden], 0)
        self.engine.process("embedding", {0: tokens}, {0: states}, [])
        places, mask = self.like(tokens), sail.Tensor(self.handle, [1, 1, rows, rows], sail.Dtype.BM_FLOAT32)
        places.update_data(np.arange(rows, dtype=np.int32).reshape(1, rows))
        seen = np.where(np.tri(rows, dtype=bool), 0.0, -10000.0).astype("f4")
        seen[length:] = -10000.0
        mask.update_data(seen.reshape(1, 1, rows, rows).view(np.uint16))
        for layer, past in enumerate(self.past):
            shape = [1, rows, self.heads, self.size]
            outputs = {0: states, **{1 + place: sail.Tensor(one, shape, 0) for place, one in enumerate(past)}}
            self.engine.process(f"block_{layer}", {0: states, 1: places, 2: mask}, outputs)
        last = sail.Tensor(self.states, [1, 1, self.hidden], (length - 1) * self.hidden)
        return self.head(last)

    def next(self) -> int:
        self.length += 1
        self.engine.process("embedding_cache", {0: self.token}, {0: self.state}, core_list=[0])
        place = sail.Tensor(self.handle, [1, 1], sail.Dtype.BM_INT32)
        place.update_data(np.array([[self.length - 1]], np.int32))
        mask = sail.Tensor(self.handle, [1, 1, 1, self.most + 1], sail.Dtype.BM_FLOAT32)
        seen = np.zeros(self.most + 1, "f4")
        seen[self.length - 1 : self.most] = -10000.0
        mask.update_data(seen.reshape(1, 1, 1, -1).view(np.uint16))
        row, each = [1, 1, self.heads, self.size], self.heads * self.size
        for layer, past in enumerate(self.past):
            inputs = {0: self.state, 1: place, 2: mask, 3: past[0], 4: past[1]}
            views = {1 + at: sail.Tensor(one, row, (self.length - 1) * each) for at, one in enumerate(past)}
            self.engine.process(f"block_cache_{layer}", inputs, {0: self.state, **views})
        return self.head(self.state)

    def head(self, state: Any) -> int:
        assert state.shape() == [1, 1, self.hidden]
        self.engine.process("lm_head", {0: state}, {0: self.logits})
        self.engine.process("greedy_head", {0: self.logits}, {0: self.token})
        return int(self.token.asnumpy())


@pytest.mark.parametrize("form", ["folder", "tar", "gguf"])
def test_a_driver_gets_the_tokens_that_generate_gives(folder: Path, tmp_path: Path, form: str) -> None:
    path = folder
    if form == "tar":
        path = tmp_path / "model.bmodel"
        path.write_bytes(EngineLLM.archive(folder))
    elif form == "gguf":
        # By its first bytes: drivers name their model as they like.
        path = convert(folder, tmp_path / "model.gguf", "qwen2", quantised=False).rename(tmp_path / "model.bmodel")
    with local_generator(folder, load_tokenizer=False) as generator:
        wanted = generator.generate(PROMPT, max_new_tokens=8, do_sample=False, ignore_eos=True).token_ids
    driver = Driver(str(path))
    try:
        assert [driver.first(PROMPT), *(driver.next() for _ in range(7))] == wanted
    finally:
        driver.engine.close()


def test_a_view_shares_memory_here_and_is_carried_back_to_the_service(folder: Path) -> None:
    handle = sail.Handle(0)
    whole = sail.Tensor(handle, np.arange(12, dtype="f4").reshape(3, 4))
    view = sail.Tensor(whole, [1, 4], 4)
    assert view.asnumpy().tolist() == [[4, 5, 6, 7]]
    view.update_data(np.full((1, 4), -1, "f4"))
    assert whole.asnumpy()[1].tolist() == [-1] * 4
    for shape, offset in (([4], 9), ([4], -1), ([13], 0)):
        with pytest.raises(ValueError, match="the tensor has 12 elements"):
            sail.Tensor(whole, shape, offset)
    with pytest.raises(TypeError, match="whole number of elements"):
        sail.Tensor(whole, [4], 1.5)  # type: ignore[arg-type]
    with sail.EngineLLM(str(folder), [0]) as engine:
        there = engine.get_output_tensor("embedding", 0)
        width = there.shape()[-1]
        there.update_data(np.zeros(there.shape(), "f4"))
        second = sail.Tensor(there, [1, 1, width], width)
        assert engine.process("embedding_cache", {0: np.array([[7]])}, {0: second}) == 0
        wanted = engine.get_output_tensors_addrmode0("embedding_cache")[0]
        engine.process("embedding_cache", {0: np.array([[7]])}, {0: wanted})
        rows = there.asnumpy().reshape(-1, width)
        assert np.array_equal(rows[1], wanted.asnumpy().reshape(-1))
        assert not rows[0].any()
        assert not rows[2:].any()


@pytest.mark.parametrize("name", [one.name for one in sail.LogLevel])
def test_every_level_of_the_log_is_taken(name: str) -> None:
    assert sail.set_loglevel(sail.LogLevel[name]) == 0
    sail.set_loglevel(sail.LogLevel.INFO)


def test_what_is_no_model_is_named_by_its_path(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="model: nothing/here is no folder and no file"):
        EngineLLM("nothing/here", [0])
    other = tmp_path / "other.bmodel"
    other.write_bytes(os.urandom(4096))
    with pytest.raises(FailedPrecondition, match=f"model: {other} is neither a GGUF file nor a tar"):
        EngineLLM(str(other), [0])
    with pytest.raises(FailedPrecondition, match="model: the bytes is neither a GGUF file nor a tar"):
        EngineLLM(b"something else entirely", 23, [0])
    with EngineLLM(folder, [0]) as engine:
        with pytest.raises(TypeError, match="input: must be a mapping of indices to tensors, found None"):
            engine.process("embedding", None, None)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="inputs"):
            engine.process("block_0", {}, {})
