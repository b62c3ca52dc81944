"""Wrong command lines, settings and files, each with the message that refuses it.

python -m tests.reliability.sweep        prints the table of docs/RELIABILITY.md

The inputs are those of the tests beside the code, gathered here, and some of files on disk.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.training.arguments import parse_args

from megatron_mtrain import AttentionConfig, arguments, checks, make_layout
from megatron_mtrain.metadata import check_checkpoint
from tests import test_config, test_layouts
from tests.model import test_arguments
from tests.model.conftest import write_data
from tests.tools.data.mds_writer import write_domain
from tools.data.files import DataError
from tools.data.indexed import read_indexed
from tools.data.mds import ShardReader, read_index

Row = tuple[str, Callable]


def cases(test) -> list:
    """The parameter sets of a parametrized test."""
    (mark,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    return list(mark.args[1])


def command_lines() -> Iterator[Row]:
    """What pretrain_qwen.py is started with, and on how many processes."""
    run, data = test_arguments.RUN, test_arguments.DATA
    rows = {**test_arguments.REFUSED, "no worker": ("--async-save", 1, [])}
    for flags, ranks, _ in rows.values():
        left = test_arguments.without(run, flags) if flags in ("--seq-length", "--lr") else run
        given = [] if left is not run else flags.split()
        what = f"{flags} missing" if left is not run else flags
        yield (
            f"{what}{f' ({ranks} processes)' if ranks > 1 else ''}",
            lambda a=[*left, *data, *given], r=ranks: _validate(a, r),
        )
    for flags in ("--data-path nowhere/text", ""):
        given = [*run, *data[1:], *flags.split()]
        yield flags or "no --data-path", lambda a=given: _validate(a, 1)


def _validate(flags: list[str], ranks: int) -> None:
    before = sys.argv
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        sys.argv = ["pretrain_qwen.py", *flags]
        checks.validate(parse_args(arguments.add_arguments))
    finally:
        sys.argv = before
        del os.environ["WORLD_SIZE"]


def settings(folder: Path) -> Iterator[Row]:
    """Fields of the YAML, whole YAML files, pattern files and layouts."""
    for test in (test_config.test_refuses_fields, test_config.test_refuses_fields_of_other_methods):
        for attn_type, fields, _ in cases(test):
            yield f"{attn_type}: {fields}", lambda a=attn_type, f=fields: AttentionConfig.from_dict(a, f)
    for number, (text, _) in enumerate(cases(test_config.test_refuses_yaml)):
        path = folder / f"settings{number}.yaml"
        path.write_text(text)
        yield f"YAML file `{text!r}`", lambda p=path: AttentionConfig.from_yaml("minfer", p)
    for number, (text, _) in enumerate(cases(test_config.test_refuses_patterns)):
        path = folder / f"pattern{number}.json"
        path.write_text(text)
        fields = {"pattern_config_name": str(path)}
        yield f"pattern file `{text}`", lambda f=fields: AttentionConfig.from_dict("minfer", f)
    for name, tokens, ranks, block, _ in cases(test_layouts.test_refuses):
        sizes = (name, tokens, ranks, block)
        yield f"layout {name}, {tokens} tokens, {ranks} ranks, block {block}", lambda s=sizes: make_layout(*s)


def files(folder: Path) -> Iterator[Row]:
    """Damaged data sets and checkpoints."""
    prefix = write_data(folder / "text")
    for end, cut in ((".bin", 100), (".idx", 40), (".idx", 810)):
        place = folder / f"cut{end}{cut}"
        for other in (".bin", ".idx"):
            data = Path(f"{prefix}{other}").read_bytes()
            Path(f"{place}{other}").write_bytes(data[:-cut] if other == end else data)
        yield f"data set, {end} {cut} bytes short", lambda p=place: checks._checked_index(str(p))
        yield f"inspect_indexed, {end} {cut} bytes short", lambda p=place: read_indexed(p)
    (shard,) = write_domain(folder / "mds", {"length": "int"}, [[{"length": 3}]])
    shard.write_bytes(shard.read_bytes()[:-1])
    yield "MDS shard, a byte short", lambda: ShardReader(read_index(folder / "mds")[0])
    saved = folder / "saved"
    (saved / "iter_0000004").mkdir(parents=True)
    (saved / "iter_0000004" / ".metadata").write_bytes(b"\x80\x04")
    foreign = saved / "iter_0000002"
    foreign.mkdir()
    (foreign / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for text, what in (("soon", "a tracker that says soon"), ("6", "a tracker of a checkpoint that is gone"),
                       ("4", "metadata that is cut"), ("2", "metadata that calls os.system")):  # fmt: skip
        place = folder / f"saved{text}"
        _copy(saved, place, text)
        yield f"--load, {what}", lambda p=place: check_checkpoint(str(p))


def _copy(source: Path, target: Path, tracker: str) -> None:
    for path in source.glob("*/.metadata"):
        (target / path.parent.name).mkdir(parents=True)
        (target / path.parent.name / ".metadata").write_bytes(path.read_bytes())
    (target / "latest_checkpointed_iteration.txt").write_text(tracker)


def sweep(folder: Path) -> Iterator[tuple[str, str]]:
    """Every wrong input with its message; a row without a message was not refused."""
    for part in (command_lines(), settings(folder), files(folder)):
        for what, call in part:
            try:
                call()
            except (ValueError, DataError) as error:
                yield what, str(error)
            else:
                yield what, ""


def main() -> None:
    """Prints the table."""
    logging.disable(logging.INFO)  # Megatron tells of every index it reads
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write("| input | message |\n|---|---|\n")
        for what, message in sweep(Path(folder)):
            cells = (
                text.replace(folder, "...").replace("|", "\\|").replace("\n", " ") for text in (what, message)
            )
            sys.stdout.write("| {} | {} |\n".format(*cells))


if __name__ == "__main__":
    main()
