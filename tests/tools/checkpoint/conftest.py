import pytest

from tests.tools.checkpoint import tiny_models
from tests.tools.checkpoint.ranks import Ranks
from tools.checkpoint.convert_qwen import parse_arguments, run


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    processes = Ranks(tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def convert():
    """Runs a command line of convert_qwen.py in this process."""
    return lambda *words: run(parse_arguments([str(word) for word in words]))


@pytest.fixture(scope="session")
def converted(tmp_path_factory, convert):
    """By name of a model: its Hugging Face folder, its Megatron folder, and its greedy tokens and logits."""
    done = {}

    def get(name: str, **settings):
        key = (name, *map(str, settings.values()))
        if key not in done:
            folder = tmp_path_factory.mktemp("model")
            model = tiny_models.make_model(name, **settings)
            hf = tiny_models.save(model, folder / "hf", max_shard_size="60KB")
            convert("to-megatron", "--hf", hf, "--out", folder / "megatron")
            done[key] = hf, folder / "megatron", *tiny_models.greedy(model)
        return done[key]

    return get
