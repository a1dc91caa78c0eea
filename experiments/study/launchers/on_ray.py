"""`launcher=ray`: workers that stay alive, one per CPU of a Ray cluster, on any of its machines.

The machines need the same windtunnel but no shared folder: results return over the network.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from experiments.study.launchers.importing import passed_on, python_path
from experiments.study.launchers.launcher import PATIENCE_S, Launcher, Workers
from experiments.study.launchers.outcome import CannotLaunchError, Outcome, R, T, WorkerDiedError, attempt
from fieldlimits import Gt, PositiveInt, Unit, check

HERE = (None, "local")


@dataclass(frozen=True, kw_only=True, slots=True)
class OnRay(Launcher):
    """An existing cluster, or one that is started on this machine and ends with the command."""

    address: str | None = None
    """HOST:PORT of its head, `auto`, or ray://HOST:PORT; None: start one on this machine."""
    jobs: Annotated[PositiveInt | None, "null for one per CPU of the cluster"] = None
    """Number of workers; None: one per CPU of the cluster."""
    connect_s: Annotated[float, Gt(0), Unit("s")] = 5.0
    """Longest wait in seconds for the head to respond."""

    def __post_init__(self) -> None:
        check(self)
        if self.address not in (*HERE, "auto"):
            _host_and_port(str(self.address))

    def workers(self, work: Callable[[T], R], num_tasks: int | None) -> Workers[T, R]:
        """Returns the workers, see `Launcher`."""
        ray = _ray()
        self._connect(ray)
        return _Actors(ray, work, self.jobs)

    def _connect(self, ray: Any) -> None:
        """Connects to the cluster. Raises CannotLaunchError if it does not respond."""
        if self.address not in (*HERE, "auto"):
            host, port = _host_and_port(str(self.address))
            try:  # ray itself would retry for minutes, or end the process
                socket.create_connection((host, port), timeout=self.connect_s).close()
            except OSError as error:
                raise CannotLaunchError(
                    f"launcher.address={self.address}: no Ray cluster responds there ({error}); start one "
                    "with `ray start --head`, or omit the address to start one on this machine"
                ) from error
        try:
            with passed_on():
                ray.init(
                    address=self.address or "local",
                    num_cpus=self.jobs if self.address in HERE else None,
                    include_dashboard=False if self.address in HERE else None,
                    log_to_driver=False,
                    logging_level="error",
                    runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
                )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            first = str(error).strip().partition("\n")[0].rstrip(".")
            raise CannotLaunchError(f"launcher.address={self.address or 'null'}: {first}") from error


class _Actors(Workers[T, R]):
    """Actors of the cluster with one task at a time each; one that dies loses its task and is replaced."""

    def __init__(self, ray: Any, work: Callable[[T], R], jobs: int | None) -> None:
        self._ray, self._work = ray, work
        self._actor = ray.remote(num_cpus=1, max_restarts=0)(_Worker)
        self.room = max(1, jobs or int(ray.cluster_resources().get("CPU", 1)))
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[int, Any]] = {}

    def submit(self, index: int, task: T) -> None:
        worker = self._idle.pop() if self._idle else self._actor.remote()
        self._busy[worker.attempt.remote(self._work, task)] = (index, worker)

    def ended(self) -> Iterator[Outcome[R]]:
        ready, _ = self._ray.wait(list(self._busy), num_returns=1, timeout=PATIENCE_S)
        for reference in ready:
            index, worker = self._busy.pop(reference)
            try:
                result, error = self._ray.get(reference)
                self._idle.append(worker)
            except self._ray.exceptions.RayError as lost:
                _check_import(str(lost))
                reason = str(lost).strip().partition("\n")[0]
                result, error = None, WorkerDiedError(f"its Ray worker died: {reason}")
            yield Outcome(index, result, error)

    def end(self, *, whole: bool) -> None:
        self._ray.shutdown()


class _Worker:
    """Runs tasks in a process of the cluster that stays alive."""

    def attempt(self, work: Callable[[T], R], task: T) -> tuple[R | None, Exception | None]:
        return attempt(work, task)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise CannotLaunchError("launcher=ray: needs Ray: pip install 'windtunnel[ray]'") from error


def _check_import(text: str) -> None:
    """Raises CannotLaunchError if an error of a worker says that it has no windtunnel, or another one."""
    last = text.strip().rpartition("\n")[2]
    if last.startswith(("ModuleNotFoundError", "ImportError", "AttributeError: Can't get attribute")):
        raise CannotLaunchError(
            f"launcher=ray: a worker cannot import the code of this command ({last}); install the same "
            "version of windtunnel on all machines"
        )


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"address={address}: must be HOST:PORT, ray://HOST:PORT, auto or null")
    return host, int(port)
