"""Every method draws its mask from the command line."""

import subprocess
import sys

import pytest


def draw(method, *flags):
    command = [sys.executable, "-W", "ignore", "-m", f"megatron_mtrain.index.{method}", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("method", ["dense", "minfer", "moba", "xattn"])
def test_draws_a_picture(tmp_path, method):
    out = tmp_path / "mask.png"
    done = draw(method, "--out", str(out), "--seq-length", "512")
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")


def test_refuses_a_sequence_that_does_not_fit(tmp_path):
    done = draw("moba", "--out", str(tmp_path / "x.png"), "--seq-length", "1000")
    assert done.returncode == 2
    assert "sequence length 1000 is not a multiple" in done.stderr
    assert not (tmp_path / "x.png").exists()
