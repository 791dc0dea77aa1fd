"""Files that are written atomically.

After a loss of power, such a file is complete or does not exist.
"""

import os
import pathlib


def write(path: pathlib.Path, content: bytes) -> None:
    """Atomically write a file that only its owner can read.

    A process that has opened the old file continues to read the old content.
    """
    new = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(new, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        # The content must be on the disk before the name refers to it.
        os.fsync(file.fileno())
    # The replacement is atomic: a reader sees the old content or the new content.
    os.replace(new, path)
    # The new name is on the disk only after its folder is synced.
    sync(path.parent)


def sync(path: pathlib.Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_all(folder: pathlib.Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for inner, _, files in os.walk(folder):
        for name in files:
            sync(pathlib.Path(inner, name))
        sync(pathlib.Path(inner))
