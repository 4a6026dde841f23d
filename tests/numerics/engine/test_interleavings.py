"""Whatever happens beside it, a request gives what it gives alone, and leaves nothing behind.

A model of the engine's callers draws what happens next: requests of every mode, with adapters that come, go and are
replaced, aborts, deadlines, caches that are cleared, blocks that are copied, swapped and claimed, named sequences in
the same pool, and weights that are read again between two drains.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import Answer, collect, engine_config, run
from factories.engine.host_pools import HOSTS, AnyPolicy, host_fields
from factories.engine.mixed import Draw, drafted, mixed_request, structured, textual
from factories.engine.modes import ROOMY, load_service, new_engine, prepare, to_message
from factories.engine.pools import spoil, unwritten_host_pool
from factories.models.adapters import LAYER_TARGETS, lora_folder, read_adapter
from factories.models.golden_models import golden_checkpoint
from factories.models.run_kernels import cpu_device, new_runner
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import (
    DeadlineExceeded,
    Internal,
    NotFound,
    PenstockError,
    ResourceExhausted,
)
from penstock.generation.adapters.adapter_limits import AdapterLimits
from penstock.generation.adapters.peft_folder import PeftFolder
from penstock.generation.adapters.store import AdapterStore
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.request import Request, RequestOutput
from penstock.generation.engine.block_commands import BlockCommands
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine
from penstock.generation.grammar.matcher_state import MaskWorkers
from penstock.generation.graphs.graph import GraphStage
from penstock.generation.graphs.graph_limits import GraphLimits
from penstock.generation.graphs.graph_runner import GraphCall, GraphRunner
from penstock.generation.graphs.model_access import describe_graphs
from penstock.generation.graphs.sequences import PoolSequence, SequenceBlocks
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.options.score_embed_commands import (
    EmbedCommand,
    ScoreCommand,
    ScoreItem,
    embed_requests,
    score_requests,
)
from penstock.generation.startup.loaded_model import LoadedModel

Spec = dict[str, Any]
# Names that adapters may have, and how many of them are in memory at once.
NAMES, SLOTS = ("a", "b", "c"), 2
# Blocks behind the engine's, of named sequences.
FURTHER = 24
TOLERANCE = 2e-4
_GRAPH_LIMITS = GraphLimits(
    stages=(GraphStage(1, 64),),
    max_graph_call_bytes=1 << 24,
    max_graph_streams=4,
    max_graph_tensors=8,
    max_graph_tensor_bytes=1 << 24,
    max_graph_leases=4,
    retry_seconds=1.0,
)


@dataclasses.dataclass(frozen=True)
class Served:
    """Two models of one shape, which a reload puts in place of each other, and adapters for both."""

    models: tuple[LoadedModel, LoadedModel]
    adapters: tuple[Path, ...]
    draw: Callable[[Random], Spec]


def _served(folder: Path, first: Path, second: Path, draft: Path, extra: Callable[[str], dict[str, Draw]]) -> Served:
    """`extra` gives further modes, for the draft model's name."""
    loaded = load_service(first, assistant_model=str(draft), assistant_kv_memory="2MiB")
    weights = dataclasses.replace(loaded.weights, model=load_model(second, dtype="float32", device=cpu_device()))
    other = dataclasses.replace(loaded, weights=weights)
    targets = (LAYER_TARGETS, ("q_proj", "v_proj"), (*LAYER_TARGETS, "lm_head", "embed_tokens"), ("down_proj",))
    adapters = tuple(
        lora_folder(folder / f"lora-{number}", first, rank=4 << number % 3, seed=number, targets=names, strength=0.2)
        for number, names in enumerate(targets)
    )
    modes = extra(loaded.served.assistant_model)
    return Served((loaded, other), adapters, lambda random: mixed_request(random, modes))


def _random(folder: Path, kind: str) -> Served:
    torch.set_num_threads(1)
    first, second, draft = (
        golden_checkpoint(folder / name, kind, noise=noise)
        for name, noise in (("model", 0.0), ("other", 0.3), ("draft", 0.05))
    )
    return _served(folder, first, second, draft, lambda name: {"drafted": drafted(name)})


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return _random(tmp_path_factory.mktemp("models"), "golden-qwen2")


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Eight layers, so that DoLa has some to contrast."""
    return _random(tmp_path_factory.mktemp("deep"), "golden-deep")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.set_num_threads(1)
    folder, own = tmp_path_factory.mktemp("models"), demo_folder()
    # No second checkpoint of its shape: a reload reads the same weights.
    return _served(
        folder,
        own,
        own,
        own,
        lambda name: {"structured": structured(name), "drafted": drafted(name), "textual": textual},
    )


def message(spec: Spec) -> Any:
    return to_message(spec["prompt"], {name: value for name, value in spec.items() if name not in ("prompt", "kind")})


def make(loaded: LoadedModel, spec: Spec) -> Request:
    """Make the request of a spec, without adapter."""
    match spec.get("kind"):
        case "score":
            item = ScoreItem(spec["prompt"][:2], spec["prompt"][2:])
            return score_requests(ScoreCommand([item], cache_salt=spec["cache_salt"]), 0.0, None)[0]
        case "embed":
            return embed_requests(EmbedCommand([spec["prompt"]], cache_salt=spec["cache_salt"]), 0.0, None)[0]
        case _:
            return prepare(loaded, message(spec))


def refusal(call: Callable[[], object]) -> str:
    """Return the reason for which a call was refused; empty: it was not."""
    try:
        call()
    except PenstockError as error:
        return error.reason
    return ""


class Alone:
    """Answer of each request on an engine of its own."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._answers: dict[tuple[int, Path | None, str], Answer] = {}

    def __call__(self, model: int, adapter: Path | None, spec: Spec) -> Answer:
        key = (model, adapter, json.dumps(spec, sort_keys=True))
        if key not in self._answers:
            loaded = self._served.models[model]
            item = make(loaded, spec)
            item.adapter = None if adapter is None else read_adapter(adapter, loaded.weights.model)
            self._answers[key] = run(new_engine(loaded, ROOMY), item)[item.request_id]
        return self._answers[key]


@dataclasses.dataclass(eq=False)
class Named:
    """A named sequence: its first tokens are the prompt."""

    prompt: list[int]
    sequence: PoolSequence
    tokens: list[int]


class World:
    """An engine with all that its callers may do."""

    def __init__(self, served: Served, config: EngineConfig, random: Random) -> None:
        self.served = served
        self.random = random
        self.now = 0.0
        self.model = 0
        loaded = served.models[0]
        facts = loaded.weights.model.config
        self.kv = KVCachePool(
            facts.num_layers,
            config.num_blocks,
            config.block_size,
            facts.num_kv_heads,
            facts.head_dim,
            loaded.weights.model.dtype,
            loaded.weights.model.device,
            num_further_blocks=FURTHER,
        )
        spoil(self.kv)
        self.host = unwritten_host_pool(self.kv, config)
        masks = MaskWorkers(facts.vocab_size, 1)
        self.runner = new_runner(loaded.weights.model, self.kv, masks=masks, host=self.host)
        self.drafter = loaded.engine.draft.drafter if loaded.engine.draft is not None else None
        if self.drafter is not None:
            self.drafter.clear()
        self.engine = Engine(
            config, self.runner, loaded.files.token_bytes, drafter=self.drafter, clock=lambda: self.now
        )
        self.engine.policy = AnyPolicy(config, random)
        self.store = AdapterStore(
            AdapterLimits(max_adapters=SLOTS, max_known_adapters=len(NAMES)), self._opener(loaded.weights.model)
        )
        self.known: dict[str, Path] = {}
        self.answers: dict[str, Answer] = {}
        # Request -> what it is: (model, adapter, spec, request).
        self.items: dict[str, tuple[int, Path | None, Spec, Request]] = {}
        self.live: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.named: list[Named] = []
        # With the model that they were of.
        self.ended_named: list[tuple[int, Named]] = []
        # Blocks that are claimed, and what is in them.
        self.claimed: dict[int, float] = {}
        self.claimed_on_host: dict[int, float] = {}
        self.seen: Counter[str] = Counter()
        self.blocks = SequenceBlocks(config.num_blocks, FURTHER, config.block_size, config.max_context_tokens)
        self._open_graphs()
        self.specs = [self._spec() for _ in range(24)]

    def _spec(self) -> Spec:
        random = self.random
        if random.random() < 0.15:
            return {
                "kind": random.choice(["score", "embed"]),
                "prompt": [random.randint(3, 300) for _ in range(random.randint(4, 20))],
                "cache_salt": "",
            }
        return self.served.draw(random)

    @staticmethod
    def _opener(model: CausalLM) -> Any:
        return lambda path, root: PeftFolder(path, root, model, AdapterLimits())

    def _open_graphs(self) -> None:
        model = self.served.models[self.model].weights.model
        self.graphs = describe_graphs(model, _GRAPH_LIMITS)
        self.graph_runner = GraphRunner(model, self.kv, self.blocks, cpu_device().sampling_kernels())

    # What may happen.

    def submit(self) -> None:
        for _ in range(self.random.choice([1, 1, 2, 6])):
            self._submit()

    def _submit(self) -> None:
        spec, name = self.random.choice(self.specs), self.random.choice([None, *NAMES])
        item = make(self.served.models[self.model], spec)
        folder = None
        if name is not None:
            try:
                item.adapter = self.store.get(name) or self.store.bring(name)
            except NotFound:
                assert name not in self.known
                return
            except ResourceExhausted:
                self.seen["slots_full"] += 1
                return
            folder = self.known[name]
        item.arrival_time = self.now
        item.fair_share_key = self.random.choice(["", "", "one", "other"])
        item.priority = self.random.choice([0, 0, 0, 1, -1])
        if self.random.random() < 0.1:
            item.deadline = self.now + self.random.randint(0, 30)
        try:
            self.engine.check(item)
        except ResourceExhausted:
            # It is larger than the pool.
            return
        self.engine.add(item)
        if item.adapter is not None:
            self.store.acquire(item.adapter)
        self.items[item.request_id] = (self.model, folder, spec, item)
        self.live[item.request_id] = item
        self.seen["submitted"] += 1

    def step(self) -> None:
        for _ in range(self.random.randint(1, 5)):
            self._step()

    def _step(self) -> None:
        outputs = self.engine.step()
        self.now += 1.0
        self._take(outputs)
        assert not self.engine._scheduler.copies.listed(), "copies are left of a step"
        self.seen["swapped_requests"] += self.engine.load().swapped_requests > 0

    def _take(self, outputs: list[RequestOutput]) -> None:
        collect(self.answers, outputs)
        for output in outputs:
            if output.finished is not None:
                item = self.live.pop(output.request.request_id)
                if item.adapter is not None:
                    self.store.release(item.adapter)

    def pause(self) -> None:
        """Take no step for a while: requests may have to end all the same."""
        self.engine.pause_began()
        for _ in range(self.random.randint(1, 3)):
            self.now += self.random.choice([0.0, 1.0, 10.0])
            self._take(self.engine.end_overdue())
        self.engine.pause_ended()
        self.seen["held_in_a_pause"] += self.engine.load().running_requests

    def abort(self) -> None:
        live = self.engine._groups
        if not live:
            return
        chosen = self.random.choice(list(live))
        swapped = [group for group in live.values() if group.is_swapped]
        if swapped and self.random.random() < 0.5:
            chosen = self.random.choice(swapped).request.request_id
            self.seen["aborted_while_swapped"] += 1
        assert self.engine.abort(chosen, self.random.choice([None, Internal("on purpose", reason="TEST")]))
        self.aborted.add(chosen)
        self.seen["aborted"] += 1

    def clear_cache(self) -> None:
        self.engine.clear_cache()

    def release_cache(self) -> None:
        live = self.engine._groups
        names = self.random.sample(list(live), min(len(live), self.random.randint(1, 3)))
        self.seen["released_while_swapped"] += any(live[name].is_swapped for name in names)
        self.engine.release_cache(names)
        assert not any(live[name].is_swapped for name in names)

    def copy_blocks(self) -> None:
        count = self.engine.config.num_blocks
        pairs = [(self.random.randrange(count), self.random.randrange(count)) for _ in range(self.random.randint(1, 3))]
        self._command(lambda commands: commands.copy(pairs))

    def swap_blocks(self) -> None:
        if self.host is None:
            return
        device, host = self.engine.config.num_blocks, self.host.num_blocks
        swaps = []
        for _ in range(self.random.randint(1, 3)):
            kind = self.random.randrange(2)
            ends = (host, device) if kind == 0 else (device, host)
            swaps.append((kind, self.random.randrange(ends[0]), self.random.randrange(ends[1])))
        self._command(lambda commands: commands.swap(swaps))

    def _command(self, run: Callable[[BlockCommands], float]) -> None:
        refused = refusal(lambda: run(BlockCommands(self.engine)))
        assert refused in ("", "BLOCK_IN_USE", "INVALID_FIELD")
        self.seen["blocks_copied"] += not refused

    def claim(self) -> None:
        """Claim blocks, or look whether those that are claimed are as they were, and give some back."""
        block = self.random.randrange(self.engine.config.num_blocks)
        if self.claimed and self.random.random() < 0.7:
            self._check_claims()
            given = self.random.sample(list(self.claimed), self.random.randint(1, len(self.claimed)))
            assert self.engine.caller_blocks.release(given) == len(given)
            for one in given:
                del self.claimed[one]
            return
        if len(self.claimed) > 3:
            return
        if refusal(lambda: self.engine.caller_blocks.claim([block])) == "BUSY":
            assert self.engine.has_work
            return
        mark = self.random.random()
        self.kv.tensors[0][:, :, block] = mark
        self.claimed[block] = mark
        self.seen["claimed"] += 1

    def claim_on_host(self) -> None:
        """Claim a block of the host pool, whoever is live, or give one back."""
        if self.host is None:
            return
        block = self.random.randrange(self.host.num_blocks)
        if len(self.claimed_on_host) > 1:
            self._check_claims()
            block = self.random.choice(list(self.claimed_on_host))
            assert self.engine.caller_blocks.release(host_blocks=[block]) == 1
            del self.claimed_on_host[block]
        elif not refusal(lambda: self.engine.caller_blocks.claim((), host_blocks=[block])):
            mark = self.claimed_on_host[block] = self.random.random()
            for part in self.host.block(block):
                part.fill_(mark)
            self.seen["claimed_on_host"] += 1

    def _check_claims(self) -> None:
        for block, mark in self.claimed.items():
            assert bool((self.kv.tensors[0][:, :, block] == torch.tensor(mark)).all()), "a claimed block was written"
        for block, mark in self.claimed_on_host.items():
            assert self.host is not None
            for part in self.host.block(block):
                assert bool((part == torch.tensor(mark)).all()), "a claimed block of the host was written"

    def load_adapter(self) -> None:
        name, folder = self.random.choice(NAMES), self.random.choice(self.served.adapters)
        replace = self.random.random() < 0.5
        refused = refusal(lambda: self.store.load(name, folder, replace=replace))
        assert refused in ("", "ADAPTER_EXISTS", "ADAPTER_SLOTS_FULL")
        assert (refused == "ADAPTER_EXISTS") == (name in self.known and not replace)
        if not refused:
            self.known[name] = folder
            self.seen["adapters_loaded"] += 1

    def unload_adapter(self) -> None:
        name = self.random.choice(NAMES)
        if name in self.known:
            self.store.unload(name)
            del self.known[name]

    def begin_named(self) -> None:
        if len(self.named) < 3:
            layers = self.served.models[self.model].weights.model.config.num_layers
            prompt = [5, 6, 7, 8, 9, 10 + self.random.randrange(3)]
            self.named.append(Named(prompt, PoolSequence([0] * layers), list(prompt)))

    def advance_named(self) -> None:
        """Compute what a named sequence lacks, and append the most likely token."""
        if not self.named:
            return
        one = self.random.choice(self.named)
        start = one.sequence.num_tokens[0]
        if start and self.random.random() < 0.2:
            # It goes back a little, and computes that again.
            start = self.random.randrange(start)
        ids = torch.tensor([one.tokens[start:]], dtype=torch.int32)
        hidden = self._graph("embedding", {0: ids})
        for layer in range(len(one.sequence.num_tokens)):
            hidden = self._graph(f"block_cache_{layer}", {0: hidden}, one.sequence, start)
        token = self._graph("greedy_head", {0: self._graph("lm_head", {0: hidden[:, -1]})})
        one.tokens.append(int(token))
        self.seen["named_tokens"] += 1
        if len(one.tokens) > 22:
            self.end_named(one)

    def _graph(
        self, name: str, inputs: dict[int, torch.Tensor], sequence: PoolSequence | None = None, start: int | None = None
    ) -> torch.Tensor:
        graph = self.graphs.named(name)
        sizes = graph.bind({index: tuple(one.shape) for index, one in inputs.items()}, None)
        return self.graph_runner.run(GraphCall(graph, sizes, inputs, sequence, start))[0]

    def end_named(self, one: Named | None = None) -> None:
        if one is None:
            if not self.named:
                return
            one = self.random.choice(self.named)
        self.named.remove(one)
        self.blocks.release(one.sequence)
        self.ended_named.append((self.model, one))

    def reload(self) -> None:
        """Put the other weights in place, if all is idle, as after a drain."""
        wanted = 1 - self.model
        fresh = self.served.models[wanted].weights.model
        runner = self.runner.over(fresh)
        if self.random.random() < 0.8:
            # As after a drain.
            while self.engine.has_work:
                self._step()
            self.engine.caller_blocks.release()
            self.claimed.clear()
            self.claimed_on_host.clear()
            for one in list(self.named):
                self.end_named(one)
        is_busy = self.engine.has_work or bool(self.engine.caller_blocks.device or self.engine.caller_blocks.host)
        if self.named and not is_busy:
            # Its callers' streams would hold the model.
            return
        refused = refusal(lambda: self.engine.reinitialise(runner, runner.warm_up))
        assert refused == ("BUSY" if is_busy else "")
        if refused:
            return
        self.runner, self.model = runner, wanted
        self.store.open_by(self._opener(fresh))
        self._open_graphs()
        self.seen["reloaded"] += 1

    # What must be so.

    def check(self) -> None:
        self.engine.check_integrity()
        figures = self.store.figures()
        assert figures.loaded <= SLOTS
        load = self.engine.load()
        assert load.waiting_requests + load.running_requests <= len(self.live)

    def play(self, num_events: int) -> None:
        events: dict[Callable[[], None], int] = {
            self.submit: 30,
            self.step: 40,
            self.abort: 4,
            self.clear_cache: 2,
            self.release_cache: 3,
            self.copy_blocks: 3,
            self.swap_blocks: 3,
            self.claim: 3,
            self.claim_on_host: 2,
            self.load_adapter: 4,
            self.unload_adapter: 1,
            self.begin_named: 3,
            self.advance_named: 12,
            self.end_named: 1,
            self.reload: 1,
            self.pause: 2,
        }
        for _ in range(num_events):
            self.random.choices(list(events), list(events.values()))[0]()
            self.check()
        while self.engine.has_work:
            self._step()
            self.check()
        self._check_claims()
        for one in list(self.named):
            self.end_named(one)
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        engine, runner = self.engine, self.runner
        assert not self.live
        assert not self.store._users
        engine.caller_blocks.release()
        load = engine.load()
        assert (load.kv_blocks_used, load.host_blocks_used, load.swapped_requests) == (0, 0, 0)
        assert self.blocks.num_used == 0
        engine.clear_cache()
        load = engine.load()
        assert (load.kv_blocks_evictable, load.host_blocks_evictable) == (0, 0)
        engine.check_integrity()
        assert not engine._groups
        assert not runner._inputs._slots
        assert not runner._sampler._states
        assert not runner._sampler._forked
        assert runner._adapters._last is None
        assert runner._steady is None
        if self.drafter is not None:
            assert not self.drafter._shadows

    def check_answers(self, alone: Alone) -> None:
        for request_id, (model, adapter, spec, item) in self.items.items():
            found = self.answers[request_id]
            assert found.finished is not None
            error = found.finished.error
            is_cut = request_id in self.aborted or isinstance(error, DeadlineExceeded)
            assert is_cut or error is None, (error, spec)
            check_answer(found, alone(model, adapter, spec), spec, item, is_cut=is_cut)
        for model, one in self.ended_named:
            spec = {"prompt": one.prompt, "max_new_tokens": 20, "seed": 0, "ignore_eos": True}
            wanted = alone(model, None, spec).ids[0]
            count = len(one.tokens) - len(one.prompt)
            assert one.tokens[len(one.prompt) :] == wanted[:count]


def check_answer(found: Answer, alone: Answer, spec: Spec, item: Request, *, is_cut: bool) -> None:
    assert found.finished is not None
    assert alone.finished is not None
    assert alone.finished.error is None, spec
    if is_cut:
        if item.params.mode.streams:
            for index, ids in found.ids.items():
                assert ids == alone.ids[index][: len(ids)], spec
        return
    if spec.get("kind") == "embed":
        both = [
            torch.frombuffer(bytearray(one.finished.embedding or b""), dtype=torch.float32)
            for one in (found, alone)
            if one.finished is not None
        ]
        torch.testing.assert_close(*both, atol=TOLERANCE, rtol=TOLERANCE)
        return
    if spec.get("kind") == "score":
        both = [
            torch.tensor([entry.chosen.logprob for entry in one.started.prompt_logprobs if entry.chosen])
            for one in (found, alone)
            if one.started is not None
        ]
        assert len(both[0]) == len(spec["prompt"]) - 2
        torch.testing.assert_close(*both, atol=TOLERANCE, rtol=TOLERANCE)
        return
    assert found.ids == alone.ids, spec
    for one, other in zip(found.finished.sequences, alone.finished.sequences, strict=True):
        assert (one.index, one.reason, one.num_tokens) == (other.index, other.reason, other.num_tokens), spec
        assert (one.stop_token_id, one.stop_string) == (other.stop_token_id, other.stop_string), spec
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=TOLERANCE), spec


def tight(random: Random) -> EngineConfig:
    """Room for a few requests at a time, and any host pool."""
    return engine_config(
        num_blocks=random.randint(30, 48),
        block_size=random.randint(3, 5),
        max_context_tokens=100,
        max_running_sequences=random.randint(16, 32),
        max_batch_tokens=random.randint(32, 64),
        prefix_cache=random.random() < 0.85,
        reserve_share=0.0,
        **host_fields(*random.choice(HOSTS)),
    )


def check(served: Served, alone: Alone, seed: int, num_events: int) -> Counter[str]:
    random = Random(seed)
    world = World(served, tight(random), random)
    try:
        world.play(num_events)
        world.check_answers(alone)
    except (AssertionError, PenstockError) as error:
        error.add_note(f"seed {seed}, {num_events} events")
        raise
    stats = world.engine.stats
    return world.seen + Counter(
        preemptions=stats.preemptions,
        swaps=stats.swaps,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        host_prefix_hit_tokens=stats.host_prefix_hit_tokens,
        copy_on_write_blocks=stats.copy_on_write_blocks,
        accepted_draft_tokens=stats.accepted_draft_tokens,
        rejected_draft_tokens=stats.rejected_draft_tokens,
    )


def test_whatever_happens_every_answer_is_the_one_alone(random_model: Served) -> None:
    alone, seen = Alone(random_model), Counter[str]()
    for seed in (1, 2):
        seen += check(random_model, alone, seed, 120)
    wanted = ("submitted", "preemptions", "prefix_hit_tokens", "aborted", "adapters_loaded", "named_tokens")
    wanted += ("copy_on_write_blocks", "rejected_draft_tokens")
    assert min(seen[what] for what in wanted) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 240, 20))
def test_whatever_happens_for_long(random_model: Served, first: int) -> None:
    seen = Counter[str]()
    for seed in range(first, first + 20):
        seen += check(random_model, Alone(random_model), 1000 + seed, 250)
    rare = ("reloaded", "swaps", "aborted_while_swapped", "host_prefix_hit_tokens", "claimed", "slots_full")
    rare += ("held_in_a_pause",)
    assert min(seen[what] for what in rare) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_on_many_layers(deep_model: Served, seed: int) -> None:
    check(deep_model, Alone(deep_model), seed, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_with_grammars_and_a_tokenizer(demo: Served, seed: int) -> None:
    check(demo, Alone(demo), seed, 150)
