"""The picture of layouts counts the work of every rank."""

import pytest

from tools.plot import layouts


def test_work_of_ranks():
    figure = layouts.draw(4, 16)
    labels = {axis.get_title(): axis.get_xlabel() for axis in figure.axes}
    assert labels["zigzag"].endswith("34, 34, 34, 34")
    assert labels["stripe"].endswith("28, 32, 36, 40")
    assert labels["contiguous (not used)"].endswith("10, 26, 42, 58")


def test_command_line(call, tmp_path):
    out = tmp_path / "layouts.png"
    assert call(layouts, "--out", out) is None
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "sequence length 15" in call(layouts, "--blocks", 15, "--out", out)
    with pytest.raises(ValueError, match="give at most 7"):
        layouts.draw(8, 16)
