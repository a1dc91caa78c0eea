"""Files that clients upload and batches write, in memory; names of files are labels, never paths."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from time import time
from typing import Any
from uuid import uuid4

from experiments.serve.errors import ApiError

MAX_BYTES = 512 << 20
"""Bytes of all files."""
MAX_FILES = 10_000
MAX_NAME_CHARS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file. purpose: "batch" for the input of a batch, "batch_output" for what a batch writes."""

    file_id: str
    filename: str
    purpose: str
    created_at: int
    content: bytes

    def body(self) -> dict[str, Any]:
        """Returns the file object of the API."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": len(self.content),
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """The files of a server; they are gone when it ends."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._files: dict[str, StoredFile] = {}

    @property
    def files(self) -> list[StoredFile]:
        """All files, the oldest first."""
        return list(self._files.values())

    def add(self, content: bytes, filename: str, purpose: str) -> StoredFile:
        """Stores a file. Raises ApiError if there is no room for it."""
        if self._num_bytes + len(content) > self._max_bytes or len(self._files) >= MAX_FILES:
            raise ApiError(
                f"the server has room for {self._max_bytes} bytes in {MAX_FILES} files, and this file of "
                f"{len(content)} bytes does not fit; delete others",
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "file",
            )
        filename = "".join(char for char in filename if char.isprintable())[:MAX_NAME_CHARS]
        stored = StoredFile(
            file_id=f"file-{uuid4().hex}",
            filename=filename or "file.jsonl",
            purpose=purpose,
            created_at=int(time()),
            content=content,
        )
        self._files[stored.file_id] = stored
        self._num_bytes += len(content)
        return stored

    def get(self, file_id: str) -> StoredFile:
        """Returns a file. Raises ApiError if there is none with this id."""
        if file_id not in self._files:
            raise ApiError(f"No such File object: {file_id[:100]}", HTTPStatus.NOT_FOUND, "id")
        return self._files[file_id]

    def delete(self, file_id: str) -> None:
        """Deletes a file; a batch that reads it has it already. Raises ApiError if there is none."""
        self._num_bytes -= len(self.get(file_id).content)
        del self._files[file_id]
