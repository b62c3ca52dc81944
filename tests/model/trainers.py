"""Processes that stay up for a test session and run the whole of pretrain_qwen.py on request.

`Trainers.run(ranks, flags)` gives the first `ranks` processes a fresh environment, process group and Megatron
state, as a launcher would, and lets each call `pretrain_qwen.main()`, or the main of another script.
Importing torch and Megatron costs seconds a process, so it happens once and not once per parallel layout.
"""

import contextlib
import importlib
import multiprocessing.connection
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

SIZE = 4
TIMEOUT = 240  # seconds for one run; the slowest takes about thirty


class Trainers:
    """`size` training processes; their output goes to `folder`/rank*.log."""

    def __init__(self, folder: Path, size: int = SIZE):
        self.folder, self.size = folder, size
        self.workers = []

    def start(self) -> None:
        """Starts the processes."""
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_worker, args=(rank, self.folder / f"rank{rank}.log", there))
            process.start()
            there.close()
            self.workers.append((process, here))

    def run(
        self, ranks: int, flags: list[str], change: str | None = None, script: str = "pretrain_qwen"
    ) -> None:
        """Runs a script (a module with a main) with `flags` on `ranks` processes; `change` names one of
        CHANGES.

        Raises RuntimeError with the traceback of the rank that failed first; the processes are then started
        anew.
        """
        if not self.workers:
            self.start()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        involved = [pipe for _, pipe in self.workers[:ranks]]
        for pipe in involved:
            pipe.send((ranks, port, flags, change, script))
        waiting = list(involved)
        while waiting:
            ready = multiprocessing.connection.wait(waiting, TIMEOUT)
            answers = [pipe.recv() for pipe in ready] or [f"no answer in {TIMEOUT} s"]
            failed = [answer for answer in answers if answer is not None]
            if failed:
                self.stop()
                raise RuntimeError(f"{script} {' '.join(flags)}\n{failed[0]}")
            waiting = [pipe for pipe in waiting if pipe not in ready]

    def stop(self) -> None:
        """Ends the processes, whatever they do, and those that Megatron started from them to write
        checkpoints."""
        for _, pipe in self.workers:
            pipe.close()
        for process, _ in self.workers:
            process.join(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        self.workers = []


def _worker(rank: int, log: Path, pipe) -> None:
    os.setsid()
    sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115 - open for the life of the process
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            ranks, port, flags, change, script = pipe.recv()
        except EOFError:  # the test session is gone
            return
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        try:
            _train(script, flags, CHANGES[change])
            pipe.send(None)
        except BaseException:  # a run that refuses its arguments raises SystemExit
            pipe.send(f"rank {rank}:\n{traceback.format_exc()}")


def _train(script: str, flags: list[str], change) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.training import get_tensorboard_writer, training

    main = importlib.import_module(script).main
    sys.argv = [f"{script}.py", *flags]
    undo = change()
    try:
        main()
        if get_tensorboard_writer():
            get_tensorboard_writer().close()
    finally:
        undo()
        training.destroy_global_state()
        training._STARTUP_TIMESTAMPS.update(dict.fromkeys(training._STARTUP_TIMESTAMPS))
        parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _nothing():
    return lambda: None


def _note_masks():
    """Writes the attended pairs of every head, counted in the masks, of all indices of a logged step."""
    import json

    from megatron.training import get_args

    from megatron_mtrain import core_attention

    ours = core_attention.build_index

    def build_index(config, query, key, layout, rings, layer, **more):
        index, args = ours(config, query, key, layout, rings, layer, **more), get_args()
        if (args.curr_iteration + 1) % args.log_interval == 0:
            pairs = index.complete(rings).dense_mask().sum((0, 2, 3))
            with open(Path(args.tensorboard_dir) / f"masks{args.rank}", "a") as file:
                file.write(json.dumps([layer, pairs.tolist()]) + "\n")
        return index

    core_attention.build_index = build_index
    return lambda: setattr(core_attention, "build_index", ours)


def _megatron_rope():
    """Leaves Megatron's own rotary positions, in zigzag order, in place."""
    import megatron_mtrain.model as model

    ours, model.use_layout_positions = model.use_layout_positions, lambda models, attention: models
    return lambda: setattr(model, "use_layout_positions", ours)


def _megatron_attention():
    """Leaves Megatron's whole model as it is: its own layers, core attention and rotary positions."""
    import pretrain_qwen

    ours, pretrain_qwen.use_sparse_attention = (
        pretrain_qwen.use_sparse_attention,
        lambda config, attention: None,
    )
    return lambda: setattr(pretrain_qwen, "use_sparse_attention", ours)


def _note_losses():
    """Writes the tokens and the losses of every token of this rank next to the TensorBoard logs."""
    import torch
    from megatron.core import parallel_state
    from megatron.training import get_args

    import pretrain_qwen

    next_batch, loss_sum = pretrain_qwen.next_batch, pretrain_qwen.loss_sum
    batches, noted = [], []

    def noting_batch(*args, **kwargs):
        batches.append(next_batch(*args, **kwargs))
        return batches[-1]

    def noting_loss(loss_mask, losses):
        noted.append((batches[-1]["tokens"], losses.detach()))
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            rank = parallel_state.get_context_parallel_rank()
            torch.save(noted, Path(get_args().tensorboard_dir, f"losses{rank}.pt"))
        return loss_sum(loss_mask, losses)

    pretrain_qwen.next_batch, pretrain_qwen.loss_sum = noting_batch, noting_loss

    def undo():
        pretrain_qwen.next_batch, pretrain_qwen.loss_sum = next_batch, loss_sum

    return undo


CHANGES = {
    None: _nothing,
    "megatron_rope": _megatron_rope,
    "megatron_attention": _megatron_attention,
    "note_losses": _note_losses,
    "note_masks": _note_masks,
}
