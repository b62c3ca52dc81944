"""ProLong conversion: texts to the character, any workers, any kill, every error, nothing half-written."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy
import pytest

from tests.tools.data.conftest import COLUMNS, LLAMA3, QWEN, ROOT, SAMPLE, manifest, needs_ranks
from tests.tools.data.mds_writer import write_domain
from tools.data import prolong_to_indexed
from tools.data.indexed import read_indexed
from tools.data.prolong_samples import take_evenly
from tools.data.text_tokenizers import load_tokenizer

BOTH = "book-64,code-64"


def arguments(prolong, ranks, target, output, *more) -> list:
    source = ["--source-tokenizer", ranks, "--target-tokenizer", target]
    return ["--input", prolong[0], "--domains", BOTH, "--output", output, *source, "--workers", 1, *more]


def documents(prefix: Path, tokenizer: str) -> list[tuple[str, bool]]:
    """Text of every sequence, and whether it ends with the end of document."""
    data, codec = read_indexed(prefix), load_tokenizer(tokenizer)
    found = []
    for number in range(len(data.lengths)):
        ids = data.sequence(number)
        ended = bool(ids[-1] == codec.end_of_document)
        found.append((codec.decode(ids[: len(ids) - ended]), ended))
    return found


def files(prefix: Path) -> tuple[bytes, bytes]:
    assert not Path(f"{prefix}.partial").exists()
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def untouched(prefix: Path) -> bool:
    return not any(os.path.exists(f"{prefix}{end}") for end in (".bin", ".idx", ".json"))


def test_texts_ends_and_counts(run, prolong, ranks, target, tmp_path):
    assert run(prolong_to_indexed, *arguments(prolong, ranks, target, tmp_path / "d"))[0] == 0
    expected = [document for domain in prolong[1].values() for sample in domain for document in sample]
    assert documents(tmp_path / "d", target) == expected
    written = manifest(tmp_path / "d")
    assert written["tokens"] == sum(len(text.encode()) + ended for text, ended in expected)
    assert written["domains"]["code-64"]["samples"] == 9
    assert written["domains"]["book-64"]["documents"] == sum(map(len, prolong[1]["book-64"]))
    assert [Path(source["path"]).parts[0] for source in written["sources"]] == ["book-64"] * 3 + [
        "code-64"
    ] * 2
    assert written["versions"]["numpy"] == numpy.__version__


def test_workers_and_ways_to_start_do_not_matter(command, run, prolong, ranks, target, tmp_path):
    run(prolong_to_indexed, *arguments(prolong, ranks, target, tmp_path / "one"))
    script = {"three": "tools/data/prolong_to_indexed.py", "two": "tools.data.prolong_to_indexed"}
    for name, workers in (("three", 3), ("two", 2)):
        done = command(
            script[name], *arguments(prolong, ranks, target, tmp_path / name, "--workers", workers)
        )
        assert done.returncode == 0, done.stderr
        assert f"train with --data-path {tmp_path / name}" in done.stdout and "left" in done.stderr
        assert files(tmp_path / name) == files(tmp_path / "one")


class Killed(BaseException):
    """Stands for kill -9 at a rename."""


@pytest.mark.parametrize("mode", [(), ("--pack", "--seq-length", 50)], ids=["whole", "pack"])
def test_a_run_killed_at_any_rename_or_deletion_goes_on(
    run, prolong, ranks, target, tmp_path, monkeypatch, mode
):
    run(prolong_to_indexed, *arguments(prolong, ranks, target, tmp_path / "whole", *mode))
    crashes = 0
    while run_killed(
        monkeypatch, crashes, arguments(prolong, ranks, target, tmp_path / f"d{crashes}", *mode)
    ):
        prefix = tmp_path / f"d{crashes}"
        assert not os.path.exists(f"{prefix}.idx") or os.path.exists(f"{prefix}.bin")
        assert run(prolong_to_indexed, *arguments(prolong, ranks, target, prefix, *mode))[0] == 0
        assert files(prefix) == files(tmp_path / "whole"), f"after a kill at operation {crashes}"
        crashes += 1
    assert crashes > 3 * 5


def run_killed(monkeypatch, operations: int, line: list) -> bool:
    """Run the tool and kill it before its n-th renaming or deletion; whether it came to that."""
    rename, delete, left = os.replace, Path.unlink, operations

    def count_down() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    def renaming(*paths) -> None:
        count_down()
        rename(*paths)

    def deleting(path, missing_ok=False) -> None:
        if path.suffix == ".bin":
            count_down()
        delete(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", renaming)
        patch.setattr(Path, "unlink", deleting)
        patch.setattr(sys, "argv", ["prolong_to_indexed", *map(str, line)])
        try:
            prolong_to_indexed.main()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_9_and_go_on(command, target, ranks, tmp_path, workers):
    source = load_tokenizer(ranks)
    ids = source.encode("many words to convert, again and again\n" * 400)
    sample = {"domain": ".", "indices": numpy.array([[0, len(ids)]]), "input_ids": ids, "length": len(ids)}
    write_domain(tmp_path / "in" / "book-64", COLUMNS, [[sample] * 4] * 40)
    prolong = (tmp_path / "in", {})
    script = "tools/data/prolong_to_indexed.py"
    line = arguments(prolong, ranks, target, tmp_path / "d", "--domains", "book-64", "--workers", workers)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), *map(str, line)], stderr=subprocess.DEVNULL
    )
    while not (tmp_path / "d.partial" / "3.npz").exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert untouched(tmp_path / "d")
    again = command(
        script, *arguments(prolong, ranks, target, tmp_path / "d", "--domains", "book-64", "--workers", 2)
    )
    assert again.returncode == 0 and "of 40 units are finished" in again.stderr, again.stderr
    command(script, *arguments(prolong, ranks, target, tmp_path / "e", "--domains", "book-64"))
    assert files(tmp_path / "d") == files(tmp_path / "e")
    time.sleep(0.1)  # workers watch their parent: none may outlive it
    assert not [entry for entry in os.listdir("/proc") if entry.isdigit() and parent_of(entry) == process.pid]


def parent_of(process: str) -> int:
    try:
        return int(Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def test_pack_cuts_the_stream_of_documents(run, prolong, ranks, target, tmp_path):
    run(prolong_to_indexed, *arguments(prolong, ranks, target, tmp_path / "whole"))
    line = arguments(prolong, ranks, target, tmp_path / "d", "--pack", "--seq-length", 64)
    _, _, said = run(prolong_to_indexed, *line)
    whole, packed = read_indexed(tmp_path / "whole"), read_indexed(tmp_path / "d")
    kept = len(whole.ids) // 64 * 64
    numpy.testing.assert_array_equal(packed.ids, whole.ids[:kept])
    sizes = numpy.add.reduceat(packed.lengths, numpy.concatenate([[0], packed.group_ends[:-1]]))
    assert (sizes == 64).all() and len(sizes) == kept // 64
    assert set(numpy.cumsum(whole.lengths)) & set(range(kept + 1)) <= set(numpy.cumsum(packed.lengths))
    assert f"{len(whole.ids) - kept} tokens at the end fill no sample" in said


def test_exact_keeps_the_head_of_long_samples(run, prolong, ranks, target, tmp_path):
    samples = [sample for domain in prolong[1].values() for sample in domain]
    bytes_of = [b"".join(text.encode() + b"\xff" * ended for text, ended in sample) for sample in samples]
    size = sorted(map(len, bytes_of))[len(bytes_of) // 2]
    line = arguments(prolong, ranks, target, tmp_path / "d", "--exact", "--seq-length", size)
    _, _, said = run(prolong_to_indexed, *line)
    data = read_indexed(tmp_path / "d")
    kept = [part[:size] for part in bytes_of if len(part) >= size]
    ids = numpy.where(data.ids == 256, 255, data.ids).astype(numpy.uint8)
    assert ids.tobytes() == b"".join(kept) and len(data.group_ends) == len(kept)
    counts = manifest(tmp_path / "d")["domains"].values()
    assert sum(count["dropped_tokens"] for count in counts) == sum(map(len, bytes_of)) - len(kept) * size
    assert "dropped samples" in said and f"{len(kept)} samples of exactly {size} tokens" in said


def test_interval_and_weights_choose_samples(run, prolong, ranks, target, tmp_path):
    expected = prolong[1]
    run(prolong_to_indexed, *arguments(prolong, ranks, target, tmp_path / "i", "--sample-interval", 4))
    chosen = expected["book-64"][::4] + expected["code-64"][::4]
    assert documents(tmp_path / "i", target) == sum(chosen, [])
    weights = "code-64@0.25, book-64@0.5"
    run(prolong_to_indexed, *arguments(prolong, ranks, target, tmp_path / "w", "--domains", weights))
    code = [
        expected["code-64"][n] for n in take_evenly(9, Fraction(3, 9))
    ]  # book has 6: code gets half as many
    assert documents(tmp_path / "w", target) == sum(code + expected["book-64"], [])


@pytest.mark.parametrize(
    ("count", "share"), [(8, "1/4"), (9, "1/3"), (7, "1"), (10, "0.35"), (1000, "0.001")]
)
def test_take_evenly(count, share):
    chosen = take_evenly(count, Fraction(share))
    assert len(chosen) == int(count * Fraction(share))
    assert not chosen or max(numpy.diff([-1, *chosen, count])) <= 2 / Fraction(share) + 1


def convert_ids(run, tmp_path, ranks, target, ids, columns=COLUMNS, indices=None) -> list:
    indices = numpy.array([[0, len(ids)]]) if indices is None else indices
    sample = {"domain": ".", "indices": indices, "input_ids": numpy.array(ids), "length": len(ids)}
    write_domain(tmp_path / "in" / "x", columns, [[sample]])
    code, message, _ = run(
        prolong_to_indexed, *arguments((tmp_path / "in",), ranks, target, tmp_path / "o", "--domains", "x")
    )
    assert code == 0, message
    return read_indexed(tmp_path / "o").ids.tolist()


def test_special_ids_go_by_id(run, ranks, target, tmp_path):
    begin, end, other = 262, 263, 300
    ids = [begin, *b"ab", end, begin, *b"c", other, *b"d"]
    assert convert_ids(run, tmp_path, ranks, target, ids) == [*b"ab", 256, *b"cd"]
    assert manifest(tmp_path / "o")["domains"]["x"]["special_tokens_dropped"] == 1


def test_without_indices_a_sample_is_a_document(run, ranks, target, tmp_path):
    columns = {"input_ids": "ndarray:uint32", "domain": "str"}
    assert convert_ids(run, tmp_path, ranks, target, [*b"abc"], columns) == [*b"abc"]


def test_tokens_outside_documents_and_empty_documents_are_counted(run, ranks, target, tmp_path):
    ids = convert_ids(
        run, tmp_path, ranks, target, [*b"abc", 262, 263], indices=numpy.array([[0, 2], [3, 5]])
    )
    counts = manifest(tmp_path / "o")["domains"]["x"]
    assert (
        ids == [*b"ab"] and counts["source_tokens_outside_documents"] == 1 and counts["empty_documents"] == 1
    )


def broken(prolong, tmp_path, change) -> tuple[Path]:
    """A copy of the input, changed."""
    shutil.copytree(prolong[0], tmp_path / "in")
    change(tmp_path / "in")
    return (tmp_path / "in",)


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


FIRST, PACKED = "book-64/proc0-3/shard.00000.mds", "code-64/shard.00001.mds.gz"
INDEX = "code-64/index.json"
DAMAGE = {
    "flipped byte": (lambda root: flip_byte(root / FIRST, -3), "sha1 is", FIRST),
    "truncated": (lambda root: os.truncate(root / FIRST, 99), "size is", FIRST),
    "missing": (lambda root: (root / FIRST).unlink(), "missing shard", FIRST),
    "packed": (lambda root: flip_byte(root / PACKED, 30), "cannot unpack|size", PACKED),
    "index": (lambda root: (root / INDEX).write_text("[]"), "not an MDS index", INDEX),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("workers", [1, 2])
def test_damaged_input_names_the_file(command, prolong, ranks, target, tmp_path, kind, workers):
    change, reason, name = DAMAGE[kind]
    root = broken(prolong, tmp_path, change)
    line = arguments(root, ranks, target, tmp_path / "d", "--workers", workers)
    done = command("tools/data/prolong_to_indexed.py", *line)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("prolong_to_indexed:")]
    assert str(tmp_path / "in" / name) in message
    assert any(part in message for part in reason.split("|"))
    assert untouched(tmp_path / "d")


@pytest.mark.parametrize(
    ("columns", "sample", "reason"),
    [
        ({**COLUMNS, "input_ids": "str"}, {"input_ids": "abc"}, "input_ids is str"),
        ({**COLUMNS, "input_ids": "ndarray:float32"}, {}, "input_ids is an array [4] of float32"),
        ({"domain": "str"}, {}, "input_ids is missing"),
        ({**COLUMNS, "indices": "ndarray:float32"}, {}, "indices is an array [1, 2] of float32"),
        (
            {**COLUMNS, "indices": "ndarray:uint32"},
            {"indices": numpy.array([0, 4])},
            "indices is an array [2]",
        ),
        (COLUMNS, {"indices": numpy.array([[0, 3], [2, 4]])}, "document bounds do not ascend"),
        (COLUMNS, {"indices": numpy.array([[0, 5]])}, "document bounds do not ascend within its 4"),
        (
            COLUMNS,
            {"input_ids": numpy.array([1, 2, 3, 518])},
            "token id 518 is not below the source tokenizer's 518",
        ),
    ],
    ids=["str", "float", "missing", "float bounds", "flat bounds", "overlap", "beyond", "large id"],
)
def test_wrong_columns(run, ranks, target, tmp_path, columns, sample, reason):
    sound = {"domain": ".", "indices": numpy.array([[0, 4]]), "input_ids": numpy.arange(4), "length": 4}
    (path,) = write_domain(tmp_path / "in" / "x", columns, [[{**sound, **sample}]])
    code, message, _ = run(
        prolong_to_indexed, *arguments((tmp_path / "in",), ranks, target, tmp_path / "o", "--domains", "x")
    )
    assert code == 1 and reason in message and str(path) in message
    assert untouched(tmp_path / "o")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--domains", "books"], "no folder"),
        (["--domains", "book-64@0"], "weight must be a number above 0"),
        (["--domains", "book-64@x"], "weight must be a number above 0"),
        (["--domains", "book-64@1,code-64"], "every domain a weight or none"),
        (["--domains", "book-64,book-64"], "given twice"),
        (["--split", "validation"], "ProLong has only train"),
        (["--sample-interval", "0"], "--sample-interval 0"),
        (["--workers", "0"], "--workers 0"),
        (["--pack"], "--pack needs --seq-length"),
        (["--exact", "--seq-length", "0"], "--seq-length 0"),
        (["--exact", "--seq-length", "9999999"], "no sample fills --seq-length 9999999"),
        (["--target-tokenizer", "nowhere"], "tokenizer nowhere: no such file"),
        (["--input", "nowhere"], "--input nowhere: no such folder"),
        (["--output", "/dev/null/x"], "/dev/null/x"),
        (["--output", "/proc/x"], "cannot create /proc/x.partial"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(run, prolong, ranks, target, tmp_path, more, reason):
    code, message, _ = run(prolong_to_indexed, *arguments(prolong, ranks, target, tmp_path / "d", *more))
    assert code == 1 and reason in message and "\n" not in message
    assert untouched(tmp_path / "d")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_told_and_the_run_can_go_on(command, run, prolong, ranks, target, tmp_path, workers):
    def limit_files():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    line = arguments(prolong, ranks, target, tmp_path / "d", "--workers", workers)
    done = command("tools/data/prolong_to_indexed.py", *line, preexec_fn=limit_files)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"cannot write {tmp_path / 'd.partial'}" in done.stderr and "make room" in done.stderr
    assert untouched(tmp_path / "d")
    assert run(prolong_to_indexed, *line)[0] == 0


def test_no_overwriting_and_no_mixing(run, prolong, ranks, target, tmp_path):
    line = arguments(prolong, ranks, target, tmp_path / "d")
    assert run(prolong_to_indexed, *line)[0] == 0
    before = os.stat(tmp_path / "d.bin").st_mtime_ns
    assert run(prolong_to_indexed, *line)[0] == 0 and os.stat(tmp_path / "d.bin").st_mtime_ns == before
    code, message, _ = run(prolong_to_indexed, *line, "--sample-interval", 2)
    assert code == 1 and f"{tmp_path / 'd.bin'} exists" in message
    (tmp_path / "e.partial").mkdir()
    plan = {**json.loads((tmp_path / "d.json").read_text()), "input": []}
    (tmp_path / "e.partial" / "plan.json").write_text(json.dumps(plan))
    code, message, _ = run(prolong_to_indexed, *arguments(prolong, ranks, target, tmp_path / "e"))
    assert code == 1 and "unfinished work with other input" in message


def test_only_one_writer(run, prolong, ranks, target, tmp_path):
    import fcntl

    (tmp_path / "d.partial").mkdir()
    with open(tmp_path / "d.partial" / "lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        code, message, _ = run(prolong_to_indexed, *arguments(prolong, ranks, target, tmp_path / "d"))
    assert code == 1 and "another run is writing" in message


@needs_ranks
@pytest.mark.parametrize("workers", [1, 4])
def test_the_sample_to_the_character(command, tmp_path, workers):
    names = ["book-8192", "thestackv1_concat_by_repo-8192"]
    line = ["--input", SAMPLE, "--domains", ",".join(names), "--output", tmp_path / "d", "--seq-length", 8192]
    line += ["--source-tokenizer", LLAMA3, "--target-tokenizer", QWEN, "--workers", workers]
    done = command("tools/data/prolong_to_indexed.py", *line)
    assert done.returncode == 0, done.stderr
    expected = []
    for name in names:
        for line in (SAMPLE / f"{name}.expected.jsonl").read_text().splitlines():
            sample = json.loads(line)
            expected += zip(sample["documents"], sample["eos"], strict=True)
    assert documents(tmp_path / "d", str(QWEN)) == expected and len(expected) == 38
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    theirs, ours = IndexedDataset(str(tmp_path / "d")), read_indexed(tmp_path / "d")
    assert all((theirs[number] == ours.sequence(number)).all() for number in range(38)) and len(theirs) == 38
