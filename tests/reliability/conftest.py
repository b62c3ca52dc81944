"""One tiny model and its data, for runs that die: two layers, 256 tokens, a step in a tenth of a second."""

from pathlib import Path

import pytest

from tests.model.conftest import write_data
from tests.reliability import nursery

STEPS, TOKENS = 8, 256
MODEL = f"""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2
    --seq-length {TOKENS} --global-batch-size 2 --init-method-std 0.2 --tokenizer-type NullTokenizer
    --vocab-size 256 --make-vocab-size-divisible-by 64 --eval-iters 0 --log-interval 1 --num-workers 0
    --lr 1e-2 --lr-decay-style constant --weight-decay 0 --split 100,0,0 --distributed-timeout-minutes 1
    --context-parallel-size 2 --attn-type moba --use-distributed-optimizer
""".split()
LAYOUTS = {
    "cp1": (1, ["--context-parallel-size", "1"]),
    "cp2": (2, []),
    "cp2tp2": (4, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
}


class Site:
    """A folder for runs of the tiny model: data, settings, and the losses of the unbroken run."""

    def __init__(self, folder: Path):
        self.folder = folder
        settings = folder / "moba.yaml"
        settings.write_text("moba_chunk_size: 32\nmoba_topk: 3\nblock_size: 16\n")
        data = ["--data-path", str(write_data(folder / "text")), "--data-cache-path", str(folder / "cache")]
        self.flags = [*MODEL, *data, "--train-attn-config", str(settings)]
        self.known: dict = {}

    def start(self, name: str, flags=(), *, layout="cp2", steps=STEPS, fault=None) -> nursery.Run:
        """Starts a run in the subfolder `name`."""
        ranks, parallel = LAYOUTS[layout]
        flags = [*self.flags, *parallel, "--train-iters", str(steps), *flags]
        return nursery.start(self.folder / name, ranks, flags, fault)

    def unbroken(self, layout: str = "cp2", steps: int = STEPS) -> dict[int, float]:
        """The losses of a run that nothing happened to."""
        if layout not in self.known:
            run = self.start(f"unbroken-{layout}", layout=layout, steps=steps)
            assert not any(run.wait()), run.log()[-3000:]
            self.known[layout] = run.losses()
        return self.known[layout]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Starts the run that hangs at once: its timeout is a minute, which passes while other tests run."""
    place = Site(tmp_path_factory.mktemp("site"))
    place.hung = place.start("hung", fault=nursery.Fault(1, 3, "ring", "hang"))
    yield place
    place.hung.stop()
