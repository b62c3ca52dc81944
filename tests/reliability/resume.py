"""What the resume tests and the soak script share: runs that save, their deaths, and what comes after."""

import time
from pathlib import Path

from tests.reliability.conftest import STEPS, Site
from tests.reliability.nursery import DEADLINE, Run

EVERY = 2  # steps between checkpoints


def saving(site: Site, name: str, every: int = EVERY) -> list[str]:
    """Flags that make run `name` save, and go on from what it saved: those of a job that restarts itself."""
    folder = str(site.folder / name / "saved")
    return ["--save", folder, "--load", folder, "--save-interval", str(every)]


def latest(folder: Path) -> int:
    """The iteration that a folder's tracker names; 0 when there is none."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.is_file() else 0


def kill_while_saving(site: Site, name: str, flags=(), *, step: int, rank: int, delay=0.0, **how) -> Path:
    """Kills `rank` `delay` seconds after the checkpoint of `step` appears; the folder of that checkpoint."""
    run = site.start(name, [*saving(site, name), *flags], **how)
    torn = site.folder / name / "saved" / f"iter_{step:07d}"
    end = time.monotonic() + DEADLINE
    while not torn.is_dir() and run.processes[rank].is_alive() and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(delay)
    run.processes[rank].kill()
    run.wait()
    return torn


def go_on(site: Site, name: str, flags=(), **how) -> Run:
    """The same command again, to its end."""
    run = site.start(name, [*saving(site, name), *flags], **how)
    codes = run.wait()
    assert not any(codes), run.log()[-4000:]
    return run


def check_continues(site: Site, name: str, flags=(), *, first: int, layout: str = "cp2") -> None:
    """Restarts run `name`, which must go on with step `first`; every loss it ever had is the unbroken one."""
    before = site.folder / name / "rank0.losses"
    done = len(before.read_text().splitlines()) if before.is_file() else 0
    run = go_on(site, name, flags, layout=layout)
    again = [int(line.split()[0]) for line in before.read_text().splitlines()[done:]]
    assert again == list(range(first, STEPS + 1))
    assert run.losses() == site.unbroken(layout)
