"""kill -9 of any rank at any point, then the same command again: the losses are those of the unbroken run.

Bitwise, on the same layout on CPU, with and without --deterministic-mode.
"""

import signal

import pytest

from tests.reliability.nursery import Fault
from tests.reliability.resume import check_continues, kill_while_saving, latest, saving

ASYNC = ["--async-save", "--use-persistent-ckpt-worker"]
FAULTS = {
    "forward": Fault(1, 4, "forward"),
    "backward": Fault(0, 5, "backward"),
    "optimizer": Fault(1, 3, "optimizer"),
    "before the first save": Fault(0, 1, "optimizer"),
}


@pytest.mark.parametrize("point", FAULTS)
def test_kill(site, point):
    name = point.replace(" ", "-")
    run = site.start(name, saving(site, name), fault=FAULTS[point])
    codes = run.wait()
    assert codes[FAULTS[point].rank] == -signal.SIGKILL
    check_continues(site, name, first=FAULTS[point].step - (FAULTS[point].step - 1) % 2)


@pytest.mark.parametrize(("flags", "layout"), [([], "cp2"), (ASYNC, "cp1")], ids=["sync", "async"])
def test_kill_while_saving(site, flags, layout):
    """The torn checkpoint is not loaded, the complete one before it is."""
    name = f"save-{layout}"
    torn = kill_while_saving(site, name, flags, step=6, rank=0, layout=layout)
    assert latest(site.folder / name / "saved") == 4
    check_continues(site, name, flags, first=5, layout=layout)
    assert torn.is_dir()
