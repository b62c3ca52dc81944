"""Compiles the kernels for Hopper without a GPU: no spilled tiles, no serialised matrix products.

    python tests/kernels/test_compile.py        prints registers, shared memory and warnings of every kernel
    as JSON

The launchers run as they are, on CPU tensors; only the launch itself is replaced, so that what is compiled
here is what a GPU runs. In a process of its own, because the other tests of this folder need the interpreter.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# ptxas: "wgmma serialized" (C7510, C7512, C7514, C7515): right results at half the speed, or less.
SERIALISED = ("C7510", "C7511", "C7512", "C7513", "C7514", "C7515", "serializ")
RELOADED_WORDS = 5  # of a thread, in an iteration
SHARED_BYTES = 227 * 1024  # of a multiprocessor, what one program can take
# Two programs share a multiprocessor.
PAIRED = ("forward_kernel", "dkey_kernel", "dcolumn_kernel", "routed_forward_kernel", "routed_dkey_kernel")


@pytest.fixture(scope="module")
def report():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        ran = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_every_kernel_is_compiled(report):
    assert {entry["kernel"] for entry in report} == {
        "forward_kernel",
        "dquery_kernel",
        "dkey_kernel",
        "dcolumn_kernel",
        "add_columns_kernel",
        "row_delta_kernel",
        "routed_forward_kernel",
        "routed_dquery_kernel",
        "routed_dkey_kernel",
        "in_routed_order_kernel",
        "cell_mass_kernel",
        "block_scores_kernel",
    }


def test_no_spilled_tiles(report):
    """A few counters and addresses may spill, of which a loop reads some words; no part of a tile may."""
    for entry in report:
        assert entry["reloaded_words"] <= RELOADED_WORDS, entry
        assert entry["wgmma"] or not entry["spilled_bytes"], entry


def test_no_serialised_products(report):
    assert [entry for entry in report if entry["warnings"]] == []


def test_operands_in_registers_stay(report):
    """The products of dQ whose left operand no instruction of the loop writes: all of Q K^T and dO V^T.

    ptxas 12.8 gives those registers away where the head size is 64 (see in_registers): no warning, wrong dQ.
    """
    for entry in report:
        if entry["kernel"].endswith("dquery_kernel") and "d 128" in entry["case"]:
            assert entry["kept_operands"] == 16, entry


def test_matrix_units_and_copy_engine(report):
    """wgmma for every product and, in the loops, loads by the tensor memory accelerator."""
    for entry in report:
        if entry["kernel"] in ("add_columns_kernel", "row_delta_kernel", "in_routed_order_kernel"):
            continue
        assert entry["wgmma"] > 0 and entry["mma"] == 0, entry
        assert entry["tma"] > 0, entry


def test_programs_that_share_a_multiprocessor(report):
    for entry in report:
        limit = SHARED_BYTES // 2 if entry["kernel"] in PAIRED else SHARED_BYTES
        assert entry["shared_bytes"] <= limit, entry
        if entry["kernel"] in PAIRED:
            assert entry["registers"] * 32 * entry["warps"] * 2 <= 65536, entry


def main() -> None:
    """Prints the report; the library is imported here, after the choice of no interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    report = []
    case = ""

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        options, signature, constants, attributes = kernel._pack_args(
            backend, kwargs, bound, specialization, options
        )
        with contextlib.redirect_stdout(io.StringIO()):
            built = triton.compile(
                ASTSource(kernel, signature, constants, attributes), target=target, options=options.__dict__
            )
        entry = {"kernel": kernel.__name__, "case": case, "warps": options.num_warps}
        report.append(entry | {"shared_bytes": built.metadata.shared} | _assemble(built.asm["ptx"]))

    JITFunction.run = compile_only
    both = (False, True)
    cases = (*itertools.product((128,), (8,), both, both), (64, 8, True, True), (128, 1, True, True))
    cut = (*itertools.product((128,), (8,), both, (True,)), (64, 8, True, True))
    for documents, settings in ((False, cases), (True, cut)):
        for head_dim, group, diagonal, columns in settings:
            case = (
                f"d {head_dim}, group {group}, diagonal {diagonal}, columns {columns}, documents {documents}"
            )
            _step(head_dim, group, diagonal, columns, documents)
    for head_dim, documents in ((128, False), (128, True), (64, True)):
        case = f"d {head_dim}, documents {documents}"
        _routed(head_dim, documents)
    for documents in both:
        case = f"d 128, documents {documents}"
        _antidiagonal(128, documents)
    json.dump(report, sys.stdout, indent=1)


BLOCKS, TOKENS = 16, 16 * 128


def _tensors(head_dim: int, group: int):
    query = torch.zeros(TOKENS, 1, 2 * group, head_dim, dtype=torch.bfloat16)
    return query, torch.zeros(TOKENS, 1, 2, head_dim, dtype=torch.bfloat16)


def _zeros(*shape):
    return torch.zeros(1, *shape, dtype=torch.int32)


def _step(head_dim: int, group: int, diagonal: bool, columns: bool, documents: bool) -> None:
    from megatron_mtrain.kernels import triton_backend
    from megatron_mtrain.kernels.tiles import Columns, Tiles

    query, key = _tensors(head_dim, group)
    h, c = 2 * group, 64
    lists = _zeros(h, BLOCKS), _zeros(h, BLOCKS, BLOCKS)
    gathered = (
        Columns(_zeros(h, c), _zeros(h), _zeros(h, BLOCKS), _zeros(h, BLOCKS, c // 32)) if columns else None
    )
    tiles = Tiles(*lists, diagonal, 128, gathered, first_key=_zeros(TOKENS) if documents else None)
    triton_backend.attend(query, key, key, tiles, 0.1)
    lse = torch.zeros(1, h, TOKENS)
    triton_backend.attend_backward(query, query, key, key, query.float(), lse, tiles, 0.1)


def _routed(head_dim: int, documents: bool) -> None:
    from megatron_mtrain.kernels import routed
    from megatron_mtrain.kernels.tiles import Routes, Tiles

    query, key = _tensors(head_dim, 8)
    routes = Routes(torch.tensor([0, TOKENS], dtype=torch.int32), _zeros(16, 2), _zeros(16, TOKENS))
    tiles = Tiles(_zeros(16, BLOCKS), _zeros(16, BLOCKS, 1), True, 128, routes=routes)
    if documents:
        tiles = tiles._replace(first_key=_zeros(TOKENS))
    lse = torch.zeros(1, 16, TOKENS)
    routed.add_forward(query, key, key, query.float(), lse, tiles, 0.1)
    rows = query, query, key, key, lse, lse
    routed.add_backward_key(*rows, key.float(), key.float(), tiles, 0.1)
    routed.add_backward_query(*rows, query.float(), tiles, 0.1)


def _antidiagonal(head_dim: int, documents: bool) -> None:
    from megatron_mtrain.kernels import antidiagonal

    query, key = _tensors(head_dim, 8)
    blocks, cells = torch.arange(BLOCKS), _zeros(TOKENS // 16) if documents else None
    mass = antidiagonal.cell_mass_on_triton(query, key, blocks, blocks, 16, 0.1, cells)
    antidiagonal.block_scores_on_triton(query, key, blocks, blocks, mass, 16, 0.1, cells)


@functools.cache
def _assemble(ptx: str) -> dict:
    """Registers, spills and warnings of ptxas, and the instructions that matter."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", source, "-o", binary]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        command = [knobs.nvidia.cuobjdump.path, "-sass", binary]
        machine = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    loop = _loop(machine)
    words = log.replace(",", " ").split()
    return {
        "registers": int(words[words.index("Used") + 1]),
        "spilled_bytes": int(words[words.index("spill") - 2]),
        "warnings": [line for line in log.splitlines() if any(mark in line for mark in SERIALISED)],
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "reloaded_words": _reloaded_words(loop),
        "kept_operands": _kept_operands(loop),
    }


def _loop(machine: str) -> list[str]:
    """The instructions of the smallest loop that has any products."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", machine)]
    loops = []
    for at, text in code:
        target = re.search(r"BRA.* (0x[0-9a-f]+)", text)
        if target and (start := int(target[1], 16)) < at:
            body = [line for place, line in code if start <= place <= at]
            if any("HGMMA" in line for line in body):
                loops.append(body)
    return min(loops, key=len, default=[])


def _reloaded_words(loop: list[str]) -> int:
    """Spilled words that the loop reads, branches included."""
    loads = [line for line in loop if re.search(r"\bLDL\b", line)]
    return sum(4 if ".128" in line else 2 if ".64" in line else 1 for line in loads)


def _kept_operands(loop: list[str]) -> int:
    """Products of the loop whose left operand's registers it never writes."""
    written = set()
    for line in loop:
        target = re.match(r"(?:@!?U?P\w+ )?(\S+) R(\d+)", line)
        if target and not target[1].startswith(("ST", "RED", "R2UR")):
            size = re.search(r"HGMMA\.64x(\d+)", line)
            width = int(size[1]) // 2 if size else 4 if ".128" in target[1] else 2
            written |= set(
                range(
                    int(target[2]),
                    int(target[2]) + (width if size or re.search(r"\.(64|128|WIDE)", target[1]) else 1),
                )
            )
    operands = [int(found[1]) for line in loop if (found := re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", line))]
    return sum(not written & set(range(first, first + 4)) for first in operands)


if __name__ == "__main__":
    main()
