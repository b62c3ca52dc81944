"""Training runs that die: whole pretrain_qwen.py processes, forked from one that has imported everything.

A run costs about two seconds instead of the ten that importing torch and Megatron takes. Each rank writes
its exact losses to a file as it logs them, and can be told to fail at a named place of a named step.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pretrain_qwen", "torch.distributed.checkpoint", "tensorboard"])
DEADLINE = 180  # seconds after which a run counts as hung


@dataclass(frozen=True)
class Fault:
    """What `rank` does when it reaches `place` of step `step`: see PLACES and ACTS."""

    rank: int
    step: int
    place: str
    act: str = "kill"


@dataclass
class Run:
    """The processes of one run; `folder` holds rank*.log and rank*.losses."""

    folder: Path
    processes: list = field(default_factory=list)

    def wait(self, *, stop_others: bool = True, deadline: float = DEADLINE) -> list[int]:
        """The exit codes, by rank. As torchrun does, one that fails is given a moment and the others end.

        Raises TimeoutError when the run has not ended after `deadline` seconds.
        """
        end = time.monotonic() + deadline
        while any(process.is_alive() for process in self.processes):
            if time.monotonic() > end:
                self.stop()
                raise TimeoutError(f"{self.folder}: no end after {deadline} s\n{self.log()[-2000:]}")
            if stop_others and any(process.exitcode for process in self.processes):
                self.processes[0].join(3)
                self.stop()
            time.sleep(0.02)
        codes = [process.exitcode for process in self.processes]
        self.stop()  # a rank that was killed may have left helpers behind, in its process group
        return codes

    def stop(self) -> None:
        """Ends what still runs, and the processes that Megatron started to write checkpoints."""
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            process.join()

    def log(self) -> str:
        """What all ranks printed."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("rank*.log")))

    def losses(self) -> dict[int, float]:
        """The exact loss of every step, as rank 0 logged it; a step done again counts with its last value."""
        lines = (self.folder / "rank0.losses").read_text().splitlines()
        return {int(step): float.fromhex(loss) for step, loss in (line.split() for line in lines)}


def start(folder: Path, ranks: int, flags: list[str], fault: Fault | None = None) -> Run:
    """Starts `ranks` processes of pretrain_qwen.py; they append to the files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = Run(folder)
    for rank in range(ranks):
        process = _context.Process(target=_train, args=(folder, rank, ranks, port, flags, fault))
        process.start()
        run.processes.append(process)
    return run


def _train(folder: Path, rank: int, ranks: int, port: int, flags: list[str], fault: Fault | None) -> None:
    os.setsid()
    log = open(folder / f"rank{rank}.log", "a", buffering=1)  # noqa: SIM115 - open for the life of the process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    sys.argv = ["pretrain_qwen.py", *flags]
    import torch

    import pretrain_qwen

    torch.set_num_threads(1)
    from tests.reliability.faults import install

    install(folder / f"rank{rank}.losses", fault if fault and fault.rank == rank else None)
    try:
        pretrain_qwen.main()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
        code = 1 if isinstance(stop.code, str) else stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    log.flush()
    os._exit(code)  # as a process of its own would: the fork's parent has nothing to clean up
