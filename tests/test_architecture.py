"""Imports go one way, and what must stay light does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [*command, "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True
    )


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_imports_keep_the_contracts() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("planner/specs.py", "import torch"),
        ("data/lengths.py", "import torch"),
        ("config.py", "import hydra"),
        ("planner/specs.py", "import ds_infinipipe.config"),
        ("planner/order.py", "import ortools"),
        ("planner/order.py", "import numba"),
        ("data/lengths.py", "import ds_infinipipe.runtime"),
        ("runtime/__init__.py", "import hydra"),
        ("runtime/__init__.py", "import flash_attn"),
    ],
)
def test_contracts_notice_a_forbidden_import(tmp_path: Path, module: str, line: str) -> None:
    shutil.copytree(
        ROOT / "ds_infinipipe",
        tmp_path / "ds_infinipipe",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    with open(tmp_path / "ds_infinipipe" / module, "a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def test_importing_the_package_imports_nothing_else() -> None:
    loaded = run_python(
        "import sys; import ds_infinipipe;"
        "print([m for m in sys.modules if m.startswith('ds_infinipipe')])"
    )
    assert loaded == "['ds_infinipipe']"


@pytest.mark.parametrize(
    "module",
    [
        "planner.search",
        "planner.worker",
        "viz.tables",
        "data.sampler",
        "data.dataset",
        "config",
        "cli",
    ],
)
def test_light_modules_load_without_torch(module: str) -> None:
    heavy = ("torch", "deepspeed", "transformers", "triton", "hydra")
    loaded = run_python(
        f"import sys; import ds_infinipipe.{module};print([m for m in {heavy} if m in sys.modules])"
    )
    assert loaded == "[]"


def test_public_names_are_listed_and_wrong_ones_fail() -> None:
    names = run_python(
        "import ds_infinipipe as d; print(d.InfiniPipeConfig.__name__, 'initialize' in dir(d),"
        "hasattr(d, 'initialise'))"
    )
    assert names == "InfiniPipeConfig True False"


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "ds_infinipipe").rglob("*.py")
    }
    assert {path: n for path, n in lengths.items() if n >= 400} == {}
