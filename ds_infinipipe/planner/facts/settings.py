"""The planner's knobs, and the `planner` section of the configuration that holds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ds_infinipipe.planner.facts.clusters import ClusterSpec
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.setup import Execution, Layout, Setup, make_setup

__all__ = ["PlannerSection", "PlannerSettings"]

_LEAN_SLICES = 32
_MAX_SLICES = 1024
_MAX_GIB = 2.0**20
_PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
_Slices = Annotated[int, Field(ge=1, le=_MAX_SLICES)]
_MemoryGib = Annotated[float, Field(gt=0.0, le=_MAX_GIB, allow_inf_nan=False)]
_PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class PlannerSettings(BaseModel):
    """How a batch is planned. Unknown keys fail; "auto" means derived from the setup."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    mode: Literal["lean", "paper"] = "lean"
    """`lean`: a mesh per sequence, balanced packing beside any slice, one stream, chosen by
    simulation. `paper`: one mesh for all, grouping by dynamic programming, Algorithm 2."""

    max_slices: _Slices | Literal["auto"] = "auto"
    """Most slices the longest sequence is cut into, up to 1024; "auto" tries 1 to 32, in paper
    mode pp + 4."""

    recompute: Literal["adaptive", "none", "full"] = "adaptive"
    """Layers recomputed per stage and chunk: solved, never, or always all of them."""

    solver: Literal["cpsat", "greedy"] = "cpsat"
    """`cpsat` solves Algorithm 2 (lean mode: LPs); `greedy` recomputes the same number of layers
    everywhere."""

    lean_solver: Literal["auto", "stage", "makespan"] = "auto"
    """Lean mode's LPs: `stage` solves each stage alone, `makespan` all of them with the start
    times, "auto" the latter too while chunks times stages are at most 6000."""

    split_backward: Literal["auto", "never"] = "auto"
    """"auto": in lean mode with pp above 1 a backward may be two instructions, first the gradient
    of the chunk's input, later those of the weights, where that shortens the step; "never": no.
    In FP8, compiled and one's own layers a backward is one instruction in any case."""

    relative_gap: float = Field(default=0.02, ge=0.0, lt=1.0)
    """CP-SAT stops within this fraction of its bound."""

    solver_time_limit_s: float = Field(default=2.0, gt=0.0, allow_inf_nan=False)
    """Limit per solve, mapped to CP-SAT's deterministic time so that plans stay reproducible."""

    deadline_s: _PositiveFloat | Literal["auto"] | None = None
    """Seconds after which planning takes the best plan it has, or a greedy one; what it is then
    depends on the machine's speed. "auto": the work of one step, which hides planning beside
    training. Default: none."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the solver."""

    gather: Literal["auto", "chunk", "step"] = "auto"
    """ZeRO-3: gather a layer's parameters for every chunk, or once a step, and keep them until its
    end. "auto" takes what is faster within the memory; in paper mode `chunk`."""

    token_limit: _PositiveInt | Literal["auto"] = "auto"
    """Most tokens packed into a chunk, T_m of Algorithm 1; "auto" derives it from the models."""

    def slice_limit(self, pp: int) -> int:
        """Largest K that is tried; for "auto" 32, in paper mode the paper's d_p + 4."""
        if self.max_slices != "auto":
            return self.max_slices
        return pp + 4 if self.mode == "paper" else _LEAN_SLICES


class PlannerSection(PlannerSettings):
    """The `planner` section of the configuration: how to plan, and what of the setup users choose.

    "auto" means derived from the cluster.
    """

    memory_limit_gib: _MemoryGib | Literal["auto"] = "auto"
    """Device memory a plan may use, GiB, at most 2**20; "auto" takes the cluster's."""

    alignment: int = Field(default=1, ge=1, lt=2**31)
    """Slice boundaries inside a cut sequence are multiples of lcm(sp, alignment), tokens."""

    loss_block_tokens: int = Field(default=1024, ge=1, lt=2**31)
    """Tokens whose logits exist at a time on the last stage."""

    @property
    def settings(self) -> PlannerSettings:
        """How to plan alone; what was given explicitly stays so."""
        given = self.model_dump(include=set(PlannerSettings.model_fields), exclude_unset=True)
        return PlannerSettings(**given)

    def setup(
        self, model: ModelSpec, cluster: ClusterSpec, layout: Layout, execution: Execution
    ) -> Setup:
        """The setup with this section's memory limit, alignment and loss block."""
        return make_setup(
            model,
            cluster,
            layout,
            replace(execution, loss_block_tokens=self.loss_block_tokens),
            memory_limit_gib=None if self.memory_limit_gib == "auto" else self.memory_limit_gib,
            alignment=self.alignment,
        )
