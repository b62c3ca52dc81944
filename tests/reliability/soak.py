"""Many deaths and many steps: what takes too long for CI.

python -m tests.reliability.soak --kills 20          deaths at random points, sync and async saving
python -m tests.reliability.soak --steps 2000        one long run; memory, descriptors and shared memory
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy

from tests.reliability.conftest import STEPS, Site
from tests.reliability.nursery import Fault
from tests.reliability.resume import check_continues, kill_while_saving, latest, saving

PLACES = ("forward", "backward", "optimizer", "save")
SAMPLES = 200  # of a long run


def kills(site: Site, number: int, rng: random.Random) -> None:
    """Kills a random rank at `number` random points, restarts each run and compares its losses."""
    site.unbroken()
    for at in range(number):
        name, place, rank = f"kill{at}", PLACES[at % len(PLACES)], rng.randrange(2)
        begun = time.monotonic()
        if place == "save":
            step, delay = rng.choice((2, 4, 6)), rng.random() * 0.5
            kill_while_saving(site, name, step=step, rank=rank, delay=delay)
            what = f"{delay:.2f} s into the save of step {step}"
        else:
            step = rng.randrange(1, STEPS + 1)
            site.start(name, saving(site, name), fault=Fault(rank, step, place)).wait()
            what = f"{place} of step {step}"
        newest = latest(site.folder / name / "saved")
        check_continues(site, name, first=newest + 1)
        say(
            f"kill {at + 1}: rank {rank}, {what}; went on from {newest}, all losses bitwise equal "
            f"({time.monotonic() - begun:.0f} s)"
        )


def soak(site: Site, steps: int) -> None:
    """One run of `steps` steps; memory, descriptors and shared memory of every rank over its second half."""
    shared = len(list(Path("/dev/shm").iterdir()))
    run = site.start("soak", ["--save", str(site.folder / "soak" / "saved")], steps=steps)
    seen: list[list[tuple]] = [[] for _ in run.processes]
    losses = site.folder / "soak" / "rank0.losses"
    while any(process.is_alive() for process in run.processes):
        done = losses.read_bytes().count(b"\n") if losses.is_file() else 0
        for process, samples in zip(run.processes, seen, strict=True):
            if done > (samples[-1][0] if samples else 0) + steps // SAMPLES:
                samples.append((done, *usage(process.pid)))
        time.sleep(0.1)
    if any(run.wait()):
        sys.exit(run.log()[-3000:])
    for rank, samples in enumerate(seen):
        step, memory, files = numpy.array([row for row in samples if row[0] > steps // 2 and row[1]]).T
        slope, start = numpy.polyfit(step, memory, 1)
        noise = numpy.std(memory - (slope * step + start))
        say(
            f"rank {rank}: {memory.mean():.1f} MB, slope {slope * 1000:.3f} MB per 1000 steps over steps "
            f"{int(step[0])} .. {int(step[-1])}, noise {noise:.3f} MB; descriptors {int(files.min())} .. "
            f"{int(files.max())}"
        )
    say(f"{steps} steps; files in /dev/shm: {shared} before, {len(list(Path('/dev/shm').iterdir()))} after")


def usage(pid: int) -> tuple[float, int]:
    """(resident memory in MB, open descriptors) of a process; zeros when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * 4096 / 1e6, len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (OSError, IndexError):
        return 0.0, 0


def say(line: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=0, help="random deaths")
    parser.add_argument("--steps", type=int, default=0, help="steps of the long run")
    parser.add_argument("--seed", type=int, default=0, help="of the random points (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        if args.kills:
            kills(site, args.kills, random.Random(args.seed))
        if args.steps:
            soak(site, args.steps)


if __name__ == "__main__":
    main()
