"""One HTML file with pictures and tables, that asks for nothing from outside of itself."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd; padding-bottom: 0.2rem }
nav a { margin-right: 1rem; white-space: nowrap }
a { color: #0072b2 }
img { max-width: 100%; height: auto; display: block; margin: 0.5rem auto }
table { border-collapse: collapse; font-size: 0.9rem }
td, th { text-align: left; padding: 0.15rem 1rem 0.15rem 0; border-bottom: 1px solid #eee;
  vertical-align: top; overflow-wrap: anywhere }
th { font-weight: 600; white-space: nowrap }
summary { cursor: pointer; color: #0072b2 }
.quiet { color: #666; font-size: 0.9rem }
"""


@dataclass(frozen=True)
class Picture:
    """A section: its anchor, its title, what one sees, and the PNG."""

    anchor: str
    title: str
    words: str
    png: bytes


@dataclass(frozen=True)
class Page:
    """What a report holds. Tables are (name, value) rows; headline has a value for every name in `columns`,
    left_out is (picture, why it is not there)."""

    title: str
    subtitle: str
    columns: list[str]
    headline: list[tuple[str, ...]]
    pictures: list[Picture]
    left_out: list[tuple[str, str]] = field(default_factory=list)
    arguments: list[tuple[str, str]] = field(default_factory=list)
    other_arguments: list[tuple[str, str]] = field(default_factory=list)

    def html(self) -> str:
        """The whole file."""
        parts = [f"<h1>{escape(self.title)}</h1>", f'<p class="quiet">{escape(self.subtitle)}</p>']
        parts += [self._contents(), '<h2 id="numbers">Numbers</h2>', table(self.headline, self.columns)]
        parts += [_section(picture) for picture in self.pictures]
        if self.left_out:
            parts += ['<h2 id="left-out">Left out</h2>', table(self.left_out)]
        parts += ['<h2 id="arguments">Arguments</h2>', self._arguments()]
        body = "\n".join(parts)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
        )

    def _contents(self) -> str:
        entries = [("numbers", "Numbers"), *((each.anchor, each.title) for each in self.pictures)]
        entries += [("left-out", "Left out")] if self.left_out else []
        entries += [("arguments", "Arguments")]
        links = " ".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title in entries)
        return f"<nav>{links}</nav>"

    def _arguments(self) -> str:
        if not self.arguments and not self.other_arguments:
            return "<p>The run did not write its arguments.</p>"
        if not self.other_arguments:
            return table(self.arguments)
        summary = f"<summary>{len(self.other_arguments)} more</summary>"
        return f"{table(self.arguments)}<details>{summary}{table(self.other_arguments)}</details>"


def table(rows: Iterable[tuple[str, ...]], columns: Sequence[str] = ()) -> str:
    """Names and their values, under the names of the columns where there are several."""
    lines = []
    if len(columns) > 1:
        heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
        lines.append(f"<tr><td></td>{heads}</tr>")
    for name, *values in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return f"<table>{''.join(lines)}</table>"


def _section(picture: Picture) -> str:
    data = b64encode(picture.png).decode()
    return (
        f'<h2 id="{picture.anchor}">{escape(picture.title)}</h2>\n<p>{escape(picture.words)}</p>\n'
        f'<img alt="{escape(picture.title)}: {escape(picture.words)}" src="data:image/png;base64,{data}">'
    )
