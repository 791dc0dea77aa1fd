"""Files that are whole or not there, also after a loss of power."""

import os
import pathlib


def write(path: pathlib.Path, content: bytes) -> None:
    """Write a file that none but its owner reads; whoever has it open keeps the old."""
    new = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(new, flags, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync(path.parent)


def sync(path: pathlib.Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_all(folder: pathlib.Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for found, _, files in os.walk(folder):
        for name in files:
            sync(pathlib.Path(found, name))
        sync(pathlib.Path(found))
