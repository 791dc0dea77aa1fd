"""Lines of JSON, each with the hash of the one before.

A line is written twice: whole, to a file beside the ledger that appears at once
(`*.next`), and then at the ledger's end; after that the first copy is removed. So a
process that is killed in between leaves the whole line, and the next reader counts it
as written. A crash therefore leaves one of these states, and all others are refused:

- there is no `*.next`, and the ledger ends with a whole line or is empty;
- `*.next` is one whole line, and the ledger ends with that line;
- `*.next` is one whole line that follows the ledger's last whole line, after which the
  ledger has a part of it or nothing.
"""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from dpjax.checkpoint import _durable
from dpjax.checkpoint._fingerprint import canonical

try:
    import fcntl
except (
    ImportError
):  # where there is none, one process at a time is the user's to see to
    fcntl = None

Line = dict[str, Any]
# What stands before the first line.
NOTHING = "0" * 64


def read(path: pathlib.Path) -> list[Line]:
    """All lines of a chain that is whole; none of a file that is not there.

    Raises:
      ValueError: a line was changed, taken out, put in or moved, or the files are not
        as a completed or an interrupted write leaves them.
    """
    _refuse_missing(path)
    if not path.exists():
        return []
    with _open_locked(path, os.O_RDONLY) as opened:
        return _verify_line(path, _split_lines(path, opened))


def append(path: pathlib.Path, make: Callable[[list[Line]], Line | None]) -> None:
    """Add the line that follows from those before, if any does.

    When it returns, the line is on the disk.
    """
    _refuse_missing(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    with _open_locked(path, flags) as opened:
        whole = _split_lines(path, opened)
        lines = _verify_line(path, whole)
        if _next(path).exists():
            _finish(path, opened)  # what a process that was killed had begun
        line = make(lines)
        if line is None:
            return
        line["previous"] = lines[-1]["hash"] if lines else NOTHING
        line["hash"] = _hash(line)
        _durable.write(_next(path), f"{canonical(line)}\n".encode())
        _finish(path, opened)


def _hash(line: Line) -> str:
    without = {name: x for name, x in line.items() if name != "hash"}
    return hashlib.sha256(canonical(without).encode()).hexdigest()


def _next(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.next")


def _content(opened: int) -> bytes:
    return os.pread(opened, os.fstat(opened).st_size, 0)


def _refuse_missing(path: pathlib.Path) -> None:
    """Refuse a line that was begun for a ledger that is no longer there."""
    # In this order: a ledger is there before any line of it is begun.
    if _next(path).exists() and not path.exists():
        raise ValueError(
            f"{path} is missing, but a line was begun for it ({_next(path)}): the "
            "ledger was removed or moved, and what it held is not known."
        )


def _split_lines(path: pathlib.Path, opened: int) -> bytes:
    """The whole lines and an interrupted one; see the head of this file."""
    content = _content(opened)
    whole = content[: content.rfind(b"\n") + 1]
    torn = content[len(whole) :]
    if not _next(path).exists():
        if torn:
            number = whole.count(b"\n") + 1
            raise ValueError(
                f"{path} ends within line {number}: it was cut, and what it held is "
                "not known."
            )
        return whole
    begun = _next(path).read_bytes()
    if begun.count(b"\n") != 1 or not begun.endswith(b"\n"):
        raise ValueError(
            f"{_next(path)} must be one whole line, as a write to {path} leaves it; it "
            "was cut or changed."
        )
    if whole.endswith(begun) and not torn:
        return whole
    # After a loss of power some file systems have zeros where bytes are missing.
    if not begun.startswith(torn.rstrip(b"\0")) or len(torn) > len(begun):
        raise ValueError(
            f"{path} ends within a line that is not the one in {_next(path)}: it was "
            "cut, and what it held is not known."
        )
    return whole + begun


def _finish(path: pathlib.Path, opened: int) -> None:
    """Put the line that was begun at the end, in place of any part of it."""
    begun, content = _next(path).read_bytes(), _content(opened)
    whole = content[: content.rfind(b"\n") + 1]
    if not whole.endswith(begun):
        if whole != content:
            os.ftruncate(opened, len(whole))
        with open(os.dup(opened), "ab") as file:
            file.write(begun)
    os.fsync(opened)
    _durable.sync(path.parent)
    _next(path).unlink()


def _verify_line(path: pathlib.Path, content: bytes) -> list[Line]:
    lines, last = [], NOTHING
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        line: Line = {}
        try:
            line = json.loads(text)
            changed = text != canonical(line).encode() or line["hash"] != _hash(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            changed = True
        if changed:
            raise ValueError(f"line {number} of {path} is not what was written.")
        if line.get("previous") != last:
            raise ValueError(
                f"line {number} of {path} does not follow the one before it: lines "
                "were taken out, put in or moved."
            )
        lines.append(line)
        last = line["hash"]
    return lines


@contextlib.contextmanager
def _open_locked(path: pathlib.Path, flags: int) -> Iterator[int]:
    """The open file, for one process at a time, which the owner alone reads."""
    opened = os.open(path, flags, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened
    finally:
        os.close(opened)  # and with it the lock
