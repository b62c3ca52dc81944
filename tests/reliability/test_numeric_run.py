"""NaN or Inf in a run: it ends before the optimizer step, in the first step too, and names layer and rank."""

import pytest

from tests.reliability.nursery import Fault

FOUND = {
    ("forward", "nan"): "NaN or Inf was first met in layer 1: key (NaN)",
    ("forward", "inf"): "NaN or Inf was first met in layer 1: key (Inf)",
    ("backward", "nan"): "NaN or Inf was first met in layer 1: gradient of value (NaN)",
    ("backward", "inf"): "NaN or Inf was first met in layer 1: gradient of value (Inf)",
}


@pytest.mark.parametrize(("place", "act"), FOUND)
def test_run_stops_and_names_layer_and_rank(site, place, act):
    step = 1 if act == "nan" else 3
    run = site.start(
        f"{place}-{act}",
        fault=Fault(1, step, place, act),
        flags=["--save", str(site.folder / f"s-{place}-{act}")],
    )
    codes = run.wait(stop_others=False)
    assert all(codes)
    log = (run.folder / "rank1.log").read_text()
    assert FOUND[place, act] in log
    assert "rank 1 was last in the" in log
    assert step not in run.losses()  # no optimizer step, so no line for it
