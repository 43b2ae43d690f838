"""Triton kernels without a GPU: run in the interpreter, compiled to machine code for real ones."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton's wheels exist for Linux only")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_infinipipe.ops.triton_cross_entropy import cross_entropy_kernel, launch_sizes

CASES = Path(__file__).with_name("interpreter_cases.py")
LIGERS = Path(__file__).parent.with_name("model") / "liger_cases.py"
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def test_kernels_give_in_tritons_interpreter_what_torch_gives() -> None:
    """Our cross-entropy, and Liger's layers where they are installed."""
    files = [CASES, *([LIGERS] if find_spec("liger_kernel") else [])]
    # a process of its own: Triton decides when it is imported whether it interprets
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"\d\d passed", run.stdout) and "skipped" not in run.stdout


def _source(dtype: str, is_weighted: bool, with_gradient: bool, is_aligned: bool) -> ASTSource:
    wide = "fp64" if dtype == "fp64" else "fp32"
    constants: dict[str, Any] = {
        "HAS_WEIGHTS": is_weighted,
        "WITH_GRADIENT": with_gradient,
        "WIDE": tl.float64 if wide == "fp64" else tl.float32,
        "BLOCK": launch_sizes(128_256)[0],
    }
    if not is_weighted:
        constants["weights_ptr"] = None
    types = {
        "logits_ptr": f"*{dtype}",
        "row_stride": "i32",
        "labels_ptr": "*i64",
        "weights_ptr": "*fp32",
        "losses_ptr": f"*{wide}",
        "vocab_size": "i32",
        "ignore_index": "i32",
        "grad_scale": "fp32",
    }
    names = cross_entropy_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    # what Triton finds out about its arguments when a vocabulary is a multiple of 16
    aligned = ("logits_ptr", "row_stride", "vocab_size") if is_aligned else ("logits_ptr",)
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    return ASTSource(cross_entropy_kernel, signature, constants, attributes)


def _compile(source: ASTSource, capability: int) -> Any:
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": launch_sizes(128_256)[1]})


def _spilled_bytes(ptx: str, capability: int, folder: Path) -> int:
    """Bytes that a thread spills to local memory, from the assembler's own report."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    architecture = "sm_90a" if capability == 90 else f"sm_{capability}"
    options = ("-v", f"--gpu-name={architecture}", "-o", str(folder / "kernel.cubin"))
    run = subprocess.run(
        [triton.knobs.nvidia.ptxas.path, *options, str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = SPILLS.search(run.stderr)
    assert found is not None, run.stderr
    return sum(map(int, found.groups()))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_the_kernel_compiles_to_machine_code_without_spills(
    dtype: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for variant in ((True, True, True), (False, True, True), (False, True, False)):
        compiled = _compile(_source(dtype, *variant), capability)
        assert len(compiled.asm["cubin"]) > 10_000
        spilled = _spilled_bytes(compiled.asm["ptx"], capability, tmp_path)
        assert spilled == 0, f"{spilled} bytes spilled in variant {variant}"
    evaluation = _compile(_source(dtype, False, False, True), capability)
    assert len(evaluation.asm["cubin"]) < len(compiled.asm["cubin"])


def test_aligned_half_precision_rows_move_16_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = _compile(_source("bf16", False, True, True), 90).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and re.search(r"st\.global\S*\.v4\.b32", ptx)
    odd = _compile(_source("bf16", False, True, False), 90).asm["ptx"]
    assert not re.search(r"ld\.global\S*\.v4\.b32", odd)


def test_the_labels_logit_is_read_before_any_warp_stores_a_gradient() -> None:
    """The interpreter runs one warp at a time and cannot show it; reductions let all warps meet."""
    source = inspect.getsource(cross_entropy_kernel.fn)
    source = source[source.index("return") :]  # what precedes is for rows without a label
    read, meeting = source.index("tl.load(logits_ptr + label)"), source.index("tl.max(logits")
    assert read < meeting < source.index("tl.store(logits_ptr")


def test_short_rows_get_small_blocks() -> None:
    assert launch_sizes(1) == (1, 1)
    assert launch_sizes(1000) == (1024, 2)
    assert launch_sizes(128_256) == (8192, 16)
