"""A chain of JSON lines, each of which contains the hash of the line before it.

The lines are those of a ledger's file. `append` first writes a new line atomically to
another file beside the ledger, whose name ends in `.next`. `append` then writes the
line at the ledger's end, and finally removes `*.next`. A process that is killed between
the two writes therefore leaves the complete line in `*.next`, and the next reader
counts that line as written. A crash leaves one of the following states. Readers refuse
any other state:

- `*.next` does not exist, and the ledger is missing, empty or ends with a complete
  line;
- `*.next` is one complete line, and the ledger ends with the same line;
- `*.next` is one complete line that follows the ledger's last complete line. The rest
  of the ledger after its last complete line is empty, or is the beginning of the line
  in `*.next`, possibly followed by bytes of value 0.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from dpjax.checkpoint import _disk
from dpjax.checkpoint._record import canonical, digest_of

try:
    import fcntl
except ImportError:
    # Without fcntl, there is no lock, and the user must ensure that only one process at
    # a time uses a ledger.
    fcntl = None

Line = dict[str, Any]
# The first line contains this hash in place of the hash of a line before it.
NOTHING = "0" * 64


def read(path: pathlib.Path) -> list[Line]:
    """Read and verify all lines of a chain; a file that does not exist has no lines.

    Raises:
      ValueError: a line was changed, removed, inserted or moved; or the file and the
        file `*.next` beside it, to which `append` first writes a new line, are in a
        state that neither a completed nor an interrupted write leaves.
    """
    _refuse_missing(path)
    if not path.exists():
        return []
    with _open_locked(path, os.O_RDONLY) as opened:
        return _verify_lines(path, _read_complete_lines(path, opened))


def append(path: pathlib.Path, make: Callable[[list[Line]], Line | None]) -> None:
    """Append a line that depends on the existing lines, and sync the file to the disk.

    Args:
      path: the ledger's file.
      make: a function from the existing lines to the new line, or to None for no line.
        The file is locked while `make` runs, where `fcntl` exists.

    Raises:
      ValueError: as for `read`.
    """
    _refuse_missing(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    with _open_locked(path, flags) as opened:
        lines = _verify_lines(path, _read_complete_lines(path, opened))
        if _next(path).exists():
            _finish(path, opened)  # completes the write of a process that was killed
        line = make(lines)
        if line is None:
            return
        line["previous"] = lines[-1]["hash"] if lines else NOTHING
        line["hash"] = _hash(line)
        _disk.write(_next(path), f"{canonical(line)}\n".encode())
        _finish(path, opened)


def _hash(line: Line) -> str:
    return digest_of({name: x for name, x in line.items() if name != "hash"})


def _next(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.next")


def _content(opened: int) -> bytes:
    return os.pread(opened, os.fstat(opened).st_size, 0)


def _refuse_missing(path: pathlib.Path) -> None:
    """Raise a ValueError if a ledger's file is missing although `*.next` exists.

    `*.next` is the file beside the ledger to which `append` first writes a new line.
    """
    # The test for `*.next` is first. A process creates the ledger before it begins a
    # line, so that another process at work cannot cause an error here.
    if _next(path).exists() and not path.exists():
        raise ValueError(
            f"{path} is missing, but {_next(path)} shows that a line was begun in "
            "this ledger. The ledger was removed or moved, and its lines are not "
            "known."
        )


def _read_complete_lines(path: pathlib.Path, opened: int) -> bytes:
    """Return the bytes of all complete lines of a ledger.

    `opened` is the descriptor of the ledger's file. If an interrupted write left a
    complete line only in the file `*.next` beside the ledger, the result includes this
    line.

    Raises:
      ValueError: the files are in a state that no interrupted write leaves.
    """
    content = _content(opened)
    # Every complete line ends with a newline; the rest is a partial line.
    whole = content[: content.rfind(b"\n") + 1]
    torn = content[len(whole) :]
    if not _next(path).exists():
        if torn:
            number = whole.count(b"\n") + 1
            raise ValueError(
                f"{path} ends within line {number}: the file was cut, and the lost "
                "lines are not known."
            )
        return whole
    begun = _next(path).read_bytes()
    if begun.count(b"\n") != 1 or not begun.endswith(b"\n"):
        raise ValueError(
            f"{_next(path)} must contain one whole line, as a write to {path} leaves "
            f"it; {_next(path)} was cut or changed."
        )
    # The append is complete, and only the removal of `*.next` is missing.
    if whole.endswith(begun) and not torn:
        return whole
    # After a loss of power, some file systems fill unwritten bytes with zeros.
    if not begun.startswith(torn.rstrip(b"\0")) or len(torn) > len(begun):
        raise ValueError(
            f"{path} ends within a line that differs from the line in {_next(path)}: "
            "the file was cut, and the lost lines are not known."
        )
    return whole + begun


def _finish(path: pathlib.Path, opened: int) -> None:
    """Append the line in the file `*.next` to the ledger, and then remove `*.next`.

    `opened` is the descriptor of the ledger's file. If an interrupted write left a part
    of the line at the ledger's end, the complete line replaces this part. If the ledger
    already ends with the line, nothing is appended.
    """
    begun, content = _next(path).read_bytes(), _content(opened)
    whole = content[: content.rfind(b"\n") + 1]
    # A process that was killed may already have appended the line in whole or in part.
    if not whole.endswith(begun):
        if whole != content:
            os.ftruncate(opened, len(whole))
        # Closing the file object closes its descriptor. The duplicate leaves the locked
        # descriptor open.
        with open(os.dup(opened), "ab") as file:
            file.write(begun)
    # Remove `*.next` only after the ledger's copy is on the disk.
    os.fsync(opened)
    _disk.sync(path.parent)
    _next(path).unlink()


def _verify_lines(path: pathlib.Path, content: bytes) -> list[Line]:
    lines, last = [], NOTHING
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        line: Line = {}
        try:
            line = json.loads(text)
            # The text must be canonical; otherwise, two texts could have the same hash.
            changed = text != canonical(line).encode() or line["hash"] != _hash(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            changed = True
        if changed:
            raise ValueError(
                f"line {number} of {path} differs from the line that was written."
            )
        if line.get("previous") != last:
            raise ValueError(
                f"line {number} of {path} does not follow the previous line: lines "
                "were removed, inserted or moved."
            )
        lines.append(line)
        last = line["hash"]
    return lines


@contextlib.contextmanager
def _open_locked(path: pathlib.Path, flags: int) -> Iterator[int]:
    """Open a file, lock it exclusively where `fcntl` exists, and yield its descriptor.

    If `flags` create the file, only its owner can access the file.
    """
    # Readers lock as well: a reader must not see a line that is being written.
    opened = os.open(path, flags, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened
    finally:
        os.close(opened)  # also releases the lock
