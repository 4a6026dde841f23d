"""The file of blocks at a start, and the fingerprint that tells what its blocks were computed by."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from penstock import __version__
from penstock.common.environment import usable_cores
from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.common.units import format_size
from penstock.generation.attention.host_kv import HostKVPool
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.host.block_file import FLAG, BlockFile
from penstock.generation.host.block_file_store import BlockFileStore
from penstock.generation.startup.load_weights import LoadedWeights
from penstock.generation.startup.read_files import ModelFiles

_log = get_logger("penstock.generation")
# Of a file that one thread reads.
_PIECE_BYTES = 64 << 20
# Weights in other forms, beside safetensors.
_OTHER_FORMS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot")


def open_kv_disk(
    config: GenerationServiceConfig,
    files: ModelFiles,
    weights: LoadedWeights,
    kv: KVCachePool,
    host: HostKVPool | None,
) -> BlockFileStore | None:
    """Open the file of --kv-disk; None: there is to be none. Raises StartupError naming the flag."""
    if config.kv_disk is None:
        return None
    assert host is not None, "blocks pass through the host pool"
    try:
        content = digest_of(files.folder)
    except OSError as error:
        raise StartupError(f"{FLAG}: cannot read {files.folder}: {error.strerror}", flag=FLAG) from error
    # All that changes a bit of a block.
    made_by = (
        __version__,
        content,
        weights.model.config,
        config.quantization,
        config.kernels,
        weights.device.describe(),
        kv.dtype,
        kv.block_size,
        kv.layout,
    )
    fingerprint = hashlib.sha256(repr(made_by).encode()).digest()
    path = Path(config.kv_disk.replace("%b", str(kv.bytes_per_block)))
    file = BlockFile(path, kv.bytes_per_block, config.kv_disk_size)
    _log.info("file of blocks", path=str(path), blocks=file.num_blocks, fingerprint=fingerprint.hex()[:12])
    return BlockFileStore(file, fingerprint, host.buffers)


def disk_line(disk: BlockFileStore) -> str:
    """Return a line of facts for people."""
    file = disk.file
    room = format_size(file.num_blocks * file.block_bytes)
    return f"kv disk   {file.path}: {room}: {file.num_blocks} blocks, {file.num_kept()} kept"


def digest_of(folder: Path) -> str:
    """Return the hex SHA-256 over names and contents of a model folder's files, by all cores. Raises OSError.

    Their times would not do: images that are built reproducibly have the same ones for every model.
    """
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    if any(path.suffix == ".safetensors" for path in paths):
        paths = [path for path in paths if path.suffix not in _OTHER_FORMS]
    pieces = [(path, at) for path in paths for at in range(0, max(path.stat().st_size, 1), _PIECE_BYTES)]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(min(usable_cores(), len(pieces) or 1), "digest") as threads:
        for (path, at), found in zip(pieces, threads.map(partial(_digest_piece), pieces), strict=True):
            digest.update(f"{path.name}\0{at}\0".encode() + found)
    return digest.hexdigest()


def _digest_piece(piece: tuple[Path, int]) -> bytes:
    path, at = piece
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        end = at + _PIECE_BYTES
        while at < end and (length := os.preadv(file.fileno(), [buffer[: end - at]], at)):
            digest.update(buffer[:length])
            at += length
    return digest.digest()
