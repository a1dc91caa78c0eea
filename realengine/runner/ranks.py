"""The other ranks of a model: one process each, which runs rank 0's steps on its share of the model."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess

import numpy as np
import torch

from realengine.model.backend import choose_device
from realengine.runner.executor import DeviceLostError, Executor
from realengine.runner.graphs import Drawn, Logprobs
from realengine.runner.launch import Result
from realengine.runner.parallel import Place, StepChannel, check_alone, connect, disconnect, follow
from realengine.runner.rank import build_executor
from realengine.runner.work import Work
from realengine.serving.model import Model
from realengine.settings import SEVERAL, EngineSettings

STOP_TIMEOUT_S = 30
CAUSE_TIMEOUT_S = 5
"""Time after an error of a connection within which the process is found that has ended."""


class Ranks:
    """Ranks 1 to world_size - 1 of a model. mesh: rank 0's groups."""

    def __init__(self, model: Model, settings: EngineSettings, device: torch.device) -> None:
        """Starts the processes, and returns when all are connected. device: rank 0's.

        Weights are loaded later.
        """
        self._layout = layout = settings.layout
        world_size = layout.num_devices
        if device.type == "cuda" and world_size > torch.cuda.device_count():
            named = {name: getattr(layout, name) for name in SEVERAL}
            sizes = " x ".join(f"{name}={size}" for name, size in named.items() if size > 1)
            raise ValueError(f"{sizes}: must be <= {torch.cuda.device_count()}, the number of GPUs")
        check_alone()
        address = f"tcp://127.0.0.1:{_free_port()}"
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_serve, args=(rank, address, model, settings), daemon=True)
            for rank in range(1, world_size)
        ]
        for process in processes:
            process.start()
        self._processes = processes
        self.mesh = connect(0, layout, model.architecture.num_layers, device, address)
        self._channel = StepChannel(self.mesh.everyone)
        self._ended = threading.Event()  # that a process has ended by itself is noted
        self._failed: str | None = None
        watch = threading.Thread(target=_watch, args=(weakref.ref(self), processes), daemon=True)
        watch.start()
        self.close = weakref.finalize(self, _close, self._channel, processes)
        """Ends the processes; also runs when this object is collected, or Python ends."""

    def execute(self, executor: Executor, work: Work) -> Result:
        """Has all ranks execute a step. executor: rank 0's. Raises DeviceLostError if a rank has failed."""
        drawn: Drawn | None = None
        with self._failing():
            self.check()
            self.send(work)
            drawn = executor.run(work.of_rank(0))
        if self.mesh.answers and work.draws:
            return partial(self._receive, drawn)
        return None if drawn is None else drawn._replace(check=self.check)

    def _receive(self, own: Drawn | None) -> list[Drawn | None]:
        """Waits for what the ranks have drawn in the oldest step that is not read. own: rank 0's part."""
        found: list[Drawn | None] = []
        with self._failing():
            for answers in self.mesh.answers:
                found.append(own if answers is None else answers.receive())
        return found

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Ends all processes after an error: the others may be a step ahead, or wait forever."""
        try:
            yield
        except DeviceLostError:
            self.kill()
            raise
        except RuntimeError as error:
            self._ended.wait(CAUSE_TIMEOUT_S)
            cause = self._failed or str(error)
            self.kill()
            raise DeviceLostError(f"a rank of the engine has failed: {cause}") from error

    def lose(self, rank: int, exit_code: int | None) -> None:
        """Notes that a process has ended by itself, and ends the collectives that wait for it."""
        self._failed = f"{Place.name_of(rank, self._layout)} has ended with exit code {exit_code}"
        self._ended.set()
        self.mesh.abort()

    def check(self) -> None:
        """Raises DeviceLostError if a process has ended by itself: results since then are undefined."""
        if self._failed is not None:
            raise DeviceLostError(f"a rank of the engine has failed: {self._failed}")

    def kill(self) -> None:
        """Terminates the processes whatever they do, and leaves the group: a new engine can have one."""
        if self.close.detach() is None:
            return
        self._failed = self._failed or "its processes were ended after an error"
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(STOP_TIMEOUT_S)
        with suppress(RuntimeError):  # a communicator that has failed may refuse
            disconnect()

    def send(self, work: Work) -> None:
        """Sends a step, which all ranks execute."""
        pickled = pickle.dumps(work, protocol=pickle.HIGHEST_PROTOCOL)
        padded = pickled + bytes(-len(pickled) % 4)
        self._channel.send(torch.from_numpy(np.frombuffer(padded, np.int32).copy()))


def _watch(ranks: weakref.ref[Ranks], processes: Sequence[BaseProcess]) -> None:
    """Waits until a process ends, and tells the ranks unless they have been closed."""
    ended = connection.wait([process.sentinel for process in processes])
    alive = ranks()
    if alive is None or not alive.close.alive:
        return
    found = []
    for rank, process in enumerate(processes, start=1):
        if process.sentinel in ended:
            process.join(STOP_TIMEOUT_S)
            found.append((process.exitcode or 0, rank))
    exit_code, rank = min(found)  # those that were killed have negative codes; others may have lost them
    alive.lose(rank, exit_code)


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Returns the device of a rank, given rank 0's."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", (device.index or 0) + rank)


def _serve(rank: int, address: str, model: Model, settings: EngineSettings) -> None:
    device = rank_device(choose_device(settings.device), rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    mesh = connect(rank, settings.layout, model.architecture.num_layers, device, address)
    executor, _ = build_executor(model, settings, device, mesh)

    def run(words: torch.Tensor) -> None:
        # Sent by rank 0 of this engine.
        work: Work = pickle.loads(words.numpy().tobytes())  # nosec B301
        drawn = executor.run(work.of_rank(mesh.data.rank))
        for answers in mesh.answers if work.draws else ():
            assert answers is not None
            answers.send(None if drawn is None else _on_cpu(drawn))

    follow(StepChannel(mesh.everyone), run)
    disconnect()


def _on_cpu(drawn: Drawn) -> Drawn:
    """Waits for what was drawn, and returns it on the host."""

    def moved(logprobs: Logprobs | None) -> Logprobs | None:
        return None if logprobs is None else Logprobs(*(part.cpu() for part in logprobs))

    accepted_IS = drawn.accepted_IS
    return Drawn(
        drawn.tokens_IS.cpu(),
        moved(drawn.logprobs),
        None if accepted_IS is None else accepted_IS.cpu(),
        prompt=moved(drawn.prompt),
    )


def _close(channel: StepChannel, processes: Sequence[BaseProcess]) -> None:
    with suppress(RuntimeError):  # a failed rank cannot receive the stop
        channel.stop()
    for process in processes:
        process.join(STOP_TIMEOUT_S)
        if process.is_alive():
            process.terminate()
    disconnect()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
