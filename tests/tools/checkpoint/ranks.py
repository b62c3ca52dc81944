"""Processes that stay up for a test session and run Megatron jobs together, as a launcher would start them.

Importing torch, Megatron and transformers costs seconds a process, so it happens once and not once a layout.
"""

import contextlib
import io
import multiprocessing.connection
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

SIZE = 4
TIMEOUT = 240  # seconds for one job


class Ranks:
    """`size` processes; their output goes to `folder`/rank*.log."""

    def __init__(self, folder: Path, size: int = SIZE):
        context = multiprocessing.get_context("spawn")
        self.workers = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_worker, args=(rank, folder / f"rank{rank}.log", there))
            process.start()
            there.close()
            self.workers.append((process, here))

    def run(self, count: int, job, *args) -> list:
        """job(*args) on the first `count` processes; their answers. Raises RuntimeError with a traceback."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pipes = [pipe for _, pipe in self.workers[:count]]
        for pipe in pipes:
            pipe.send((count, port, job, args))
        answers, waiting = {}, list(pipes)
        while waiting:
            ready = multiprocessing.connection.wait(waiting, TIMEOUT)
            if not ready:
                raise RuntimeError(f"no answer in {TIMEOUT} s")
            for pipe in ready:
                failed, answers[pipe] = pipe.recv()
                if failed:  # the others wait for it
                    raise RuntimeError(answers[pipe])
                waiting.remove(pipe)
        return [answers[pipe] for pipe in pipes]

    def stop(self) -> None:
        """Ends the processes, whatever they do, and those that Megatron started from them."""
        for _, pipe in self.workers:
            pipe.close()
        for process, _ in self.workers:
            process.join(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def _worker(rank: int, log: Path, pipe) -> None:
    os.setsid()
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115 - open for the life of the process
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            count, port, job, args = pipe.recv()
        except EOFError:  # the test session is gone
            return
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        try:
            pipe.send((False, job(*args)))
        except BaseException:  # a run that refuses its arguments raises SystemExit
            pipe.send((True, f"rank {rank}:\n{traceback.format_exc()}"))


def train(flags: list[str]) -> None:
    """One run of pretrain_qwen.py with these flags."""
    from tests.model.trainers import _nothing, _train

    _train("pretrain_qwen", flags, _nothing)


def convert_in_process(words: list[str]) -> str:
    """What a command line of convert_qwen.py prints."""
    from tools.checkpoint.convert_qwen import parse_arguments, run

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(parse_arguments(words))
    return printed.getvalue()
