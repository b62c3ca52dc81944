"""The experiment's order of work and its report; the runs themselves are stood in for."""

import json
from dataclasses import replace

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_mtrain import AttentionConfig
from tools.eval.experiment import METHODS, Experiment
from tools.eval.experiment_report import report
from tools.eval.setups import FULL, SMALL

SETUP = replace(SMALL, length=128, steps=20, vocabulary=64)


class Recorded(Experiment):
    """Writes what a run would leave; a piece of training takes `piece` steps."""

    piece = 20

    def __init__(self, *args):
        super().__init__(*args)
        self.commands = []

    def run(self, command, name):
        self.commands.append(command)
        given = dict(zip(command, command[1:], strict=False))
        if "pretrain_qwen.py" not in command:
            cell = {"samples": 4, "accuracy": 0.5, "density": 0.25, "length": 128, "depth": None}
            results = [{"task": task, **cell} for task in ("niah", "niah_multi", "kv")]
            loss = [{"length": 128, "first": 0, "end": 128, "loss": 2.0, "density": 0.25}]
            (self.folder / name / "own.json").parent.mkdir(exist_ok=True)
            with open(given["--out"], "w") as file:
                json.dump({"results": results, "loss": loss}, file)
            return
        saved = self.folder / name
        saved.mkdir(exist_ok=True)
        tracker = saved / "latest_checkpointed_iteration.txt"
        done = int(tracker.read_text()) if tracker.is_file() else 0
        steps = min(done + self.piece, int(given["--train-iters"]))
        if "--tensorboard-dir" in given:
            with SummaryWriter(given["--tensorboard-dir"]) as writer:
                for step in range(done + 1, steps + 1):
                    writer.add_scalar("lm loss", 5 - step / 10, step)
        tracker.write_text(str(steps))


def test_all_methods_start_from_one_checkpoint(tmp_path):
    experiment = Recorded(tmp_path, SETUP, 0, float("inf"))
    experiment.prepare()
    assert all(experiment.method(method) for method in METHODS)
    trained = [command for command in experiment.commands if "--finetune" in command]
    assert len(trained) == len(METHODS)
    # Nothing but the method and where it is kept differs.
    shared = set.intersection(*map(set, trained))
    assert str(tmp_path / "start") in shared and str(tmp_path / "train") in shared
    for command in trained:
        own = [part for part in command if part not in shared]
        assert all(any(method in part for method in METHODS) for part in own)
    text = report(tmp_path, SETUP, METHODS, "--small")
    assert text.count("| 25.0% | 3.2000 | 2.0000 / 2.0000 | 50.0% / 50.0% |") == 3  # all but dense


def test_goes_on_where_a_piece_ended(tmp_path):
    experiment = Recorded(tmp_path, SETUP, 0, 600.0)
    experiment.piece = 12
    experiment.prepare()
    assert not experiment.method("minfer")
    assert "minfer" not in report(tmp_path, SETUP, METHODS, "").split("##")[0].split("|---")[-1]
    assert experiment.method("minfer")
    start, first, second, *evaluations = experiment.commands
    assert "--finetune" in first and "--finetune" not in second
    for command in (first, second):
        given = dict(zip(command, command[1:], strict=False))
        assert 1 <= int(given["--exit-duration-in-mins"]) <= 9
    assert second[second.index("--load") + 1] == str(tmp_path / "minfer")
    assert len(evaluations) == 2
    experiment.method("minfer")
    assert len(experiment.commands) == 5  # nothing is left to do
    assert "| minfer |" in report(tmp_path, SETUP, METHODS, "")


def test_stops_in_time_and_keeps_settings_apart(tmp_path):
    experiment = Recorded(tmp_path, SETUP, 0, 10.0)
    experiment.prepare()
    assert not experiment.method("dense")
    assert len(experiment.commands) == 1
    with pytest.raises(ValueError, match="holds an experiment of other settings"):
        Recorded(tmp_path, SETUP.with_steps(30), 0, 10.0).prepare()


@pytest.mark.parametrize("setup", [SMALL, FULL], ids=lambda setup: setup.name)
def test_settings_of_methods_are_valid(tmp_path, setup):
    for method in METHODS:
        setup.write_method(tmp_path, method)
        config = AttentionConfig.from_yaml(method, tmp_path / f"{method}.yaml")
        config.check_model(num_layers=setup.layers, num_heads=setup.heads)
        assert setup.length % config.block_size == 0
