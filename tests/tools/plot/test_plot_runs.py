"""Runs are read from their events: what is in them, and what is wrong with a folder."""

import pytest

from tools.plot.figures import NoData
from tools.plot.runs import names_of, read_run


def test_reads_scalars_and_arguments(tmp_path, write_run):
    run = read_run(
        write_run(
            tmp_path / "a", {"x": {1: 2.0, 3: 4.0}}, arguments={"seq_length": 64, "lr": 0.5, "load": None}
        )
    )
    assert run.series("x").steps.tolist() == [1, 3]
    assert run.series("x").values.tolist() == [2, 4]
    assert run.arguments == {"load": "None", "lr": "0.5", "seq_length": "64"}
    assert run.argument("seq_length", int) == 64
    assert run.argument("load") is run.argument("lr", int) is run.argument("missing") is None


def test_numbers_in_tags_are_sorted_as_numbers(tmp_path, write_run):
    tags = {f"a/layer_{number}": {1: float(number)} for number in (10, 2, 0)} | {"a/layer_x": {1: 0.0}}
    found = read_run(write_run(tmp_path / "a", tags)).numbered(r"a/layer_(\d+)")
    assert [(key, series.values.tolist()) for key, series in found.items()] == [
        ((0,), [0]), ((2,), [2]), ((10,), [10]),
    ]  # fmt: skip


def test_a_resumed_run_keeps_the_later_value_of_a_step(tmp_path, write_run):
    write_run(tmp_path / "a", {"x": {1: 1.0, 2: 2.0, 3: 3.0}})
    write_run(tmp_path / "a", {"x": {2: 20.0, 4: 40.0}})
    series = read_run(tmp_path / "a").series("x")
    assert dict(zip(series.steps.tolist(), series.values.tolist(), strict=True)) == {1: 1, 2: 20, 3: 3, 4: 40}


def test_finds_the_only_run_below_a_folder(tmp_path, write_run):
    write_run(tmp_path / "demo" / "tensorboard", {"x": {1: 2.0}})
    assert read_run(tmp_path / "demo").has("x")


def test_wrong_folders(tmp_path, write_run):
    with pytest.raises(ValueError, match="no folder; give the one that --tensorboard-dir"):
        read_run(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no TensorBoard events"):
        read_run(tmp_path / "empty")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "events.out.tfevents.1").write_bytes(b"no events")
    with pytest.raises(ValueError, match="nothing readable"):
        read_run(tmp_path / "broken")
    write_run(tmp_path / "two" / "a", {"x": {1: 2.0}})
    write_run(tmp_path / "two" / "b", {"x": {1: 2.0}})
    with pytest.raises(ValueError, match="events of 2 runs; give one of .*a, .*b"):
        read_run(tmp_path / "two")
    with pytest.raises(NoData, match="has no 'y'"):
        read_run(tmp_path / "two" / "a").series("y")


def test_names_tell_runs_apart(tmp_path):
    folders = [
        tmp_path / "one" / "dense",
        tmp_path / "two" / "dense",
        tmp_path / "two" / "moba" / "tensorboard",
    ]
    assert names_of(folders) == ["one/dense", "two/dense", "two/moba"]
    assert names_of(folders[:1]) == ["dense"]
    assert names_of([folders[0], folders[0]])[0].endswith("one/dense")
