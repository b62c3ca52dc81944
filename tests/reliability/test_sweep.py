"""Every wrong input of the sweep is refused by one line that says what was given and what to do."""

import re
from pathlib import Path

from tests.reliability.sweep import sweep

DOC = Path(__file__).parents[2] / "docs" / "RELIABILITY.md"
# Words of a rule or a way out; a message has to have one.
WAY_OUT = (
    "use|give|set|choose|allowed|leave|nearest|must|needs?|copy|write|expected|lower|start|add|layouts are|"
    "budget is|says|neither|shipped|only|cannot|has to be|does not|not load|complete ones|download|"
    "is missing|is not|unknown|holds"
)


def test_every_wrong_input_is_refused_in_one_line(tmp_path):
    rows = list(sweep(tmp_path))
    assert len(rows) >= 60
    for what, message in rows:
        assert message, f"{what} was not refused"
        assert "\n" not in message and len(message) > 20, what
        assert re.search(rf"\b({WAY_OUT})\b", message), message
    table = DOC.read_text().split("## Wrong inputs")[1]
    assert table.count("\n| ") - 1 >= 60
