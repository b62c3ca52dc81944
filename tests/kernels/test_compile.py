"""Compiles the kernels for Hopper without a GPU: no spilled registers, no serialised matrix products.

    python tests/kernels/test_compile.py        prints registers, shared memory and warnings of every kernel as JSON

The launchers run as they are, on CPU tensors; only the launch itself is replaced, so that what is compiled here is what
a GPU runs. In a process of its own, because the other tests of this folder need the interpreter.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# ptxas: "wgmma serialized" (C7510, C7512, C7514, C7515): right results at half the speed, or less.
SERIALISED = ("C7510", "C7511", "C7512", "C7513", "C7514", "C7515", "serializ")
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


def test_no_spills(report):
    assert [entry for entry in report if entry["spilled_bytes"]] == []


def test_no_serialised_products(report):
    assert [entry for entry in report if entry["warnings"]] == []


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
        options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
        with contextlib.redirect_stdout(io.StringIO()):
            built = triton.compile(
                ASTSource(kernel, signature, constants, attributes), target=target, options=options.__dict__
            )
        entry = {"kernel": kernel.__name__, "case": case, "warps": options.num_warps}
        report.append(entry | {"shared_bytes": built.metadata.shared} | _assemble(built.asm["ptx"]))

    JITFunction.run = compile_only
    for head_dim in (64, 128):
        for group in (1, 8):
            for diagonal in (False, True):
                for columns in (False, True):
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


def _assemble(ptx: str) -> dict:
    """Registers, spills and warnings of ptxas, and the instructions that matter."""
    from triton import knobs

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", source.name, "-o", os.devnull]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    words = log.replace(",", " ").split()
    return {
        "registers": int(words[words.index("Used") + 1]),
        "spilled_bytes": int(words[words.index("spill") - 2]),
        "warnings": [line for line in log.splitlines() if any(mark in line for mark in SERIALISED)],
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tma": ptx.count("cp.async.bulk.tensor"),
    }


if __name__ == "__main__":
    main()
