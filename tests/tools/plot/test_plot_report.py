"""The report: its sections, what it leaves out, that it is one file, and that nothing is half-written."""

import base64
import re

import pytest

from tools.plot import report

ALWAYS = ["numbers", "left-out", "arguments"]
EVENTS = [
    "loss",
    "speed",
    "density",
    "recall",
    "columns",
    "slashes",
    "heads",
    "ring-measured",
    "ring-modelled",
]


@pytest.fixture
def html(tmp_path, call):
    """html(*flags): the text of a report."""

    def make(*flags):
        out = tmp_path / "report.html"
        assert call(report, *flags, "--out", out) is None
        return out.read_text()

    return make


def anchors(text):
    return set(re.findall(r'<h2 id="([^"]+)">', text))


def test_a_full_run(full_run, tmp_path, write_run, html):
    other = write_run(tmp_path / "other", {"lm loss": {1: 3.5}}, arguments={"attn_type": "dense"})
    bench = tmp_path / "b.csv"
    bench.write_text("tokens,method,density,total_ms,speedup\n65536,minfer,0.05,10.0,5.0\n")
    text = html(full_run, "--compare", other, "--bench", bench)
    assert anchors(text) == {*ALWAYS, *EVENTS, "throughput"}
    assert set(re.findall(r'href="#([^"]+)"', text)) == anchors(text)
    for name, values in {"Attention": ("minfer", "dense"), "Loss at the end": ("3.4000", "3.5000")}.items():
        assert re.search(rf"{name}</th><td>{values[0]}[^<]*</td><td>{values[1]}", text), name
    assert "Tokens a second</th><td>4,096</td><td></td>" in text
    assert "819,200 tokens" in text
    assert '<th scope="row">lr</th><td>2e-05</td>' in text
    assert "What is attended</th><td>no model was given to run on a text" in text


def test_pictures_are_inside_and_nothing_is_asked_for(full_run, html):
    text = html(full_run)
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(images) == len(EVENTS)
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
    outside = re.sub(r"base64,[^\"]+", "", text)
    assert not re.search(r"https?:|<script|<link|@import|url\(", outside)
    assert "&lt;script&gt;&amp;" in text


def test_a_bare_run_says_what_it_lacks(tmp_path, write_run, html):
    text = html(write_run(tmp_path / "bare", {"lm loss": {1: 5.0, 2: 4.0}}))
    assert anchors(text) == {*ALWAYS, "loss"}
    for words in ("--no-log-attention", "--log-ring-timing", "does not say its context_parallel_size",
                  "only minfer has them", "give --bench", "give --checkpoint"):  # fmt: skip
        assert words in text
    assert "The run did not write its arguments." in text


def test_masked_heads_are_spread():
    assert report.shown(36, 16) == {(layer, head) for layer in (0, 18, 35) for head in (0, 4, 8, 12)}
    assert report.shown(1, 2) == {(0, 0), (0, 1)}


def test_wrong_inputs_write_nothing(full_run, tmp_path, call):
    out = tmp_path / "x.html"
    assert "missing is no folder" in call(report, tmp_path / "missing", "--out", out)
    assert "missing is no folder" in call(report, full_run, "--compare", tmp_path / "missing", "--out", out)
    assert "missing.json" in call(report, full_run, "--bench", tmp_path / "missing.json", "--out", out)
    assert "give both or neither" in call(report, full_run, "--checkpoint", tmp_path, "--out", out)
    assert "must end in .html" in call(report, full_run, "--out", tmp_path / "x.png")
    assert "neither a Hugging Face" in call(
        report, full_run, "--checkpoint", tmp_path, "--data-path", full_run, "--out", out
    )
    assert not list(tmp_path.glob("*x.*"))
    assert not list(tmp_path.glob(".*"))


def test_a_failed_write_keeps_the_old_report(full_run, tmp_path, call, monkeypatch):
    out = tmp_path / "x.html"
    out.write_text("old")
    monkeypatch.setattr(report, "png", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    assert "disk full" in call(report, full_run, "--out", out)
    assert out.read_text() == "old"
