"""The hub's local cache as `hf download` lays it out: refs, snapshots of links, blobs by their contents."""

import hashlib
import os
import socket

from huggingface_hub import constants


class HubCache:
    """A cache in ``directory`` that stands in for the user's own; a connection fails the test."""

    def __init__(self, directory, monkeypatch):
        self.directory = directory
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory))
        monkeypatch.setattr(socket.socket, "connect", self._refuse)

    @staticmethod
    def _refuse(*_):
        raise AssertionError("the network was asked")

    def add(self, kind, name, files, revision="main"):
        """Put a commit with ``files`` (path -> bytes) into the cache; returns its snapshot directory."""
        home = self.directory / f"{kind}s--{name.replace('/', '--')}"
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        snapshot = home / "snapshots" / commit
        for path, content in files.items():
            blob = home / "blobs" / hashlib.sha256(content).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(content)
            link = snapshot / path
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(os.path.relpath(blob, link.parent))
        reference = home / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
        return snapshot


def files_of(directory, *leave_out):
    """Path -> bytes of a directory's files."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name not in leave_out)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}
