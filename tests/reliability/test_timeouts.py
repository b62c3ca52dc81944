"""A rank that hangs, and one that dies, end the run; nobody waits beyond --distributed-timeout-minutes."""

import re

from tests.reliability.nursery import Fault


def test_a_hung_rank_is_noticed_after_the_timeout(site):
    """The others stop with the operation that timed out, and say in which layer and ring step they stood.

    Rank 1 sends nothing in that pass: rank 0 attends its own shard in step 0 and waits for the next.
    """
    codes = site.hung.wait(deadline=150)
    assert codes[0] == 1
    log = (site.hung.folder / "rank0.log").read_text()
    assert "Timed out waiting 60000ms" in log
    assert "rank 0 was last in the forward of layer 1, ring step 1 of 0 .. 1" in log


def test_a_dropped_connection_ends_the_others_at_once(site):
    """Without a launcher that would end them: the peers of a dead rank see its connection close."""
    run = site.start("dropped", fault=Fault(1, 3, "ring"))
    codes = run.wait(stop_others=False, deadline=45)
    assert codes[0] == 1
    log = (run.folder / "rank0.log").read_text()
    assert "Connection closed by peer" in log or "Connection reset by peer" in log
    # Step 0 if the connection was seen to close before the first exchange began.
    assert re.search(r"rank 0 was last in the forward of layer 1, ring step [01] of 0 \.\. 1", log)
