"""A gang of processes that stays up for a whole test session and runs ring attention on request.

`Gang` starts SIZE workers, one process group among them: NCCL when there is a GPU for each, else gloo. A
request names a ring shape, inner to outer; the workers form as many such rings side by side as fit, each with
data of its own, so that group ranks and global ranks differ in every ring but the first (as under data
parallelism).
"""

import math
import multiprocessing
import socket
import traceback

import torch
import torch.distributed as dist

SHAPES = ([1], [2], [3], [4], [2, 2], [1, 4], [4, 1])
MORE_SHAPES = ([8], [2, 3], [4, 2])  # for fewer cases: they take longer
SIZE = 8
TIMEOUT = 300  # seconds for one request; the slowest takes a few


class Gang:
    """SIZE worker processes. `run(shape, job)` returns one list of per-rank results for every ring."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self.pipes, self.processes = [], []
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(target=_worker, args=(rank, address, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, shape, job):
        """Runs `job(rings, rank, beside)` on every worker that has a place in a ring of `shape`.

        job is a picklable callable; beside is the number of the ring. Raises RuntimeError with the worker's
        traceback when one fails.
        """
        for pipe in self.pipes:
            pipe.send((list(shape), job))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT):
                raise RuntimeError(f"worker {rank} gave no answer in {TIMEOUT} s")
            answers.append(pipe.recv())
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            raise RuntimeError(failed[0])
        size = math.prod(shape)
        return [answers[first : first + size] for first in range(0, SIZE - size + 1, size)]

    def close(self):
        """Ends the workers."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _worker(rank: int, address: str, pipe) -> None:
    torch.set_num_threads(1)
    on_gpu = torch.cuda.device_count() >= SIZE
    if on_gpu:
        torch.cuda.set_device(rank)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=SIZE)
    rings = {tuple(shape): _rings(shape, rank) for shape in (*SHAPES, *MORE_SHAPES)}
    while (request := pipe.recv()) is not None:
        shape, job = request
        size = math.prod(shape)
        try:
            inside = rank < SIZE // size * size
            answer = job(rings[tuple(shape)], rank % size, rank // size) if inside else None
        except Exception:
            answer = f"rank {rank} of shape {shape}:\n{traceback.format_exc()}"
        pipe.send(answer)
    dist.destroy_process_group()


def _rings(shape, rank: int):
    """This worker's groups, inner to outer, in the ring it belongs to; all workers create all groups
    alike."""
    size, mine, stride = math.prod(shape), [], 1
    for length in shape:
        for first in range(0, SIZE // size * size, size):
            members = range(first, first + size)
            for head in members:
                if (head - first) // stride % length == 0:
                    ranks = [head + i * stride for i in range(length)]
                    group = dist.new_group(ranks)
                    if rank in ranks:
                        mine.append(group)
        stride *= length
    return mine
