"""Errors a user can meet; every message names the thing, the numbers and the repair."""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataEndError",
    "DataError",
    "InfeasiblePlanError",
    "InfiniPipeError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PeerTimeoutError",
    "PlanMismatchError",
    "ScheduleError",
]


class InfiniPipeError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(InfiniPipeError):
    """The configuration, layout or model description cannot work."""

    exit_code = 2


class DataError(InfiniPipeError):
    """The corpus, a lengths file or a batch cannot be used."""

    exit_code = 2


class DataEndError(DataError, StopIteration):
    """There is no further batch; a StopIteration, as loops over batches expect it."""


class CheckpointError(InfiniPipeError):
    """A checkpoint cannot be written, or the one to be read is missing, damaged or another's."""

    exit_code = 2


class InfeasiblePlanError(InfiniPipeError):
    """No plan fits the memory limit, even with every layer recomputed."""

    exit_code = 3


class OutOfMemoryError(InfiniPipeError):
    """A rank ran out of memory in a step that is not, or no longer, planned anew."""

    exit_code = 3


class ScheduleError(InfiniPipeError):
    """A plan breaks a rule of the verifier: coverage, order, communication, window or memory."""


class NonFiniteError(InfiniPipeError):
    """A loss or gradient is infinite or not a number."""


class PlanMismatchError(InfiniPipeError):
    """Ranks hold different plans, or a batch differs from the plan made for it."""


class PeerTimeoutError(InfiniPipeError):
    """A peer did not answer within the timeout, or its connection broke."""
