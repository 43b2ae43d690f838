"""`python -m ds_infinipipe.planner.search.worker`: plans beside training, in its own process.

One JSON request a line on stdin, one JSON response a line on stdout, in order:

    {"id", "lengths", "setup", "settings"}
    {"id", "ok": true, "plan": <text of Plan.to_json>}
    {"id", "ok": false, "error_type", "message"}

It ends when stdin does. It runs at low priority, leaves Ctrl-C to its parent and loads no torch.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from ds_infinipipe.errors import ConfigError, InfiniPipeError
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Setup
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.search.batch import plan_batch

__all__ = ["answer", "main", "serve"]

logger = logging.getLogger(__name__)

_NICENESS = 10
_FIELDS = ("id", "lengths", "setup", "settings")


def main() -> int:
    """Serve stdin until it ends; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    responses = _claim_stdout()
    try:
        serve(sys.stdin, responses)
    except BrokenPipeError:
        # the parent is gone; the closed pipe must not fail a second time when Python exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), responses.fileno())
    return 0


def serve(requests: TextIO, responses: TextIO) -> None:
    """Answer every line of `requests` with one line of `responses`."""
    for line in requests:
        if line.strip():
            responses.write(json.dumps(answer(line)) + "\n")
            responses.flush()


def answer(line: str) -> dict[str, Any]:
    """The response to one request; never raises, so that one bad batch does not end the worker."""
    request_id: Any = None
    try:
        request = _parse(line)
        request_id = request.get("id")
        return {"id": request_id, "ok": True, "plan": _solve(request).to_json()}
    except InfiniPipeError as error:
        return _failure(request_id, error)
    except Exception as error:
        # process boundary: the parent falls back to its own planner and logs the message
        logger.exception("planning request %s failed", request_id)
        return _failure(request_id, error)


def _failure(request_id: Any, error: Exception) -> dict[str, Any]:
    return {
        "id": request_id,
        "ok": False,
        "error_type": type(error).__name__,
        "message": str(error) or repr(error),
    }


def _parse(line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"the planning request is not one line of JSON: {error}") from error
    if not isinstance(request, dict):
        raise ConfigError(f"the planning request is a {type(request).__name__}, not an object")
    return request


def _solve(request: Mapping[str, Any]) -> Plan:
    missing = [name for name in _FIELDS if name not in request]
    if missing:
        raise ConfigError(f"the planning request lacks {', '.join(missing)}")
    return plan_batch(
        request["lengths"],
        Setup.from_json(request["setup"]),
        PlannerSettings.model_validate(request["settings"]),
    )


def _claim_stdout() -> TextIO:
    """The real stdout, for responses; all else that prints there (C code too) goes to stderr."""
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return responses


if __name__ == "__main__":
    sys.exit(main())
