"""Evaluate a Megatron checkpoint on synthetic long-context tasks, with any attention and parallel layout.

    python -m tools.eval.run --load runs/trained --tasks niah,niah_multi,vt,kv --lengths 32768 65536
        --tokenizer Qwen2.5-3B --attn-type minfer --train-attn-config minfer_qwen2.5_3b_0.90 --bf16
        --out results.json
    torchrun --nproc-per-node 8 -m tools.eval.run ... --context-parallel-size 8

Tasks: niah (a fact at each depth of a haystack), niah_multi (among facts of the same form), vt (variable
tracking), kv (recall among many facts), loss (by position, of --loss-data). A sample ends with its answer,
and the model is right when every answer token is its most likely one given all before it: one forward pass,
no cache of keys and values, so it runs the attention of training, on all its ranks. Samples depend on the
seed alone. Without --tokenizer they are of the made-up vocabulary of tools/eval/language.py, for models
trained on it.

--load is a folder that --save of pretrain_qwen.py or tools/checkpoint/convert_qwen.py wrote; the model's
sizes are read from it. Flags that are not listed here are those of pretrain_qwen.py. Writes --out as JSON,
and beside it a Markdown table and a picture of every task with depths.
"""

import argparse
import contextlib
import io
import json
import shlex
import sys
import tempfile
from pathlib import Path

import torch
from megatron.training import training

from megatron_mtrain.arguments import one_line_errors, parse_arguments
from megatron_mtrain.cpu import prepare_megatron
from megatron_mtrain.layouts import make_layout
from megatron_mtrain.presets import checkpoint_arguments
from megatron_mtrain.qwen_shape import from_arguments, to_hf
from tools.data.files import DataError
from tools.data.sequences import from_indexed
from tools.eval.language import TextLanguage, TokenLanguage
from tools.eval.report import write
from tools.eval.scores import DensityMeter, loss_by_position, score_samples, score_tokens
from tools.eval.tasks import TASKS, make_samples
from tools.loaded_model import RUN, LoadedModel, load_model


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of this tool, and the flags of pretrain_qwen.py among `words`."""
    parser = argparse.ArgumentParser(
        prog="tools.eval.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="checkpoint folder; its newest is taken")
    add("--out", required=True, type=Path, metavar="FILE.json", help="results to write")
    add("--tasks", default=",".join(TASKS), help=f"of {', '.join(TASKS)}, loss; with commas (%(default)s)")
    add("--lengths", type=int, nargs="+", required=True, help="tokens of a sequence")
    add("--samples", type=int, default=10, help="of a task and length, at each depth (%(default)s)")
    add("--depths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0],
        help="places of the fact, from 0 (start) to 1 (end)")  # fmt: skip
    add("--tokenizer", metavar="PATH", help="text of this tokenizer; a Hugging Face folder or a file")
    add("--haystack", type=Path, metavar="FILE", help="text to take filler from (made-up sentences)")
    add("--loss-data", type=Path, metavar="PREFIX", help="indexed dataset for the task loss")
    add("--loss-bins", type=int, default=16, help="parts of a sequence for the task loss (%(default)s)")
    add("--batch-size", type=int, default=1, help="sequences of one forward pass (%(default)s)")
    add("--seed", type=int, default=0, help="of the samples (%(default)s)")
    args, flags = parser.parse_known_args(words)
    args.tasks = args.tasks.split(",")
    return args, flags


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what cannot be evaluated or written."""
    for task in args.tasks:
        if task not in (*TASKS, "loss"):
            raise ValueError(f"unknown task {task!r} in --tasks; choose of {', '.join(TASKS)}, loss")
    if "loss" in args.tasks and args.loss_data is None:
        raise ValueError("the task loss needs --loss-data PREFIX, an indexed dataset of the model's tokens")
    for name in ("samples", "loss_bins", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    for depth in args.depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"--depths: {depth} is not from 0 (start) to 1 (end)")
    if args.haystack and not args.tokenizer:
        raise ValueError("--haystack is text and needs --tokenizer, which turns it into tokens")
    if args.out.suffix != ".json" or not args.out.parent.is_dir():
        raise ValueError(f"--out {args.out} must be a .json file in a folder that exists")


def evaluate(words: list[str]) -> dict | None:
    """Runs a command line; the results on the rank that wrote them, None on all others.

    Raises ValueError, before any process group or model exists, for what cannot run.
    """
    args, flags = parse(words)
    check(args)
    prepare_megatron()
    run_args, attention = _run_arguments(args, flags)
    for length in args.lengths:
        make_layout(attention.layout, length, run_args.context_parallel_size, attention.block_size)
    vocabulary = run_args.vocab_size or run_args.padded_vocab_size
    try:
        work = {(task, length): _samples(args, task, length, vocabulary)
                for task in args.tasks for length in args.lengths}  # fmt: skip
    except DataError as error:
        raise ValueError(str(error)) from None
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron tells how it starts
            loaded = load_model(run_args, attention)
        found = {
            "command": shlex.join(["python", "-m", "tools.eval.run", *words]),
            "attn_type": attention.attn_type,
            "iteration": loaded.iteration,
            "seed": args.seed,
            **_results(args, loaded, work, vocabulary),
        }
        if not _speaks(loaded) or not (found["results"] or found["loss"]):
            return None
        write(found, args.out)
        return found
    finally:
        training.destroy_global_state()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _results(args: argparse.Namespace, loaded: LoadedModel, work: dict, vocabulary: int) -> dict:
    """`results`, a dict for every task, length and depth, and `loss`, one for every part of a length."""
    results, losses = [], []
    for (task, length), samples in work.items():
        with DensityMeter() as meter:  # of one pass, since it takes time
            score_tokens(loaded, (samples[0] if task == "loss" else samples[0].tokens)[None], vocabulary)
        common = {"length": length, "density": meter.density()}
        if task == "loss":
            bins = loss_by_position(loaded, samples, vocabulary, args.loss_bins)
            new = [common | part for part in bins or []]
            losses += new
        else:
            cells = score_samples(loaded, samples, vocabulary, args.batch_size)
            new = [{"task": task, **common, **cell} for cell in cells or []]
            results += new
        if new and _speaks(loaded):
            loss = sum(part["loss"] for part in new) / len(new)
            sys.stderr.write(f"  {task}, {length} tokens: loss {loss:.4f}, density {common['density']:.1%}\n")
    return {"results": results, "loss": losses}


def _speaks(loaded: LoadedModel) -> bool:
    """Whether this rank is the one of its pipeline stage that tells and writes."""
    groups = loaded.groups
    return not (groups.tp.rank() or groups.cp.rank() or groups.dp.rank())


def _run_arguments(args: argparse.Namespace, flags: list[str]):
    """Megatron's arguments and the attention, as pretrain_qwen.py reads them, with the checkpoint's sizes."""
    with tempfile.TemporaryDirectory() as folder:
        longest = ["--load", args.load, "--seq-length", str(max(args.lengths))]
        with _command_line([*RUN, *longest, *_sizes(args, flags, folder), *flags]):
            return parse_arguments()


def _sizes(args: argparse.Namespace, flags: list[str], folder: str) -> list[str]:
    """Flags of the model's sizes, those of the checkpoint unless `flags` has some; `folder` is for files."""
    if "--model" in flags or "--num-layers" in flags:
        return []
    stored = checkpoint_arguments(args.load)
    if not hasattr(stored, "num_layers"):
        raise ValueError(f"--load {args.load} holds no torch_dist checkpoint; give the folder --save named")
    shape = from_arguments(stored, args.load)
    Path(folder, "config.json").write_text(json.dumps(to_hf(shape)))
    flags = ["--model", folder]
    if hasattr(stored, "make_vocab_size_divisible_by"):  # of a training run: how it padded the embedding
        flags += ["--make-vocab-size-divisible-by", str(stored.make_vocab_size_divisible_by)]
    return flags


@contextlib.contextmanager
def _command_line(words: list[str]):
    """Megatron reads sys.argv."""
    kept, sys.argv = sys.argv, ["tools.eval.run", *words]
    try:
        yield
    finally:
        sys.argv = kept


def _samples(args: argparse.Namespace, task: str, length: int, vocabulary: int) -> list:
    """The samples of a task, or the sequences of the task loss. Raises ValueError and DataError."""
    if task == "loss":
        sequences = from_indexed(args.loss_data, length=length + 1, count=args.samples, seed=args.seed)
        _check_vocabulary(max(int(s.max()) for s in sequences), vocabulary, f"--loss-data {args.loss_data}")
        return sequences
    text = args.tokenizer is not None
    language = TextLanguage(args.tokenizer, args.haystack) if text else TokenLanguage(vocabulary)
    how = {"length": length, "count": args.samples, "depths": args.depths, "seed": args.seed}
    samples = make_samples(task, language, **how)
    _check_vocabulary(max(int(s.tokens.max()) for s in samples), vocabulary, f"--tokenizer {args.tokenizer}")
    return samples


def _check_vocabulary(largest: int, vocabulary: int, what: str) -> None:
    if largest >= vocabulary:
        raise ValueError(f"{what} has token {largest}; the model's vocabulary ends at {vocabulary - 1}")


def main() -> None:
    """Runs the command line; what the user can mend ends in one line and exit code 1."""
    with one_line_errors():
        found = evaluate(sys.argv[1:])
    if found:
        sys.stdout.write(parse(sys.argv[1:])[0].out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
