"""First token of a long prompt from each place that keeps prefixes: KV pool, host pool, --kv-disk after a restart.

    python -m benchmarks kv_disk [--model DIR] [--prompt-tokens 4096] [--threads 2] [--rounds 3]

Each start is a process of its own, as after a restart of the service. `computed` begins with an empty file. `kv pool`
asks again, `host pool` after another prompt has evicted it from the KV pool. `file` is a new process with the same
file, `file, damaged` one after a byte of every tenth block was changed.

The exit status is 1 where a target is missed: all ids are the same, each place gives what it keeps, damaged blocks are
refused, and the first token from the file takes at most half of the computed one's time by the clock.

On a machine with other work on it compare the CPU's seconds, of all threads.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._arguments import at_least, be_quiet
from benchmarks._report import Report
from benchmarks.checkpoints import resolve

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SIZE, NEW_TOKENS, SIZE = 16, 8, 1 << 30
COMPUTED, POOL, HOST, FILE, DAMAGED = "computed", "kv pool", "host pool", "file", "file, damaged"
_TOKENS = ("from_pool_tokens", "from_host_tokens", "from_file_tokens")
HEADER = ("from", "wall_s", "cpu_s", "of_computed", *_TOKENS, "refused")
# Most of the computed first token's time that the one from the file may take.
_TARGET = 0.5


def prompt_of(number: int, tokens: int) -> list[int]:
    """A prompt, the same each time."""
    rng = random.Random(number)
    return [rng.randrange(100, 4000) for _ in range(tokens)]


def start(model: str, threads: int, prompt_tokens: int, file: Path, places: list[str]) -> list[dict[str, Any]]:
    """Make a Generator in this process and measure the places in turn. Its close writes the file."""
    from penstock import Generator

    rows = []
    with Generator(
        model,
        threads=threads,
        # Room for one prompt and a little, in either pool.
        max_context=prompt_tokens + 2 * BLOCK_SIZE,
        max_running_sequences=1,
        host_kv_memory="auto",
        kv_disk=str(file),
        kv_disk_size=SIZE,
        max_batch_tokens=512,
    ) as generator:
        core = generator._engine.core
        generator.generate([1, 2, 3], max_new_tokens=2)
        for place in places:
            if place == HOST:
                first_token(generator, prompt_of(1, prompt_tokens))
            before, disk = core.stats.counters(), core.loaded.pools.disk
            wall, cpu, ids = first_token(generator, prompt_of(0, prompt_tokens))
            after = core.stats.counters()
            hits, from_host, from_file = (
                after[name] - before[name]
                for name in ("prefix_hit_tokens", "host_prefix_hit_tokens", "disk_hit_tokens")
            )
            rows.append(
                {
                    "from": place,
                    "wall_s": wall,
                    "cpu_s": cpu,
                    "from_pool_tokens": hits - from_host,
                    # Those that came from the file passed the host pool.
                    "from_host_tokens": from_host - from_file,
                    "from_file_tokens": from_file,
                    "refused": disk.figures().refused_blocks,
                    "block_bytes": disk.file.block_bytes,
                    "ids": ids,
                }
            )
    return rows


def first_token(generator: Any, prompt: list[int]) -> tuple[float, float, list[int]]:
    """Seconds to the first token, by the clock and of the CPU; and the ids of the answer."""
    wall, cpu = time.perf_counter(), time.process_time()
    ids: list[int] = []
    for delta in generator.stream(prompt, max_new_tokens=NEW_TOKENS, do_sample=False):
        if not ids:
            took = time.perf_counter() - wall, time.process_time() - cpu
        ids += delta.token_ids
    return *took, ids


def damage(path: Path, block_bytes: int) -> int:
    """Change a byte of every tenth block of the file. Return their number."""
    from penstock.generation.host.block_file import KEY_BYTES, BlockFile

    file = BlockFile(path, block_bytes, SIZE)
    data, places = path.read_bytes()[: file._first_block], file._places
    kept = [
        (own, place)
        for own in range(file._num_sets)
        for place in range(places)
        if any(data[file._key_at(own, place) : file._key_at(own, place) + KEY_BYTES])
    ]
    with path.open("r+b") as opened:
        for own, place in kept[::10]:
            at = file._block_at(own, place) + 1000
            opened.seek(at)
            byte = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte[0] ^ 1]))
    file.close()
    return len(kept[::10])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--model", default=str(ROOT / "services/penstock/assets/demo"), help="folder, or a shape's name"
    )
    parser.add_argument("--prompt-tokens", type=at_least(64), default=4096)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=3)


def missed(rows: list[dict[str, Any]], ids_equal: bool, prompt_tokens: int) -> list[str]:
    """Return what the rows of all places miss of the targets, one line each."""
    of = {row["from"]: row for row in rows}
    # The last token is always computed, and so may be the block that it is in.
    whole = prompt_tokens - BLOCK_SIZE
    found = {place: sum(of[place][name] for name in _TOKENS) for place in (COMPUTED, POOL, HOST, FILE)}
    faults = [] if ids_equal else ["ids differ"]
    faults += [f"{COMPUTED}: {found[COMPUTED]} tokens were cached"] * (found[COMPUTED] > 0)
    faults += [
        f"{place}: only {found[place]} tokens were found" for place in (POOL, HOST, FILE) if found[place] < whole
    ]
    faults += [f"{FILE}: the tokens came from elsewhere"] * (of[FILE]["from_file_tokens"] < whole)
    faults += [f"{HOST}: the tokens came from elsewhere"] * (of[HOST]["from_host_tokens"] < whole / 2)
    faults += [f"{DAMAGED}: no block was refused"] * (not of[DAMAGED]["refused"])
    share = of[FILE]["wall_s"] / of[COMPUTED]["wall_s"]
    return faults + [f"{FILE}: {share:.2f} of the computed one's time, the target is {_TARGET}"] * (share > _TARGET)


def main(options: argparse.Namespace, report: Report) -> int:
    """Run it; return the exit status."""
    # For the processes that it starts.
    be_quiet(options.threads)
    options.model = str(resolve(options.model))
    spawn, rounds = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            file, rows = Path(folder) / f"blocks{number}", list[dict[str, Any]]()
            for places in ([COMPUTED, POOL, HOST], [FILE], [DAMAGED]):
                if places == [DAMAGED]:
                    damage(file, rows[0]["block_bytes"])
                with spawn.Pool(1) as pool:
                    rows += pool.apply(start, (options.model, options.threads, options.prompt_tokens, file, places))
            file.unlink()
            rounds.append(rows)
    results = [
        {name: _middle([rows[place][name] for rows in rounds]) for name in rounds[0][place]}
        for place in range(len(rounds[0]))
    ]
    are_equal = all(row["ids"] == rounds[0][0]["ids"] for rows in rounds for row in rows)
    table = report.table(HEADER)
    for row in results:
        row["of_computed"] = round(row["cpu_s"] / results[0]["cpu_s"], 3)
        table.row(*(row[name] for name in HEADER))
    faults = missed(results, are_equal, options.prompt_tokens)
    report.save({"settings": report.settings, "rows": results, "ids_equal": are_equal, "missed": faults})
    print("\n".join(faults) or "ids equal, and every target is met")
    return 1 if faults else 0


def _middle(values: list[Any]) -> Any:
    return round(statistics.median(values), 3) if isinstance(values[0], int | float) else values[0]
