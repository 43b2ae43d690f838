"""The planning worker, as a process and as functions."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from planner_cases import setup_of

from ds_infinipipe.planner.facts.clusters import BUILTIN_CLUSTERS
from ds_infinipipe.planner.facts.models import ModelSpec
from ds_infinipipe.planner.facts.settings import PlannerSettings
from ds_infinipipe.planner.facts.setup import Execution, make_layout
from ds_infinipipe.planner.plan.plan import Plan
from ds_infinipipe.planner.search import worker
from ds_infinipipe.planner.search.batch import plan_batch
from ds_infinipipe.planner.verify.frame import verify_plan

MODEL = ModelSpec("tiny", 4, 32, 48, 4, 2, 8, 50)
CLUSTER = BUILTIN_CLUSTERS["cpu-local"]
SETUP = setup_of(
    MODEL, make_layout(MODEL, 2, 2), CLUSTER, Execution(dtype_bytes=4, loss_block_tokens=64)
)
LENGTHS = [900, 31, 77, 410, 5, 64, 128, 33]


def request(request_id: int, lengths: list[int], **changes: Any) -> dict[str, Any]:
    body = {
        "id": request_id,
        "lengths": lengths,
        "setup": SETUP.to_json(),
        "settings": PlannerSettings().model_dump(),
    }
    return {**body, **changes}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", "ds_infinipipe.planner.search.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    yield started
    if started.poll() is None:
        started.kill()
    started.communicate()


def ask(process: subprocess.Popen[str], body: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(body) + "\n")
    process.stdin.flush()
    response: dict[str, Any] = json.loads(process.stdout.readline())
    return response


def test_the_worker_plans_answers_errors_and_ends_with_its_input(
    process: subprocess.Popen[str],
) -> None:
    first = ask(process, request(1, LENGTHS))
    assert (first["id"], first["ok"]) == (1, True)
    plan = Plan.from_json(first["plan"])
    verify_plan(plan)
    assert plan.lengths == tuple(LENGTHS)
    assert plan.digest() == here().digest()

    too_small = replace(SETUP, limit_bytes=1073).to_json()
    second = ask(process, request(2, LENGTHS, setup=too_small))
    assert (second["id"], second["ok"]) == (2, False)
    assert second["error_type"] == "InfeasiblePlanError"

    process.send_signal(signal.SIGINT)
    third = ask(process, request(3, LENGTHS[::-1]))
    assert (third["id"], third["ok"]) == (3, True)

    niceness = os.getpriority(os.PRIO_PROCESS, process.pid)
    assert niceness >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    loaded = loaded_libraries(process.pid)
    assert loaded and not any("torch" in path for path in loaded)

    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, ""), err


def here() -> Plan:
    return plan_batch(LENGTHS, SETUP)


def loaded_libraries(pid: int) -> set[str]:
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        return {line.split()[-1] for line in maps if ".so" in line}


def test_the_worker_ends_quietly_when_its_parent_no_longer_reads(
    process: subprocess.Popen[str],
) -> None:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.write(json.dumps(request(1, LENGTHS)) + "\n")
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""
    process.stdin = process.stdout = None


def test_only_responses_reach_stdout_whatever_a_library_prints() -> None:
    script = (
        "import os, sys\n"
        "from ds_infinipipe.planner.search import worker\n"
        "def chatty(lengths, setup, settings):\n"
        "    print('from python'); os.write(1, b'from C\\n'); raise RuntimeError('no plan today')\n"
        "worker.plan_batch = chatty\n"
        "sys.exit(worker.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(request(7, LENGTHS)) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "id": 7,
        "ok": False,
        "error_type": "RuntimeError",
        "message": "no plan today",
    }
    for text in ("from python", "from C", "Traceback"):
        assert text in done.stderr


@pytest.mark.parametrize(
    ("line", "error_type", "message"),
    [
        ("{", "ConfigError", "not one line of JSON"),
        ("[1]", "ConfigError", "is a list, not an object"),
        ('{"id": 4, "lengths": []}', "ConfigError", "lacks setup, settings"),
        (json.dumps(request(4, LENGTHS, setup={**SETUP.to_json(), "x": 1})), "TypeError", "x"),
        (json.dumps(request(4, LENGTHS, setup={"model": {}})), "KeyError", "layout"),
        (json.dumps(request(4, LENGTHS, settings={"colour": 1})), "ValidationError", "colour"),
    ],
)
def test_a_bad_request_gets_an_answer(line: str, error_type: str, message: str) -> None:
    response = worker.answer(line)
    assert not response["ok"]
    assert response["error_type"] == error_type
    assert message in response["message"]
    assert response["id"] == (4 if '"id": 4' in line else None)


def test_answers_come_in_the_order_of_the_requests_one_a_line() -> None:
    lines = [json.dumps(request(n, [40 + n, 8])) for n in range(3)]
    responses = io.StringIO()
    worker.serve(io.StringIO("\n\n".join(lines) + "\n"), responses)
    answers = [json.loads(line) for line in responses.getvalue().splitlines()]
    assert [a["id"] for a in answers] == [0, 1, 2]
    assert [Plan.from_json(a["plan"]).lengths for a in answers] == [(40, 8), (41, 8), (42, 8)]
