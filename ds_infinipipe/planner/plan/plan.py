"""What a plan is made of. Frozen, pure data; every other planner module maps between these.

All indices are 0-based. Tokens and bytes are ints, times are float seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ds_infinipipe.errors import ConfigError, ScheduleError
from ds_infinipipe.json_file import parse_json
from ds_infinipipe.planner.facts.clusters import ClusterSpec
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.setup import Layout, Setup
from ds_infinipipe.planner.plan.chunks import Chunk, Slice
from ds_infinipipe.planner.plan.stream import Instruction

__all__ = ["PLAN_VERSION", "PipelinePlan", "Plan", "Prediction", "SolverStats"]

PLAN_VERSION = 6


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """One 1F1B pipeline: chunk ids in forward and in backward order.

    `recompute[stage][i]` is the number of decoder layers that stage recomputes for `forward[i]`.
    `num_split` is the largest slice count of a sequence in it (N_split of Eq. 7).
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    recompute: tuple[tuple[int, ...], ...]
    num_split: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator and the memory model say about a plan."""

    step_time_s: float
    bubble_ratio: float
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SolverStats:
    """How a plan was found. `status`: "optimal" (within the gap), "feasible", "fallback"."""

    mode: str
    k: int
    status: str
    gap: float
    time_s: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the executor needs for one optimizer step, the same on every rank.

    `setup` is what `predicted` was counted for. Where it keeps parameters gathered, a stage gathers
    each layer's once and releases them at STEP.
    """

    setup: Setup
    lengths: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    pipelines: tuple[PipelinePlan, ...]
    streams: tuple[tuple[Instruction, ...], ...]
    predicted: Prediction
    solver: SolverStats
    version: int = PLAN_VERSION

    @property
    def model(self) -> ModelSpec:
        return self.setup.model

    @property
    def cluster(self) -> ClusterSpec:
        return self.setup.cluster

    @property
    def layout(self) -> Layout:
        return self.setup.layout

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def padding_tokens(self) -> int:
        return sum(c.padding for c in self.chunks)

    def for_stage(self, stage: int) -> tuple[Instruction, ...]:
        return self.streams[stage]

    def digest(self) -> str:
        """sha256 of the canonical JSON without the solving time; equal plans, equal digests."""
        body = self._body()
        del body["solver"]["time_s"]
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _body(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "setup": self.setup.to_json(),
            "lengths": list(self.lengths),
            "chunks": [_chunk_to_json(c) for c in self.chunks],
            "pipelines": [asdict(p) for p in self.pipelines],
            "streams": [[str(i) for i in stream] for stream in self.streams],
            "predicted": asdict(self.predicted),
            "solver": asdict(self.solver),
        }

    def to_json(self, indent: int | None = None) -> str:
        """JSON text; `digest` stands in it, so that an edited file is noticed."""
        return json.dumps({"digest": self.digest(), **self._body()}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of `to_json`; raises ScheduleError on a foreign version or a wrong digest."""
        try:
            data = parse_json(text)
            plan, stated = cls._from_mapping(data), data["digest"]
        except (ConfigError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ScheduleError(
                f"not a plan file of version {PLAN_VERSION} ({error!r}): it is another file, or "
                "cut off or edited; plan the batch again"
            ) from error
        if stated != plan.digest():
            raise ScheduleError(
                f"the plan file states digest {str(stated)[:12]} but its content has "
                f"{plan.digest()[:12]}: it was edited or damaged; plan the batch again"
            )
        return plan

    @classmethod
    def _from_mapping(cls, data: Mapping[str, Any]) -> Plan:
        if data["version"] != PLAN_VERSION:
            raise ValueError(f"version {data['version']}")
        lengths = _ints(data["lengths"])
        predicted, solver = data["predicted"], data["solver"]
        # the digest leaves it out
        solver["time_s"] = float(solver["time_s"])
        return cls(
            setup=Setup.from_json(data["setup"]),
            lengths=lengths,
            chunks=tuple(_chunk_from_json(c, lengths) for c in data["chunks"]),
            pipelines=tuple(_pipeline_from_json(p) for p in data["pipelines"]),
            streams=tuple(tuple(map(Instruction.parse, s)) for s in data["streams"]),
            predicted=Prediction(
                predicted["step_time_s"], predicted["bubble_ratio"], _ints(predicted["peak_bytes"])
            ),
            solver=SolverStats(**solver),
        )


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(_whole(v) for v in values)


def _whole(value: object) -> int:
    """Raises TypeError for what is no whole number in JSON: text, true, 2.0."""
    if type(value) is not int:
        raise TypeError(f"{value!r} stands for a whole number")
    return value


def _chunk_to_json(chunk: Chunk) -> dict[str, Any]:
    slices = [{"sequence": s.sequence, "start": s.start, "length": s.length} for s in chunk.slices]
    return {"slices": slices, "padding": chunk.padding}


def _chunk_from_json(data: Mapping[str, Any], lengths: tuple[int, ...]) -> Chunk:
    slices = tuple(
        Slice(sequence, start, length, start + length == lengths[sequence])
        for sequence, start, length in (
            _ints((s["sequence"], s["start"], s["length"])) for s in data["slices"]
        )
    )
    return Chunk(slices, _whole(data["padding"]))


def _pipeline_from_json(data: Mapping[str, Any]) -> PipelinePlan:
    return PipelinePlan(
        forward=_ints(data["forward"]),
        backward=_ints(data["backward"]),
        recompute=tuple(_ints(row) for row in data["recompute"]),
        num_split=_whole(data["num_split"]),
    )
