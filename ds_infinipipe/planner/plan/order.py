"""1F1B order of one pipeline with slice dependencies (Fig. 2, Eq. 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from ds_infinipipe.planner.plan.chunks import Chunk
from ds_infinipipe.planner.plan.stream import Op

__all__ = [
    "backward_order",
    "count_slices",
    "forward_order",
    "shrinking_windows",
    "slices_by_position",
    "split_backwards",
    "static_windows",
    "window_size",
]


def forward_order(chunks: Sequence[Chunk], members: Iterable[int]) -> tuple[int, ...]:
    """Chunk ids of `members` in forward order, the paper's "longest sequences first".

    Cut sequences by most slices, then most tokens, each with its slices in order; after them the
    batched chunks by most tokens. Ties by id, so the order is the same on every machine.
    """
    blocks: dict[int, list[int]] = {}
    batched: list[int] = []
    for chunk in sorted(set(members)):
        if chunks[chunk].keeps_kv:
            blocks.setdefault(chunks[chunk].slices[0].sequence, []).append(chunk)
        else:
            batched.append(chunk)
    by_length = sorted(
        blocks.items(),
        key=lambda item: (-len(item[1]), -sum(chunks[c].split_tokens for c in item[1]), item[0]),
    )
    order: list[int] = []
    for _, block in by_length:
        order += sorted(block, key=lambda c: chunks[c].slices[0].start)
    order += sorted(batched, key=lambda c: (-chunks[c].tokens, c))
    return tuple(order)


def backward_order(chunks: Sequence[Chunk], forward: Sequence[int]) -> tuple[int, ...]:
    """The same blocks in the same order as `forward`, the slices of each block reversed (Eq. 16).

    A block holds the same range of positions in both orders, so with 0-based positions
    f2b[first + i] = first + m - 1 - i inside it and the identity for batched chunks.
    """
    order: list[int] = []
    first = 0
    while first < len(forward):
        end = first + 1
        head = chunks[forward[first]]
        while (
            head.keeps_kv
            and end < len(forward)
            and chunks[forward[end]].keeps_kv
            and chunks[forward[end]].slices[0].sequence == head.slices[0].sequence
        ):
            end += 1
        order += reversed(forward[first:end])
        first = end
    return tuple(order)


def count_slices(chunks: Sequence[Chunk], members: Iterable[int]) -> int:
    """N_split of Eq. 7: the most slices of one sequence among `members`, at least 1."""
    counts: dict[int, int] = {}
    for chunk in members:
        if chunks[chunk].keeps_kv:
            sequence = chunks[chunk].slices[0].sequence
            counts[sequence] = counts.get(sequence, 0) + 1
    return max(counts.values(), default=1)


def window_size(pp: int, stage: int, num_split: int) -> int:
    """Chunks in flight on a 0-based stage: pp - 1 - stage + num_split (Eq. 7; its p is stage + 1).

    A smaller window deadlocks or adds bubbles: the last stage must hold all slices of a sequence
    before the tail's backward.
    """
    return pp - 1 - stage + num_split


def static_windows(
    pp: int, num_chunks: int, num_split: int, extra: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Eq. 7 before every backward: `result[stage][j]` is the window before the j-th backward.

    `extra` chunks more in flight let transfers hide; the verifier allows none.
    """
    return tuple((window_size(pp, stage, num_split) + extra,) * num_chunks for stage in range(pp))


def slices_by_position(chunks: Sequence[Chunk], backward: Sequence[int]) -> tuple[int, ...]:
    """Slices, among `backward`, of the sequence at each position of it; 1 for batched chunks."""
    counts = Counter(
        chunks[chunk].slices[0].sequence for chunk in backward if chunks[chunk].keeps_kv
    )
    return tuple(
        counts[chunks[chunk].slices[0].sequence] if chunks[chunk].keeps_kv else 1
        for chunk in backward
    )


def shrinking_windows(
    pp: int, slices: Sequence[int], extra: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Windows that shrink with the sequences still to come: w(p, j) = pp - 1 - p + m(j) + extra.

    `slices` are those of `slices_by_position`, m(j) is the largest of them from position j on. The
    last stage still holds a whole sequence before its tail's backward, and no stage a smaller
    window than the next one, so nothing deadlocks. Memory falls as soon as the long sequences are
    done.
    Deviation: Eq. 7 keeps N_split of the whole pipeline to its end.
    """
    largest = tuple(accumulate(reversed(slices), max))[::-1]
    return tuple(tuple(pp - 1 - stage + m + extra for m in largest) for stage in range(pp))


def split_backwards(
    operations: Sequence[tuple[Op, int]], delays: Mapping[int, int]
) -> tuple[tuple[Op, int], ...]:
    """F and B of one stage with the B of every chunk in `delays` as I and W.

    `delays[chunk]` is how many of the stage's F, B and I stand between the two, as far as there are
    so many; W's due at one place stand in the order of their I.
    """
    result: list[tuple[Op, int]] = []
    waiting: list[tuple[int, int]] = []  # operations still to come first, chunk
    for op, chunk in operations:
        is_split = op is Op.BACKWARD and chunk in delays
        result.append((Op.BACKWARD_INPUT if is_split else op, chunk))
        waiting = [(left - 1, late) for left, late in waiting]
        if is_split:
            waiting.append((delays[chunk], chunk))
        result += [(Op.BACKWARD_WEIGHT, late) for left, late in waiting if left <= 0]
        waiting = [(left, late) for left, late in waiting if left > 0]
    return (*result, *((Op.BACKWARD_WEIGHT, late) for _, late in waiting))
