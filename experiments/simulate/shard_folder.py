"""The finished shards of a run that goes on, in the folder `shards` of its results.

`shards.json` says which run it is, and N.zip is shard N. A file gets its name when it is complete, and only
the command itself writes, so a shard counts once however often it was begun. The folder is removed when the
result of the whole run is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.app.job import CannotWriteError
from experiments.app.run_folder import UNFINISHED, lock_folder
from sim.report.files import config_digest, write_whole
from sim.settings.errors import ConfigError
from sim.settings.recorded import read_json_object
from sim.shards.shard_file import DamagedShardError, ShardFile

NOT_OF_THE_RUN = ("launcher", "output")
"""Root keys that may differ when a run is continued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFolder:
    """The folder of the shards of a run. command: the command that continues it, for messages."""

    path: Path
    num_shards: int
    command: str

    @classmethod
    @contextmanager
    def opened(
        cls, run_folder: Path, config: Mapping[str, Any], num_shards: int, code: str, command: str
    ) -> Iterator[ShardFolder]:
        """Yields the folder, which no other process has meanwhile.

        num_shards: of a new run; a run that is continued keeps its own. The folder is removed if no shard is
        in it at the end. Raises ConfigError for shards of another run, and OSError if the folder cannot be
        written.
        """
        about_file = run_folder / UNFINISHED
        path = about_file.parent
        path.mkdir(parents=True, exist_ok=True)
        run = {
            name: config_digest({name: value}) for name, value in config.items() if name not in NOT_OF_THE_RUN
        }
        about: dict[str, Any] = {"run": run, "code": code, "num_shards": num_shards}
        with lock_folder(path):
            if about_file.exists():
                found = read_json_object(about_file)
                if other := _other(found, about):
                    raise ConfigError(
                        f"{path}: holds shards of a run with other {other}; choose another hydra.run.dir, or "
                        "add overwrite=true to begin anew"
                    )
                about = found
            else:
                for rest in path.glob("*.zip"):  # a command was killed while it removed them
                    rest.unlink()
                write_whole(about_file, f"{json.dumps(about)}\n")
            for part in run_folder.glob(".*.part"):  # a command was killed while it wrote the result
                part.unlink()
            folder = cls(path=path, num_shards=int(about["num_shards"]), command=command)
            try:
                yield folder
            finally:
                if len(folder.missing()) == folder.num_shards:
                    folder.remove()

    def missing(self) -> list[int]:
        """Returns the shards that have not been simulated, or whose file is damaged."""
        return [index for index in range(self.num_shards) if not self._file(index).exists()]

    def keep(self, index: int, content: bytes) -> None:
        """Writes the file of a shard. Raises CannotWriteError, after which the other shards are kept."""
        try:
            write_whole(self._file(index), content)
        except OSError as error:
            num_kept = self.num_shards - len(self.missing())
            raise CannotWriteError(
                f"{error.filename}: {error.strerror}; {num_kept:,} of {self.num_shards:,} shards are kept; "
                f"make room, then continue: {self.command}"
            ) from error

    @contextmanager
    def files(self) -> Iterator[Iterator[ShardFile]]:
        """Yields the files of all shards in order, each of which is open until the next one is read.

        Raises ConfigError if reading in the context finds the last one damaged, and removes it.
        """
        last: Path | None = None

        def opened() -> Iterator[ShardFile]:
            nonlocal last
            for index in range(self.num_shards):
                last = self._file(index)
                with closing(ShardFile(last)) as file:
                    yield file

        try:
            yield opened()
        except DamagedShardError as error:
            assert last is not None
            last.unlink()
            raise ConfigError(f"{last}: is damaged, and was removed; continue: {self.command}") from error

    def remove(self) -> None:
        """Removes the folder, as its shards are in the result; its first file first, so that it is no run."""
        with suppress(OSError):
            (self.path / UNFINISHED.name).unlink()
            shutil.rmtree(self.path)

    def _file(self, index: int) -> Path:
        return self.path / f"{index}.zip"


def _other(found: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Returns what the run of the shards has otherwise than this one, such as the names of settings."""
    if found.get("code") != about["code"]:
        return "code of windtunnel"
    theirs, own = found["run"], about["run"]
    return ", ".join(name for name in {**own, **theirs} if own.get(name) != theirs.get(name))
