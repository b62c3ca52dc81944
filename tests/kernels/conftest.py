"""Kernel tests: Triton's interpreter on a CPU, the real thing where there is a GPU.

The interpreter is chosen when a kernel is defined, so the switch is set before anything imports Triton. Run these tests
as a process of their own (`pytest tests/kernels`): where another test imported Triton first, the kernels are compiled
ones, and the interpreter tests skip themselves.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fills what torch.empty returns with NaN (or a large integer): an element that no kernel wrote shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor):
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        return tensor.fill_(2**30) if tensor.dtype == torch.int32 else tensor

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fill(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: fill(empty_like(*args, **kwargs)))
