"""Zip archives with uncompressed members: byte ranges with checksums.

torch writes one such archive per file, or several into one file; each tensor's bytes
are a member that can be read in part. `zipfile` finds the members. Members outside of
the archive or overlapping others, by which a zip can have ambiguous contents, are
rejected here, since `zipfile` accepts them.
"""

import io
import os
import threading
import zipfile
import zlib
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from bridge.formats._ranges import read_bytes, read_range

_LOCAL_HEADER_BYTES = 30
_CRC_BLOCK_BYTES = 2**23


class _Member(NamedTuple):
    header: int  # positions in the file, not in the archive
    start: int
    stop: int
    crc: int


class StoredZip:
    """Zip archive that is a file or a range of one.

    Opening reads the directory at its end; a member's checksum is verified at its
    first read.

    Args:
      file: Path of the file.
      offset: First byte of the archive in the file.
      nbytes: Length of the archive in bytes; None for the rest of the file.

    Raises:
      ValueError: If it is not a zip archive, is truncated, or has members that are
        compressed, encrypted or duplicate, whose path would leave a directory (all
        of these are listed), or that lie outside the archive or overlap (the first
        is named).
    """

    def __init__(self, file: Path, offset: int = 0, nbytes: int | None = None):
        size = file.stat().st_size
        nbytes = size - offset if nbytes is None else nbytes
        self.name = f"'{file}'" if offset == 0 else f"'{file}' (at byte {offset:,})"
        self._file, self._offset, self._stop = file, offset, offset + nbytes
        if min(offset, nbytes) < 0 or self._stop > size:
            raise ValueError(
                f"'{file}' has {size:,} bytes, but one of its parts would lie at bytes "
                f"{offset:,} to {self._stop:,}: it was cut short, or what describes it "
                "is damaged."
            )
        infos = self._directory()
        self._check(infos)
        self._members = {info.filename: self._locate(info) for info in infos}
        self._check_overlaps()
        self._verified: set[str] = set()
        self._verifying = {name: threading.Lock() for name in self._members}

    def names(self) -> tuple[str, ...]:
        """Returns the names of all members, in the order of the directory."""
        return tuple(self._members)

    def nbytes(self, name: str) -> int:
        """Returns the size of a member in bytes.

        Raises:
          ValueError: If there is no such member.
        """
        return self._member(name).stop - self._member(name).start

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Reads bytes `start` to `stop` of a member.

        The first read of a member reads all of it, in blocks, to verify its checksum;
        later reads only the requested bytes.

        Raises:
          ValueError: If there is no such member, the range exceeds it, or its checksum
            differs from the one in the archive.
        """
        member = self._member(name)
        nbytes = self.nbytes(name)
        stop = nbytes if stop is None else stop
        if not 0 <= start <= stop <= nbytes:
            raise ValueError(
                f"{self.name}: '{name}' has {nbytes:,} bytes, but bytes {start:,} to "
                f"{stop:,} of it were asked for."
            )
        with self._verifying[name]:  # one thread verifies, the others wait
            if name not in self._verified:
                data = self._read_verified(member, name, start, stop)
                self._verified.add(name)
                return data
        return read_bytes(self._file, member.start + start, stop - start)

    def _member(self, name: str) -> _Member:
        if name not in self._members:
            raise ValueError(f"{self.name} has no member '{name}': it is incomplete.")
        return self._members[name]

    def _read_verified(
        self, member: _Member, name: str, start: int, stop: int
    ) -> np.ndarray:
        data = np.empty(stop - start, np.uint8)
        spare = np.empty(min(_CRC_BLOCK_BYTES, self.nbytes(name)), np.uint8)
        crc = 0
        for at in range(0, self.nbytes(name), _CRC_BLOCK_BYTES):
            end = min(at + _CRC_BLOCK_BYTES, self.nbytes(name))
            # A block inside the requested range is read in place; others are read to
            # `spare` and partly copied.
            inside = start <= at and end <= stop
            block = data[at - start : end - start] if inside else spare[: end - at]
            read_range(self._file, member.start + at, [block.data], again=not inside)
            crc = zlib.crc32(block.data, crc)
            first, last = max(start, at), min(stop, end)
            if not inside and first < last:
                data[first - start : last - start] = block[first - at : last - at]
        if crc != member.crc:
            raise ValueError(
                f"{self.name}: the bytes of '{name}' have the checksum {crc:08x}, and "
                f"the archive says {member.crc:08x}: the file is damaged. Copy it "
                "again. (Files saved under torch.serialization.set_crc32_options(False)"
                " hold no checksums: save them again without it.)"
            )
        return data

    def _directory(self) -> list[zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(_Window(self._file, self._offset, self._stop)) as zip_:
                return zip_.infolist()
        except (zipfile.BadZipFile, NotImplementedError, OverflowError) as error:
            raise ValueError(
                f"{self.name} is not a zip archive, or was cut short: {error}."
            ) from error

    def _check(self, infos: list[zipfile.ZipInfo]) -> None:
        counts = Counter(info.filename for info in infos)
        wrong = [f"  {name!r}: named twice" for name, n in counts.items() if n > 1]
        for info in infos:
            path = PurePosixPath(info.filename)
            if path.is_absolute() or ".." in path.parts or "\\" in info.filename:
                wrong.append(f"  {info.filename!r}: a path that leaves the archive")
            if info.compress_type != zipfile.ZIP_STORED or (
                info.compress_size != info.file_size
            ):
                wrong.append(f"  {info.filename!r}: compressed")
            if info.flag_bits & 1:
                wrong.append(f"  {info.filename!r}: encrypted")
        if wrong:
            raise ValueError(
                f"{self.name} is not as torch writes it:\n" + "\n".join(wrong)
            )

    def _locate(self, info: zipfile.ZipInfo) -> _Member:
        """Finds a member's bytes, which follow a local header of variable length."""
        # zipfile has added the length of any bytes that precede the archive.
        header = self._offset + info.header_offset
        if header < self._offset or header + _LOCAL_HEADER_BYTES > self._stop:
            raise ValueError(f"{self.name}: '{info.filename}' lies outside of it.")
        fields = read_bytes(self._file, header, _LOCAL_HEADER_BYTES).tobytes()
        lengths = [int.from_bytes(fields[at : at + 2], "little") for at in (26, 28)]
        start = header + _LOCAL_HEADER_BYTES + sum(lengths)
        if fields[:4] != b"PK\3\4" or start + info.file_size > self._stop:
            raise ValueError(
                f"{self.name}: '{info.filename}' is not where the archive's directory "
                "says, or is cut short. Copy the file again."
            )
        return _Member(header, start, start + info.file_size, info.CRC)

    def _check_overlaps(self) -> None:
        previous, stop = "", self._offset
        for name, member in sorted(self._members.items(), key=lambda m: m[1].header):
            if member.header < stop:
                raise ValueError(
                    f"{self.name}: the members '{previous}' and '{name}' overlap."
                )
            previous, stop = name, member.stop


class _Window(io.RawIOBase):
    """Range of a file as a seekable stream."""

    def __init__(self, file: Path, start: int, stop: int):
        self._file, self._start, self._nbytes, self._at = file, start, stop - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}
        if base[whence] + offset < 0:
            raise OSError("before the start")  # zipfile expects OSError, as of a file
        self._at = base[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._nbytes - self._at)
        nbytes = left if size < 0 else min(size, left)
        data = read_bytes(self._file, self._start + self._at, nbytes).tobytes()
        self._at += nbytes
        return data
