"""Builds the C++ kernels once for this machine's torch and compiler, into a folder that later starts load from.

A build in a user's cache has the instruction sets of its CPU; a build for other machines has all of them, like the
wheel penstock-kernels (prebuilt.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from penstock.common.errors import StartupError
from penstock.common.logging import get_logger
from penstock.generation.devices.native import LIBRARY
from penstock.generation.devices.native.compilers import run_compilers
from penstock.generation.devices.native.trust import digest, digest_path, obstacle, protect
from penstock.generation.host.cpu_features import INSTRUCTION_SETS, has_wide_set, native_sets

_log = get_logger("penstock.generation")
SOURCES = Path(__file__).parent / "csrc"
# The compiler's flags of each of cpu_features.INSTRUCTION_SETS. Every file of kernels is compiled once for each set of
# its processor; the operators (ops_*.cpp) pick one at run time. All file names differ, across folders too.
_FLAGS_OF_SETS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni", "-mfma"),
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-Wno-psabi"),
    "neon_bf16": ("-march=armv8.2-a+dotprod+bf16+i8mm",),
    "neon": ("-march=armv8.2-a+dotprod",),
}
# Number of files that operators are compiled in: reading torch's headers takes most of the time, once per file.
_OPERATOR_FILES = 2
_OPERATOR_FLAGS = ("-fopenmp", "-DAT_PER_OPERATOR_HEADERS")
# Keep NaN and infinity: masks are infinities, and a NaN must reach the sampler. Keep the source's order of sums: a
# row's result must not depend on the compiler's treatment of the rows beside it.
_FLAGS = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-ffp-contract=fast",
)
# Contract only where the source asks for it: some sums are written in two ways that must give the same bits.
# (In these files a unit of 32 bits is a float in one place and an integer in another.)
_EXACT = ("-ffp-contract=off", "-fno-strict-aliasing")
_EXACT_SOURCES = ("attention", "delta", "expert_sums", "gguf_products", "index_scores", "pack", "pack_gguf")
# Flag of a build without the wider instruction set.
_NARROW_ONLY = "-DPENSTOCK_NARROW_ONLY"
# Flags of a build for tests only: the first wrong access or undefined operation ends the process. The build is
# optimised, so that sums are contracted as in the product; vptr would need the types of torch's classes.
_SANITIZED = (
    "-O2",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)


def is_supported() -> bool:
    """True when kernels exist for this machine's kind of processor."""
    return bool(native_sets())


def sources_digest(torch_version: str, extra: tuple[str, ...] = (), *, machine: str | None = None) -> str:
    """Return 16 hexadecimal digits of everything that a library depends on except the compiler: sources, flags, torch,
    processor.

    `machine`: the kind of processor, as uname has it; this one's by default.
    """
    flags = (_FLAGS, _EXACT, _EXACT_SOURCES, _FLAGS_OF_SETS, _OPERATOR_FILES, _OPERATOR_FLAGS, extra)
    text = repr((torch_version, machine or platform.machine(), *flags, _digest_of_sources()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _digest_of_sources() -> str:
    # Read once: a look for kernels asks twice.
    return _read_sources()


def _read_sources() -> str:
    digest = hashlib.sha256()
    for source in sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h")):
        digest.update(source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _folder(cache: Path, extra: tuple[str, ...] = ()) -> Path:
    """Folder of builds of these sources for this torch and `extra` flags, by any compiler."""
    return cache / sources_digest(torch.__version__, extra)


def find(cache: Path) -> Path | None:
    """Return the library of these sources and this torch that was built or used last; needs no compiler.

    A library that others could have written is skipped, with a warning. One without the wider instruction set, built
    on a CPU without it, is the last choice: machines may share a cache.
    """
    for extra in ((), (_NARROW_ONLY,)):
        built = sorted(
            _folder(cache, extra).glob(f"{LIBRARY}-*.so"), key=lambda path: path.lstat().st_mtime, reverse=True
        )
        found = next((library for library in built if _is_trusted(library, cache)), None)
        if found is not None:
            if extra and has_wide_set():
                _warn_of_narrow()
            return found
    return None


def _is_trusted(library: Path, cache: Path) -> bool:
    reason = obstacle(library, cache)
    if reason is not None:
        _warn_of(reason)
    return reason is None


@functools.cache
def _warn_of(reason: str) -> None:
    """Warn once in a process."""
    _log.warning("built kernels are not loaded: run `penstock build-kernels`", cause=reason)


@functools.cache
def _warn_of_narrow() -> None:
    """Warn once in a process."""
    wide, *_ = native_sets()
    _log.warning(f"the kernels were built on a CPU without {wide}: run `penstock build-kernels` here for faster ones")


def library_path(cache: Path, compiler: str, *, sanitize: bool = False, everywhere: bool = False) -> Path:
    """Path of the library, present or not, that this compiler makes in its present version. Raises StartupError.

    Flags as in build().
    """
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise StartupError(f"the native kernels could not be compiled: {error}", flag="--kernels") from error
    version = hashlib.sha256(done.stdout.partition("\n")[0].encode()).hexdigest()[:8]
    return _folder(cache, _extra(sanitize, everywhere)) / f"{LIBRARY}-{version}.so"


def _extra(sanitize: bool, everywhere: bool) -> tuple[str, ...]:
    """Flags beside those of every build."""
    return (*(_SANITIZED if sanitize else ()), *(() if everywhere or has_wide_set() else (_NARROW_ONLY,)))


def find_compiler() -> str | None:
    """Return a usable compiler on the PATH; None when there is none."""
    return shutil.which("g++") or shutil.which("c++")


def build(
    cache: Path,
    *,
    compiler: str | None = None,
    sanitize: bool = False,
    everywhere: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _files: None,
) -> Path:
    """Compile the kernels and return the library's path. About a minute on two cores.

    `progress` gets the number of compiled files, from 0, and of all; linking is not counted.

    Nothing is compiled when this compiler did it before, or when there is no compiler but a library of an earlier one.
    Files that others could have written are compiled anew, and folders of this user are closed to them.

    `sanitize`: the address and undefined-behaviour sanitizers check the library; `find` does not know its folder. It
    can only be loaded after libasan (tools/sanitize_kernels.py). `everywhere`: the library has every instruction set,
    since it may be used on another CPU.

    Raises StartupError when there are no kernels for this machine, or the compiler is missing or fails. A failed build
    leaves nothing behind, after any error.
    """
    if not is_supported():
        raise StartupError("the native kernels are for x86-64 and arm64, on Linux", flag="--kernels")
    command = compiler or find_compiler()
    if command is None:
        if (found := find(cache)) is not None:
            return found
        raise StartupError("the native kernels need a C++ compiler: install g++", flag="--kernels")
    target = library_path(cache, command, sanitize=sanitize, everywhere=everywhere)
    # One that has every instruction set will do anywhere.
    for path in (library_path(cache, command, sanitize=sanitize, everywhere=True), target):
        if path.exists() and _is_trusted(path, cache):
            return path
    protect(cache, target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        linked = Path(scratch) / target.name
        compile_library(command, linked, _libraries(), extra=_extra(sanitize, everywhere), progress=progress)
        # An upgrade may have replaced or removed them: the library would be found as that of the sources before.
        if _read_sources() != _digest_of_sources():
            raise StartupError(
                "the sources of the native kernels changed while they were compiled: start again", flag="--kernels"
            )
        linked.chmod(0o755)
        recorded = digest_path(linked)
        recorded.write_text(digest(linked))
        os.replace(recorded, digest_path(target))
        # Atomic for other processes, which may be building the same.
        os.replace(linked, target)
    return target


def compile_library(
    command: str,
    target: Path,
    libraries: Sequence[str],
    *,
    extra: tuple[str, ...] = (),
    machine: str | None = None,
    torch_folder: Path | None = None,
    progress: Callable[[int, int], None] = lambda _done, _files: None,
) -> None:
    """Compile all kernels and link them into `target` with `libraries`, the linker's arguments.

    `machine` and `torch_folder`: the processor and the torch that a cross compiler works for; this one's by default.
    Objects and logs go beside the target. Raises StartupError when the compiler fails.
    """
    scratch = target.parent
    sets = INSTRUCTION_SETS[machine or platform.machine()][-1 if _NARROW_ONLY in extra else 0 :]
    objects = _compile(command, scratch, sets, _includes(torch_folder or _torch_folder()), extra, progress)
    run_compilers([[command, "-shared", *extra, "-o", str(target), *map(str, objects), *libraries]], scratch)


def _compile(
    command: str,
    scratch: Path,
    sets: Sequence[str],
    includes: tuple[str, ...],
    extra: tuple[str, ...],
    progress: Callable[[int, int], None],
) -> list[Path]:
    sources = sorted(SOURCES.rglob("*.cpp"))
    operators = [source for source in sources if source.name.startswith("ops_")]
    flags: tuple[str, ...] = (*_OPERATOR_FLAGS, *includes)
    # First, since they take longest.
    jobs = [(scratch / f"{file.stem}.o", file, flags) for file in _joined(operators, scratch)]
    for source in (source for source in sources if source not in operators):
        exact = _EXACT if source.stem in _EXACT_SOURCES else ()
        for namespace in sets:
            flags = (f"-DNS={namespace}", *_FLAGS_OF_SETS[namespace], *exact)
            jobs.append((scratch / f"{source.stem}.{namespace}.o", source, flags))
    run_compilers(
        [
            [command, *_FLAGS, *extra, f"-I{SOURCES}", *flags, "-c", str(source), "-o", str(target)]
            for target, source, flags in jobs
        ],
        scratch,
        progress,
    )
    # Shared templates, such as std::sort, may be in several objects. The linker takes the first of them: so the objects
    # of the less common instruction sets come last.
    ranks = {f".{namespace}": place for place, namespace in enumerate(reversed(sets), 1)}
    return sorted((target for target, _, _ in jobs), key=lambda target: ranks.get(target.suffixes[0], 0))


def _joined(sources: Sequence[Path], scratch: Path) -> list[Path]:
    """Write _OPERATOR_FILES files that include `sources`, about as much text in each, and return them. Which are
    joined depends on their sizes: no two may define the same name, in an unnamed namespace either."""
    parts: list[list[Path]] = [[] for _ in range(_OPERATOR_FILES)]
    for source in sorted(sources, key=lambda source: (-source.stat().st_size, source)):
        min(parts, key=lambda part: sum(one.stat().st_size for one in part)).append(source)
    joined = [scratch / f"operators_{number}.cpp" for number in range(1, _OPERATOR_FILES + 1)]
    for file, part in zip(joined, parts, strict=True):
        file.write_text("".join(f'#include "{source.relative_to(SOURCES).as_posix()}"\n' for source in part))
    return joined


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _includes(torch_folder: Path) -> tuple[str, ...]:
    include = torch_folder / "include"
    return (f"-I{include}", f"-I{include / 'torch/csrc/api/include'}")


def _libraries() -> tuple[str, ...]:
    """Return the libraries to link: torch's own OpenMP, not the system's; two of them would keep two pools of
    threads."""
    folder = _torch_folder() / "lib"
    openmp = sorted(folder.glob("libgomp*.so*")) + sorted((folder.parent.parent / "torch.libs").glob("libgomp*.so*"))
    runtime = (str(openmp[0]),) if openmp else ("-lgomp",)
    return (f"-L{folder}", "-ltorch_cpu", "-lc10", "-Wl,--no-as-needed", *runtime, f"-Wl,-rpath,{folder}")
