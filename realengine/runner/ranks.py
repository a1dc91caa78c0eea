"""The other tensor-parallel ranks: one process each, which runs rank 0's steps on its share of the model."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess

import numpy as np
import torch

from realengine.model.backend import choose_device
from realengine.runner.executor import DeviceLostError
from realengine.runner.parallel import StepChannel, check_alone, connect, disconnect, follow
from realengine.runner.rank import build_executor
from realengine.runner.work import Work
from realengine.serving.model import Model
from realengine.settings import EngineSettings

STOP_TIMEOUT_S = 30


class Ranks:
    """Ranks 1 to world_size - 1 of a model. group: rank 0's group."""

    def __init__(self, model: Model, settings: EngineSettings, device: torch.device) -> None:
        """Starts the processes, and returns when all are connected. device: rank 0's.

        Weights are loaded later.
        """
        world_size = settings.tensor_parallel_size
        if device.type == "cuda" and world_size > torch.cuda.device_count():
            raise ValueError(
                f"tensor_parallel_size={world_size}: must be <= {torch.cuda.device_count()}, the "
                "number of GPUs"
            )
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
        self.group = connect(0, world_size, device, address)
        self._channel = StepChannel(self.group)
        self._failed: str | None = None
        watch = threading.Thread(target=_watch, args=(weakref.ref(self), processes), daemon=True)
        watch.start()
        self.close = weakref.finalize(self, _close, self._channel, processes)
        """Ends the processes; also runs when this object is collected, or Python ends."""

    def lose(self, rank: int, exit_code: int | None) -> None:
        """Notes that a process has ended by itself, and ends the collectives that wait for it."""
        self._failed = f"rank {rank} has ended with exit code {exit_code}"
        self.group.abort()

    def check(self) -> None:
        """Raises DeviceLostError if a process has ended by itself: results since then are undefined."""
        if self._failed is not None:
            raise DeviceLostError(f"a tensor parallel rank has failed: {self._failed}")

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
    for rank, process in enumerate(processes, start=1):
        if process.sentinel in ended:
            process.join(STOP_TIMEOUT_S)
            alive.lose(rank, process.exitcode)
            return


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
    group = connect(rank, settings.tensor_parallel_size, device, address)
    executor, _ = build_executor(model, settings, device, group)

    def run(words: torch.Tensor) -> None:
        # Sent by rank 0 of this engine.
        executor.run(pickle.loads(words.numpy().tobytes()))  # nosec B301

    follow(StepChannel(group), run)
    disconnect()


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
