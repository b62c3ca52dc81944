"""The recipe from the download on, and the check of free space before it."""

import os
import subprocess
import sys

import pytest

from tests.tools.data.conftest import ROOT, manifest


@pytest.fixture
def recipe(prolong, ranks, target, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "long-context-524288").symlink_to(prolong[0])

    def call(**settings) -> subprocess.CompletedProcess:
        paths = {"RAW_DATASET_DIR": str(tmp_path / "raw"), "PROCESSED_DATA_DIR": str(tmp_path / "out")}
        tokenizers = {"SOURCE_TOKENIZER": ranks, "TARGET_TOKENIZER": target, "PYTHON": sys.executable}
        environment = {**os.environ, **paths, **tokenizers, "PROCESSED_GB": "0", **settings}
        line = ["bash", str(ROOT / "examples" / "prepare_prolong.sh")]
        return subprocess.run(line, env=environment, capture_output=True, text=True, cwd=tmp_path)

    return call


def test_everything_there_is_every_fourth_sample(recipe, tmp_path):
    done = recipe(DOWNLOAD="no")
    assert done.returncode == 0, done.stderr
    assert f"--data-path {tmp_path / 'out' / 'prolong'}" in done.stdout
    domains = manifest(tmp_path / "out" / "prolong")["domains"]
    assert {name: counts["samples"] for name, counts in domains.items()} == {"book-64": 2, "code-64": 3}


def test_chosen_domains(recipe, tmp_path):
    assert recipe(DOWNLOAD="no", DOMAINS="code-64", SAMPLE_INTERVAL="1").returncode == 0
    assert list(manifest(tmp_path / "out" / "prolong")["domains"]) == ["code-64"]


def test_too_little_room_stops_before_the_download(recipe):
    done = recipe(RAW_GB="999999999")
    assert done.returncode == 1 and "999999999 GB needed" in done.stderr


def test_it_says_what_to_set(recipe):
    done = recipe(SOURCE_TOKENIZER="")
    assert done.returncode != 0 and "set it to the tokenizer of Llama-3" in done.stderr


def test_it_is_a_short_recipe():
    assert len((ROOT / "examples" / "prepare_prolong.sh").read_text().splitlines()) < 40
