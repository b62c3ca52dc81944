"""Progress on standard error: share done, rate and time left; in place on a terminal, else now and then."""

import sys
import time


class Progress:
    """Counts units of known size in bytes and the tokens made of them; at most one line every few seconds."""

    def __init__(self, total: int, interval: float = 5.0) -> None:
        """`total` bytes of input to do; `interval` seconds between lines (a tenth of it on a terminal)."""
        self.total, self.done, self.tokens = max(total, 1), 0, 0
        self.terminal = sys.stderr.isatty()
        self.interval = interval / 10 if self.terminal else interval
        self.begin = time.monotonic()
        self.shown = self.begin

    def skip(self, size: int) -> None:
        """Take `size` bytes off the work: an earlier run did them, so they say nothing about the rate."""
        self.total = max(self.total - size, 1)

    def add(self, size: int, tokens: int) -> None:
        """Count `size` bytes done and `tokens` made of them."""
        self.done, self.tokens = self.done + size, self.tokens + tokens
        if time.monotonic() - self.shown >= self.interval:
            self.show("\r" if self.terminal else "\n")

    def line(self) -> str:
        """For example "  43.0%  12,345,678 tokens  4.1 million tokens/s  0:01:20 left"."""
        seconds = max(time.monotonic() - self.begin, 1e-9)
        left = int(seconds * (self.total - self.done) / max(self.done, 1))
        clock = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}" if self.done else "-:--:--"
        share, rate = 100 * self.done / self.total, self.tokens / seconds / 1e6
        return f"  {share:5.1f}%  {self.tokens:,} tokens  {rate:.2f} million tokens/s  {clock} left"

    def show(self, end: str = "\n") -> None:
        """Write the line."""
        self.shown = time.monotonic()
        sys.stderr.write(self.line() + end)
        sys.stderr.flush()
