"""Imports go one way, and what must stay light does."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp
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
        ("planner/facts/models.py", "import torch"),
        ("data/lengths.py", "import torch"),
        ("config/section.py", "import hydra"),
        ("planner/facts/models.py", "import ds_infinipipe.config.section"),
        ("planner/plan/order.py", "import ortools"),
        ("planner/verify/time.py", "import ds_infinipipe.planner.predict.simulate"),
        ("planner/plan/order.py", "import numba"),
        ("data/lengths.py", "import ds_infinipipe.runtime.engine.report"),
        ("runtime/__init__.py", "import hydra"),
        ("runtime/__init__.py", "import flash_attn"),
        ("runtime/stage/executor.py", "import deepspeed"),
        ("runtime/stage/step.py", "import ds_infinipipe.runtime.engine.finite"),
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


def find_circles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Modules that reach each other, a sorted list for each circle.

    What nothing of the rest imports, and what imports nothing of the rest, is in none.
    """
    left = {name: set(targets) & imports.keys() for name, targets in imports.items()}
    while True:
        imported = set().union(*left.values())
        kept = {name for name, targets in left.items() if targets and name in imported}
        if len(kept) == len(left):
            break
        left = {name: left[name] & kept for name in kept}
    reached = {name: _reach(name, left) for name in left}
    groups = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in left}
    return sorted(list(group) for group in groups if group)


def _reach(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        pending += imports[pending.pop()] - found
        found.update(pending)
    return found


def test_circles_are_found_and_what_leads_into_or_out_of_them_is_not() -> None:
    imports = {"a": "bx", "b": "c", "c": "bd", "d": "e", "e": "fd", "f": "", "g": "a"}
    assert find_circles(imports) == [["b", "c"], ["d", "e"]]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checking and inside functions count."""
    graph = grimp.build_graph("ds_infinipipe")
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert find_circles(imports) == []


def test_importing_the_package_imports_nothing_else() -> None:
    loaded = run_python(
        "import sys; import ds_infinipipe;"
        "print([m for m in sys.modules if m.startswith('ds_infinipipe')])"
    )
    assert loaded == "['ds_infinipipe']"


@pytest.mark.parametrize(
    "module",
    [
        "planner.search.batch",
        "planner.search.worker",
        "viz.tables",
        "data.sampler",
        "data.dataset",
        "config.section",
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


MOST_FILES, MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 12, 600, 60, 8
# what autograd, transformers and DeepSpeed prescribe
PRESCRIBED = {
    "ops/cross_entropy.py:forward",
    "model/hf.py:_infinipipe_attention",
    "runtime/engine/initialize.py:initialize",
}


def is_compiled(function: ast.FunctionDef) -> bool:
    """True for kernels: what they are given has no objects, what they do no calls to share."""
    names = {ast.unparse(d).split("(")[0].split(".")[-1] for d in function.decorator_list}
    return bool(names & {"compiled", "jit"})


def oversized(package: Path) -> list[str]:
    """Folders, files and functions beyond the house's sizes, with their own."""
    found = []
    for folder in [package, *(d for d in package.rglob("*") if d.is_dir())]:
        files = [f for f in folder.glob("*.py") if f.name != "__init__.py"]
        if len(files) > MOST_FILES:
            found.append(f"{folder.relative_to(package)} has {len(files)} files")
    for path in sorted(package.rglob("*.py")):
        name, text = path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")
        length = len(text.splitlines())
        if length > MOST_LINES:
            found.append(f"{name} has {length} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and f"{name}:{node.name}" not in PRESCRIBED:
                found += [f"{name}:{node.name} has {what}" for what in excesses(node)]
    return found


def excesses(function: ast.FunctionDef) -> list[str]:
    if is_compiled(function):
        return []
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    parameters = [n for n in names if n not in ("self", "cls")]
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    found = []
    if lines > MOST_FUNCTION_LINES:
        found.append(f"{lines} lines")
    if len(parameters) > MOST_PARAMETERS:
        found.append(f"{len(parameters)} parameters")
    return found


def test_folders_files_and_functions_keep_their_sizes() -> None:
    assert oversized(ROOT / "ds_infinipipe") == []


def test_the_count_of_sizes_sees_what_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    for index in range(MOST_FILES + 1):
        (tmp_path / "room" / f"file_{index}.py").touch()
    names = ", ".join(f"a{i}" for i in range(MOST_PARAMETERS + 1))
    body = "    pass\n" * MOST_FUNCTION_LINES
    kernel = f"@compiled('')\ndef kernel({names}):\n{body}"
    text = f"def wide({names}): pass\n\n\ndef long():\n{body}\n{kernel}" + "\n" * MOST_LINES
    (tmp_path / "room" / "file_0.py").write_text(text)
    lines = len(text.splitlines())
    assert oversized(tmp_path) == [
        f"room has {MOST_FILES + 1} files",
        f"room/file_0.py has {lines} lines",
        f"room/file_0.py:wide has {MOST_PARAMETERS + 1} parameters",
        f"room/file_0.py:long has {MOST_FUNCTION_LINES + 1} lines",
    ]


def test_the_wheel_has_every_room() -> None:
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = metadata.split("\npackages = [")[1].split("]")[0]
    rooms = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for path in (ROOT / "ds_infinipipe").rglob("__init__.py")
    }
    assert set(re.findall(r'"(.+?)"', listed)) == rooms | {"ds_infinipipe.configs"}
