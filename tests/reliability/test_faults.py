"""Faults from outside: an order to stop, a full disk, data that is cut. None is silent, none loses work."""

import pytest

from tests.reliability.nursery import Fault
from tests.reliability.resume import check_continues, latest, saving


def test_sigterm_saves_and_the_run_goes_on(site):
    """--exit-signal-handler: the step is finished and saved, whatever --save-interval says."""
    flags = ["--exit-signal-handler"]
    fault = Fault(1, 3, "backward", "term")
    run = site.start("term", [*saving(site, "term", every=100), *flags], fault=fault)
    assert run.wait() == [0, 0]
    assert latest(site.folder / "term" / "saved") == 3
    check_continues(site, "term", flags, first=4)


def test_full_disk_leaves_the_old_checkpoint(site):
    fault = Fault(1, 5, "optimizer", "full")
    run = site.start("full", saving(site, "full"), fault=fault)
    assert any(run.wait())
    assert "File too large" in run.log()
    assert latest(site.folder / "full" / "saved") == 4
    check_continues(site, "full", first=5)


@pytest.mark.parametrize("damage", ["cut", "empty", "index"])
def test_cut_data_is_refused_at_once(site, damage):
    """In one line, before training: memory that maps a missing page would end the run without a word."""
    prefix = site.folder / damage
    for end in (".bin", ".idx"):
        data = (site.folder / f"text{end}").read_bytes()
        cut = {"cut": (".bin", 100), "empty": (".bin", len(data)), "index": (".idx", 40)}[damage]
        prefix.with_suffix(end).write_bytes(data[: len(data) - cut[1]] if cut[0] == end else data)
    run = site.start(f"data-{damage}", ["--data-path", str(prefix)], layout="cp1")
    assert run.wait() == [1]
    (line,) = [line for line in (run.folder / "rank0.log").read_text().splitlines() if "error: " in line]
    assert line.startswith("pretrain_qwen.py: error: data set ")
    assert str(prefix) in line and line.endswith(("copy it again", "write it again"))
