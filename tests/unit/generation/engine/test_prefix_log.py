"""The log of cached prefixes: readers end up with what the pools keep, and names are those that a router makes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from factories.engine.fake_engine import engine_config, make_engine, request, run
from penstock.common.block_hashes import routing_salt
from penstock.generation.core.adapter import Adapter
from penstock.generation.engine.block_pool import BlockPool
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.prefix_log import PrefixLog, PrefixReader, PrefixReport
from penstock.router.backends.prefix_index import routing_hashes

PROMPT = list(range(40))


def a_hash(number: int) -> bytes:
    """Hash of a block whose name is `number`."""
    return number.to_bytes(8, "little") + bytes(24)


def keep(pool: BlockPool, *numbers: int) -> None:
    """Cache blocks with these names, held by nobody."""
    for number in numbers:
        block = pool.allocate()
        pool.register(block, a_hash(number))
        pool.release(block)


def log_of(engine: Engine) -> PrefixLog:
    log = engine.prefix_log
    assert log is not None
    return log


def adapter(name: str, generation: str) -> Adapter:
    return Adapter(name, Path(), generation, 1, (), 0, None)


def test_the_first_reports_name_everything_in_parts_and_later_ones_the_changes() -> None:
    pool = BlockPool(6, 4)
    log = PrefixLog([pool])
    keep(pool, 1, 2, 3)
    reader = PrefixReader(log, most=2)
    assert reader.has_more
    first, second = reader.take(), reader.take()
    assert first is not None
    assert second is not None
    assert (first.begins_anew, second.begins_anew) == (True, False)
    assert sorted(first.kept + second.kept) == [1, 2, 3]
    assert not reader.has_more
    assert reader.take() is None
    keep(pool, 4)
    pool.discard(a_hash(2))
    # It came and went.
    keep(pool, 5)
    pool.discard(a_hash(5))
    told = [reader.take(), reader.take()]
    assert told == [PrefixReport(False, (4,), (2,)), PrefixReport(False, (), (5,))]
    assert reader.take() is None


def test_a_reader_of_an_empty_pool_learns_that_it_is_empty() -> None:
    assert PrefixReader(PrefixLog([BlockPool(1, 4)])).take() == PrefixReport(True, (), ())


def test_a_block_that_two_pools_keep_is_gone_when_both_have_lost_it() -> None:
    device, host = BlockPool(2, 4), BlockPool(2, 4)
    reader = PrefixReader(PrefixLog([device, host]))
    keep(device, 7)
    keep(host, 7)
    assert reader.take() == PrefixReport(True, (7,), ())
    device.discard(a_hash(7))
    assert reader.take() is None
    host.discard(a_hash(7))
    assert reader.take() == PrefixReport(False, (), (7,))


def test_a_reader_that_is_too_far_behind_begins_anew() -> None:
    pool = BlockPool(64, 4)
    log = PrefixLog([pool], most_logged=8)
    slow = PrefixReader(log)
    assert slow.take() is not None
    keep(pool, *range(1, 40))
    told = slow.take()
    assert told is not None
    assert told.begins_anew
    assert sorted(told.kept) == list(range(1, 40))


def test_any_reader_ends_up_with_what_is_kept() -> None:
    pool, draw = BlockPool(12, 4), random.Random(3)
    log = PrefixLog([pool], most_logged=16)
    readers: list[tuple[PrefixReader, set[int]]] = [(PrefixReader(log, most), set()) for most in (1, 3, 100)]

    def read(reader: PrefixReader, known: set[int]) -> None:
        told = reader.take()
        if told is not None:
            if told.begins_anew:
                known.clear()
            known.difference_update(told.gone)
            known.update(told.kept)

    for _ in range(600):
        number = draw.randrange(1, 40)
        if draw.random() < 0.7:
            if pool.lookup(a_hash(number)) is None:
                keep(pool, number)
        else:
            pool.discard(a_hash(number))
        if draw.random() < 0.3:
            read(*draw.choice(readers))
    kept = {number for number in range(1, 40) if pool.lookup(a_hash(number)) is not None}
    assert len(log) == len(kept)
    for reader, known in readers:
        while reader.has_more:
            read(reader, known)
        assert known == kept


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "s"}, {"cache_salt": "s", "adapter": adapter("mine", "one")}])
def test_names_are_those_that_a_router_makes_of_the_prompt(fields: dict[str, Any]) -> None:
    engine, _ = make_engine(engine_config())
    run(engine, request(PROMPT, **fields))
    size = engine.config.block_size
    name = fields["adapter"].name if "adapter" in fields else ""
    expected = routing_hashes(PROMPT, size, routing_salt(fields.get("cache_salt", ""), name), 512)
    assert len(expected) == len(PROMPT) // size
    assert set(expected) <= set(log_of(engine).all()[0])


def test_two_readings_of_an_adapter_have_one_name_and_share_no_block() -> None:
    engine, _ = make_engine(engine_config())
    items = [request(PROMPT, cache_salt="s", adapter=adapter("mine", reading)) for reading in ("one", "two")]
    answers = [run(engine, item)[item.request_id].finished for item in items]
    assert [one.cached_tokens for one in answers if one is not None] == [0, 0]
    expected = routing_hashes(PROMPT, engine.config.block_size, routing_salt("s", "mine"), 512)
    assert set(expected) <= set(log_of(engine).all()[0])
    engine.clear_cache()
    assert not len(log_of(engine))


def test_new_weights_have_the_names_of_the_old_ones() -> None:
    engine, _ = make_engine(engine_config())
    run(engine, request(PROMPT))
    before = set(log_of(engine).all()[0])
    engine.weights_changed()
    assert not len(log_of(engine))
    run(engine, request(PROMPT))
    assert set(log_of(engine).all()[0]) == before


def test_without_a_prefix_cache_there_is_no_log() -> None:
    engine, _ = make_engine(engine_config(prefix_cache=False))
    assert engine.prefix_log is None
