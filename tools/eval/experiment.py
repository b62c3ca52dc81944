"""Does sparse attention learn what dense attention learns? One small model, several methods, one recall task.

    python -m tools.eval.experiment --small --out runs/recall          # on a CPU: every part, but too short
    python -m tools.eval.experiment --out runs/recall                  # 8192 tokens, on one GPU
    python -m tools.eval.experiment --out runs/recall --methods minfer --time-limit 540   # a piece of it

Every method starts from one checkpoint and sees the same sequences in the same order
(tools/eval/recall_data.py: facts in text-like filler), through pretrain_qwen.py. Then tools/eval/run.py asks
every trained model for facts, with the attention that it was trained with and with dense attention, and
takes its loss by position on sequences that none has seen.

What is finished is kept in --out, and the same command goes on from there; --time-limit ends a call early,
at a checkpoint. REPORT.md shows side by side whatever methods are finished.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from tools.data.files import write_atomic
from tools.eval.experiment_report import report
from tools.eval.language import TokenLanguage
from tools.eval.recall_data import write_sequences
from tools.eval.setups import FULL, SMALL, Setup

ROOT = Path(__file__).parents[2]
METHODS = ("dense", "minfer", "moba", "xattn")
LEAST = 90  # seconds that a piece of training needs to be worth its start
HELD_OUT = 64  # sequences


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, type=Path, metavar="DIR", help="folder of the experiment")
    add("--small", action="store_true", help="a CPU runs every part in minutes, and learns no recall")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="to train now (all)")
    add("--steps", type=int, help="of training, over the setting's; the same for all methods")
    add("--time-limit", type=float, default=float("inf"), help="seconds for this call")
    add("--seed", type=int, default=1234, help="of weights and data (%(default)s)")
    return parser.parse_args(words)


class Experiment:
    """The runs of one setting in one folder."""

    def __init__(self, folder: Path, setup: Setup, seed: int, time_limit: float):
        self.folder, self.setup, self.seed = folder, setup, seed
        self.deadline = time.monotonic() + time_limit
        self.gpu = torch.cuda.is_available()

    @property
    def left(self) -> float:
        """Seconds of this call."""
        return self.deadline - time.monotonic()

    def prepare(self) -> None:
        """Data, settings of the methods, and the one checkpoint that all start from.

        Raises ValueError when the folder holds another experiment.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        described = json.dumps({"seed": self.seed, **vars(self.setup)}, indent=1) + "\n"
        known = self.folder / "setup.json"
        if known.is_file() and known.read_text() != described:
            raise ValueError(f"{self.folder} holds an experiment of other settings; choose another --out")
        setup, language = self.setup, TokenLanguage(self.setup.vocabulary)
        # Named last, as a sign that everything is there.
        if not known.is_file():
            wanted = {"train": setup.steps * setup.batch + 1, "held_out": HELD_OUT + 1}
            for number, (name, count) in enumerate(wanted.items()):
                where = {"length": setup.length, "count": count, "seed": self.seed + number}
                write_sequences(self.folder / name, language, **where)
            for method in METHODS:
                setup.write_method(self.folder, method)
            start = ["--attn-type", "dense", "--lr", "0", "--train-iters", "1", "--lr-warmup-iters", "0"]
            self.train([*start, "--save", str(self.folder / "start")], "start")
            write_atomic(known, described.encode())

    def method(self, method: str) -> bool:
        """Trains and evaluates a method as far as time allows; whether it is finished."""
        saved, setup = self.folder / method, self.setup
        tracker = saved / "latest_checkpointed_iteration.txt"

        def trained() -> int:
            return int(tracker.read_text()) if tracker.is_file() else 0

        if trained() < setup.steps:
            if self.left < LEAST:
                return False
            start = self.folder / "start"
            fresh = ["--load", str(start), "--finetune", "--no-load-optim", "--no-load-rng"]
            flags = ["--load", str(saved)] if trained() else fresh
            if self.left != float("inf"):
                flags += ["--exit-duration-in-mins", str(max(1, int((self.left - 30) / 60)))]
            flags += setup.method_flags(self.folder, method)
            flags += ["--lr", str(setup.lr), "--min-lr", str(setup.lr / 10), "--save", str(saved)]
            flags += ["--tensorboard-dir", str(saved / "tensorboard")]
            self.train([*flags, "--train-iters", str(setup.steps)], method)
        if trained() < setup.steps:
            return False
        evaluations = {"own": setup.method_flags(self.folder, method)}
        if method != "dense":
            evaluations["dense"] = setup.method_flags(self.folder, "dense")
        for name, flags in evaluations.items():
            out = saved / f"{name}.json"
            if not out.is_file():
                if self.left < LEAST:
                    return False
                self.evaluate(saved, flags, out)
        return True

    def train(self, flags: list[str], name: str) -> None:
        """One run of pretrain_qwen.py."""
        setup = self.setup
        settings = f"""
            {setup.model_flags} --seq-length {setup.length} --micro-batch-size {setup.micro_batch}
            --global-batch-size {setup.batch} --data-path {self.folder / "train"} --split 100,0,0
            --data-cache-path {self.folder / "cache"} --seed {self.seed} --eval-iters 0 --num-workers 1
            --lr-decay-style cosine --lr-warmup-iters {setup.warmup} --weight-decay 0.1 --adam-beta2 0.95
            --clip-grad 1.0 --log-interval 10 --save-interval {setup.save_interval} --log-throughput
        """.split()
        self.run([sys.executable, "pretrain_qwen.py", *settings, *self.precision, *flags], name)

    def evaluate(self, load: Path, flags: list[str], out: Path) -> None:
        """One run of tools/eval/run.py."""
        setup = self.setup
        tasks = f"""
            --load {load} --out {out} --tasks niah,niah_multi,kv,loss --lengths {setup.length}
            --loss-data {self.folder / "held_out"} --samples {setup.samples} --batch-size {setup.micro_batch}
            --loss-bins 8
        """.split()
        self.run([sys.executable, "-m", "tools.eval.run", *tasks, *self.precision, *flags], load.name)

    @property
    def precision(self) -> list[str]:
        """Flags: bfloat16 on a GPU."""
        return ["--bf16"] if self.gpu else []

    def run(self, command: list[str], name: str) -> None:
        """Runs a command; its output goes to NAME.log. Raises RuntimeError when it fails."""
        log = self.folder / f"{name}.log"
        sys.stderr.write(f"{name}: {' '.join(command[1:3])} ...\n")
        with log.open("a") as file:
            file.write(f"{shlex.join(command)}\n")
            file.flush()
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
        if code:
            tail = "\n".join(log.read_text().splitlines()[-15:])
            raise RuntimeError(f"{name} failed, see {log}\n{tail}")


def main() -> None:
    """Runs as much as time allows, and writes the report of what is finished."""
    args = parse_arguments()
    setup = (SMALL if args.small else FULL).with_steps(args.steps)
    experiment = Experiment(args.out.resolve(), setup, args.seed, args.time_limit)
    try:
        experiment.prepare()
        unfinished = [method for method in args.methods if not experiment.method(method)]
        text = report(experiment.folder, setup, METHODS, shlex.join(sys.argv[1:]))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"experiment: {error}")
    write_atomic(experiment.folder / "REPORT.md", text.encode())
    print(text)
    if unfinished:
        print(f"not finished: {' '.join(unfinished)}; the same command goes on from here")


if __name__ == "__main__":
    main()
