"""No code from data: what a file or a name can make the program do is read numbers."""

import ast
import pickle
from pathlib import Path

import pytest

from megatron_mtrain.metadata import check_checkpoint, check_metadata
from tests.reliability.draws import SEEDS, damage, fuzz
from tests.tools.data.mds_writer import write_domain
from tools.data.files import DataError
from tools.data.mds import read_index

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("megatron_mtrain", "kernels", "tools", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
] + [ROOT / "pretrain_qwen.py", ROOT / "setup.py"]
# Whole names of calls that can run code or a shell out of data.
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "runpy.run_path"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "joblib.load", "dill.load"),
}
# Keyword arguments that do.
SWITCHES = {("allow_pickle", True), ("shell", True), ("trust_remote_code", True), ("weights_only", False)}


def dangers(source: str) -> list[str]:
    """The dangerous calls of a Python text: name and line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
        bare = name == "torch.load" and given.get("weights_only") is not True
        if name in FORBIDDEN or bare or SWITCHES & set(given.items()):
            found.append(f"{name}, line {node.lineno}")
    return found


def test_no_call_runs_code_from_data():
    found = {str(path.relative_to(ROOT)): dangers(path.read_text()) for path in SOURCES}
    assert len(found) > 60
    # The one unpickler is that of metadata.py, a class with an allow list.
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "call",
    [
        *("eval(text)", "pickle.load(file)", "yaml.load(file, Loader)", "torch.load(file)"),
        *("torch.load(file, weights_only=False)", "numpy.load(file, allow_pickle=True)"),
        *("subprocess.run(text, shell=True)", "AutoModel.from_pretrained(name, trust_remote_code=True)"),
    ],
)
def test_the_search_finds_what_it_looks_for(call):
    assert dangers(f"x = {call}") != []
    assert dangers("yaml.safe_load(x); torch.load(x, weights_only=True); model.eval()") == []


@pytest.mark.parametrize("name", ["../outside.mds", "/etc/passwd", "a/../../outside.mds"])
def test_an_mds_index_cannot_name_files_elsewhere(tmp_path, name):
    write_domain(tmp_path / "in", {"length": "int"}, [[{"length": 3}]])
    path = tmp_path / "in" / "index.json"
    path.write_text(path.read_text().replace("shard.00000.mds", name))
    with pytest.raises(DataError, match="leads out of the folder"):
        read_index(tmp_path / "in")


class Poison:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_cannot_run_code(tmp_path):
    """A pickle that names a function is refused before it is called; so is one that walks to it."""
    mark, folder = tmp_path / "mark", tmp_path / "iter_0000003"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    dotted = b"ctorch.distributed.checkpoint.filesystem\nos.getcwd\n(tR."
    imported = b"ctorch.distributed.checkpoint.filesystem\nuuid\n."
    for data in (pickle.dumps({"a": Poison(mark)}), dotted, imported):
        (folder / ".metadata").write_bytes(data)
        for check in (lambda: check_metadata(folder), lambda: check_checkpoint(str(tmp_path))):
            with pytest.raises(ValueError, match="do not load it"):
                check()
    assert not mark.exists()


def test_checkpoints_of_a_run_pass(site):
    run = site.start("passes", ["--save", str(site.folder / "passes" / "saved")], layout="cp1", steps=1)
    assert run.wait() == [0], run.log()[-3000:]
    check_checkpoint(str(site.folder / "passes" / "saved"))


def test_damaged_metadata_is_told_in_one_line(site, tmp_path):
    """Bytes changed at random never get as far as an unpickler that knows more."""
    (source,) = (site.folder / "passes" / "saved").glob("iter_*")
    data = (source / ".metadata").read_bytes()

    def check(seed):
        (tmp_path / ".metadata").write_bytes(damage(data, seed))
        try:
            check_metadata(tmp_path)
        except ValueError as error:
            assert "\n" not in str(error) and str(tmp_path) in str(error)

    fuzz(300, check, seed=SEEDS)
