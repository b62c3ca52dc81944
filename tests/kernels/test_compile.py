"""Compiles the kernels for Hopper without a GPU: no spilled registers, no serialised matrix products.

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
SPILLED_BYTES = 32
SHARED_BYTES = 227 * 1024  # of a multiprocessor, what one program can take
PAIRED = ("forward_kernel", "dkey_kernel", "dcolumn_kernel")  # two programs share a multiprocessor


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
    }


def test_no_spilled_tiles(report):
    """A few counters and addresses may spill, of which a loop reads a word or two; no part of a tile may."""
    assert [entry for entry in report if entry["spilled_bytes"] > SPILLED_BYTES] == []


def test_no_serialised_products(report):
    assert [entry for entry in report if entry["warnings"]] == []


def test_operands_in_registers_stay(report):
    """The products of dQ whose left operand no instruction of the loop writes: all of Q K^T and dO V^T.

    ptxas 12.8 gives those registers away where the head size is 64 (see in_registers): no warning, wrong dQ.
    """
    for entry in report:
        if entry["kernel"] == "dquery_kernel" and "d 128" in entry["case"]:
            assert entry["kept_operands"] == 16, entry


def test_matrix_units_and_copy_engine(report):
    """wgmma for every product and, in the loops, loads by the tensor memory accelerator."""
    for entry in report:
        if entry["kernel"] in ("add_columns_kernel", "row_delta_kernel"):
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

    from megatron_mtrain.kernels import triton_backend

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
    cases = (*itertools.product((64, 128), (8,), both, both), (128, 1, True, True))
    for head_dim, group, diagonal, columns in cases:
        case = f"d {head_dim}, group {group}, diagonal {diagonal}, columns {columns}"
        _step(triton_backend, head_dim, group, diagonal, columns)
    json.dump(report, sys.stdout, indent=1)


def _step(backend, head_dim: int, group: int, diagonal: bool, columns: bool) -> None:
    from megatron_mtrain.kernels.tiles import Columns, Tiles

    m, c = 16, 64
    query = torch.zeros(m * 128, 1, 2 * group, head_dim, dtype=torch.bfloat16)
    key = torch.zeros(m * 128, 1, 2, head_dim, dtype=torch.bfloat16)
    lse = torch.zeros(1, 2 * group, m * 128)

    def zeros(*shape):
        return torch.zeros(1, 2 * group, *shape, dtype=torch.int32)

    gathered = Columns(zeros(c), zeros(), zeros(m), zeros(m, c // 32)) if columns else None
    tiles = Tiles(zeros(m), zeros(m, m), diagonal, 128, gathered)
    backend.attend(query, key, key, tiles, 0.1)
    backend.attend_backward(query, query, key, key, query.float(), lse, tiles, 0.1)


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
    words = log.replace(",", " ").split()
    return {
        "registers": int(words[words.index("Used") + 1]),
        "spilled_bytes": int(words[words.index("spill") - 2]),
        "warnings": [line for line in log.splitlines() if any(mark in line for mark in SERIALISED)],
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "kept_operands": _kept_operands(machine),
    }


def _kept_operands(machine: str) -> int:
    """Products in the smallest loop that has any whose left operand's registers the loop never writes."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", machine)]
    loops = []
    for at, text in code:
        target = re.search(r"BRA.* (0x[0-9a-f]+)", text)
        if target and (start := int(target[1], 16)) < at:
            body = [line for place, line in code if start <= place <= at]
            if any("HGMMA" in line for line in body):
                loops.append(body)
    body = min(loops, key=len, default=[])
    written = set()
    for line in body:
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
    operands = [int(found[1]) for line in body if (found := re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", line))]
    return sum(not written & set(range(first, first + 4)) for first in operands)


if __name__ == "__main__":
    main()
