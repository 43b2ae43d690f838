"""Small checkpoints made without ranks, and engines that save and load real ones."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_infinipipe.checks import exactness
from ds_infinipipe.checks.exactness import Case
from ds_infinipipe.runtime.checkpoint.load import PieceReader
from ds_infinipipe.runtime.checkpoint.manifest import Manifest, read_manifest
from ds_infinipipe.runtime.checkpoint.save import Contents, _Job, pack_extras
from ds_infinipipe.runtime.checkpoint.state import Share
from ds_infinipipe.runtime.engine.engine import InfiniPipeEngine

SHAPES = {"a": (4, 3), "b": (5,)}


def make_jobs(save_dir: Path, tag: str, value: float, keep_last: int | None = None) -> list[_Job]:
    """Two writers' jobs: each parameter is cut in the middle, all its elements are `value`."""
    manifest = Manifest(
        global_steps=int(value),
        global_samples=0,
        skipped_steps=0,
        saved_at=time.time(),
        dtype="float32",
        layout={},
        model={},
        optimizer="adam",
        param_groups=[],
        loss_scale=None,
        sampler=None,
        planner={},
        versions={},
    )
    jobs = []
    for shard in range(2):
        shares = [
            Share(name, start, end, _tensors(end - start, value), {"step": value})
            for name, count in (("a", 12), ("b", 5))
            for start, end in [((0, count // 2), (count // 2, count))[shard]]
        ]
        contents = Contents((0, shard), shares, SHAPES, manifest, pack_extras(client_state=value))
        jobs.append(
            _Job(
                save_dir,
                tag,
                contents,
                own_name=f"shard-{shard}",
                names=("shard-0", "shard-1"),
                is_latest=True,
                keep_last=keep_last,
                is_publisher=shard == 0,
            )
        )
    return jobs


def _tensors(count: int, value: float) -> dict[str, torch.Tensor]:
    return {kind: torch.full((count,), value) for kind in ("weight", "exp_avg")}


def read_values(folder: Path) -> set[float]:
    """All distinct numbers in a checkpoint of `make_jobs`."""
    manifest = read_manifest(folder)
    found = set()
    with PieceReader(folder, manifest) as reader:
        for name, shape in manifest.shapes.items():
            for kind in ("weight", "exp_avg"):
                tensor = torch.full((int(np.prod(shape)),), float("nan"))
                reader.read(kind, name, 0, tensor)
                found |= set(tensor.tolist())
    return found


def quiet() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)


def build(
    case: Case,
    data: Any = None,
    section: Mapping[str, Any] | None = None,
    *,
    bf16: bool = False,
) -> InfiniPipeEngine:
    """An engine of a case with a warm-up schedule; `section` goes into the infinipipe section."""
    from ds_infinipipe.runtime.engine.initialize import initialize
    from ds_infinipipe.runtime.engine.module import InfiniPipeModule

    quiet()
    config = exactness.make_config(case)
    config["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 50},
    }
    config["infinipipe"]["planner"]["solver"] = "greedy"
    for key, value in (section or {}).items():
        config["infinipipe"][key] = {**config["infinipipe"].get(key, {}), **value}
    if bf16:
        config["bf16"] = {"enabled": True}
    module = InfiniPipeModule(config, dtype=None if bf16 else case.dtype)
    return initialize(model=module, config=config, training_data=data)[0]


def train(engine: InfiniPipeEngine, case: Case, steps: int) -> list[float]:
    """Losses of the next steps on random batches under random plans."""
    losses = []
    for step in range(engine.global_steps, engine.global_steps + steps):
        batch = exactness.random_batch(case, step)
        share = engine.replica_share(batch)
        plan = exactness.draw_plan(engine, case, share, step)
        losses.append(float(engine.train_plan(plan, share, whole=batch)))
    return losses


def snapshot(engine: InfiniPipeEngine) -> dict[tuple[str, str], torch.Tensor]:
    """A copy of this rank's weights and optimizer states."""
    return {
        (share.name, kind): tensor.clone()
        for share in engine.checkpointer.training_state().shares()
        for kind, tensor in share.tensors.items()
    }


def differences(engine: InfiniPipeEngine, folder: Path) -> list[str]:
    """What of this rank's weights and optimizer states is not bit for bit what the folder holds."""
    manifest = read_manifest(folder)
    wrong = []
    with PieceReader(folder, manifest) as reader:
        for share in engine.checkpointer.training_state().shares():
            kinds = {k for _, p in manifest.pieces_of(share.name) for k in p.kinds}
            counters = [dict(p.counters) for _, p in manifest.pieces_of(share.name)]
            if kinds != set(share.tensors) or any(c != share.counters for c in counters):
                wrong.append(f"{share.name} has {sorted(share.tensors)}, {share.counters}")
            for kind, tensor in share.tensors.items():
                saved = torch.full_like(tensor, float("nan"))
                reader.read(kind, share.name, share.start, saved)
                if not torch.equal(saved, tensor):
                    wrong.append(f"{kind} of {share.name}")
    return wrong


def layout_name(case: Case) -> str:
    cut = "-cut" if case.shards_optimizer else ""
    return f"{case.pp}x{case.sp}x{case.dp}-zero{case.zero_stage}{cut}"


def with_layout(case: Case, pp: int, sp: int, dp: int = 1, zero_stage: int = 3) -> Case:
    return replace(case, pp=pp, sp=sp, dp=dp, zero_stage=zero_stage)


class Numbered:
    """Sequences whose first token is their id."""

    def __init__(self, count: int, vocab_size: int) -> None:
        rng = np.random.default_rng(5)
        self._items = [rng.integers(0, vocab_size, size=int(n)) for n in rng.integers(4, 30, count)]
        for index, ids in enumerate(self._items):
            ids[0] = index

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._items[index]}
