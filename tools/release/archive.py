"""Archives with the same bytes for the same files: sorted, owned by nobody, all of one time."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path


def write_archive(path: Path, folder: Path, inside: str, seconds: int, leave_out: tuple[str, ...] = ()) -> None:
    """Write the files of a folder as PATH.tar.gz or .tgz, below the name `inside`.

    `leave_out`: names of files and folders. Times are `seconds` since 1970.
    """
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder)
            if file.is_file() and not set(name.parts) & set(leave_out):
                entry = archive.gettarinfo(str(file), f"{inside}/{name.as_posix()}")
                entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                entry.mtime = seconds
                entry.mode = 0o755 if entry.mode & 0o100 else 0o644
                with file.open("rb") as source:
                    archive.addfile(entry, source)
    with path.open("wb") as target, gzip.GzipFile("", "wb", fileobj=target, mtime=seconds) as packed:
        packed.write(content.getvalue())
