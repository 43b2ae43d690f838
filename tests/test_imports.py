"""What an import may load: the planner stays free of torch and deepspeed."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "deepspeed", "transformers", "triton", "flash_attn", "hydra")


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter that ran the statement."""
    script = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "module",
    [
        "ds_infinipipe",
        "ds_infinipipe.config.section",
        "ds_infinipipe.planner.search.batch",
        "ds_infinipipe.planner.verify.frame",
        "ds_infinipipe.planner.search.worker",
        "ds_infinipipe.viz.chrome_trace",
        "ds_infinipipe.viz.tables",
    ],
)
def test_planning_imports_neither_torch_nor_deepspeed(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert "ds_infinipipe" in loaded
    assert not loaded & set(HEAVY)


def test_planning_by_hand_needs_only_the_package_and_no_torch() -> None:
    names = "ClusterSpec, Layout, ModelSpec, PlannerSettings, load_cluster, load_model, make_layout"
    loaded = loaded_by(f"from ds_infinipipe import ChunkSampler, plan_batch, {names}")
    assert "numpy" in loaded
    assert not loaded & set(HEAVY)


def test_every_public_name_loads() -> None:
    loaded_by("import ds_infinipipe as d; [getattr(d, name) for name in d.__all__]")


def test_ortools_is_loaded_only_when_a_plan_needs_it() -> None:
    assert "ortools" not in loaded_by("import ds_infinipipe.planner.search.batch")


def test_the_check_itself_sees_a_heavy_import() -> None:
    assert "hydra" in loaded_by("import hydra")
