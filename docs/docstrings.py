"""Shows the aligned `name   what it is` lines of docstrings as a list: a Griffe extension for mkdocs.yml."""

import re

from griffe import Extension, Object

ROW = re.compile(r"^(\w[\w, ]*?) {2,}(\S.*)$")


class AlignedRows(Extension):
    """Rewrites the docstring of every object that has one."""

    def on_object(self, *, obj: Object, **kwargs) -> None:
        """Called by Griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """`text` with its aligned rows as Markdown list items; indented lines after a row belong to it."""
    lines, in_row = [], False
    for line in text.splitlines():
        row = ROW.match(line)
        if row:
            lines += ["", f"- `{row[1]}`: {row[2]}"]
        elif in_row and line.startswith("  "):
            lines.append(f"  {line.strip()}")
        else:
            lines += [""] * (in_row and bool(line)) + [line]
        in_row = bool(row) or (in_row and line.startswith("  "))
    return "\n".join(lines)
