"""Run a function on several gloo ranks, each in a process of its own.

Processes are forked from a server that has imported all they need (see `rank_imports`): a rank
starts in 0.02 s of CPU time and builds its first engine as fast as a second one. So every test has
fresh ranks, and nothing that one does to its process can reach another.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from strict_world import StrictWorld, open_world

__all__ = ["RankFailure", "left_behind", "run_ranks", "run_strict", "start_server"]

_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_HERE = str(Path(__file__).parent)
_MARK = f"INFINIPIPE_RANKS_OF={os.getpid()}-{time.monotonic_ns()}"


class RankFailure(RuntimeError):
    """What a rank printed when it failed, or how its process ended."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    grace_s: float = 1.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call `fn(rank, *args)` on every rank of a fresh group; returns the results by rank.

    `fn` must be importable (a module-level function). The first rank that raises ends the others:
    its exception is raised here, caused by a RankFailure with the rank's traceback. Raises
    TimeoutError naming the missing ranks when `timeout` seconds pass; each rank then has its
    stacks on stderr. After a failure the other ranks have `grace_s` seconds to end by themselves.
    `backend` is "gloo" or "strict", see `strict_group`; "lazy" is strict with pairs that connect
    at their first transfer.
    """
    context = start_server()
    payload = pickle.dumps((fn, args))
    port = _free_port()
    processes, connections = [], []
    with open_world(context, world_size, backend) as world:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, rank, world_size, port, timeout, payload, world),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            return _collect(connections, time.monotonic() + timeout, timeout)
        finally:
            for connection in connections:
                connection.close()  # a finished rank waits for this before it leaves its peers
            _end(processes, grace_s)


run_strict = partial(run_ranks, backend="strict")
"""`run_ranks` on the tests' own process group, which forgives less than gloo and costs less."""


def left_behind(timeout_s: float = 10.0) -> dict[int, str]:
    """Command lines by process id of what ranks of this process, or their children, still run.

    What is about to end has `timeout_s` seconds for it.
    """
    deadline = time.monotonic() + timeout_s
    while (found := _descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _descendants() -> dict[int, str]:
    """Processes with our mark in their environment, but for our own child, the fork server."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is not ours
            variables = (folder / "environ").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if _MARK.encode() in variables and parent != os.getpid():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")
    return found


def start_server() -> multiprocessing.context.ForkServerContext:
    """The first call of a process starts the server, which ends with that process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_imports"])
    path = os.environ.get("PYTHONPATH", "")
    # before Python 3.13 the server does not get our `sys.path`
    paths = {"PYTHONPATH": os.pathsep.join([_HERE, path]), "RANKS_PYTHONPATH": path}
    mark = dict([_MARK.split("=")])
    with mock.patch.dict(os.environ, {**_ENVIRONMENT, **paths, **mark}):
        forkserver.ensure_running()
    return context


def _free_port() -> int:
    """Below the ports that a system hands out, which another process may have taken by the time."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _collect(connections: list[Connection], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        missing = {c: rank for rank, c in enumerate(connections) if rank not in results}
        ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no answer from ranks {sorted(missing.values())} in {timeout:g} s")
        failures = []
        for connection in ready:
            rank = missing[connection]
            try:
                failed_at, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                lost = RankFailure(f"rank {rank} ended without an answer")
                failed_at, value = float("inf"), (lost, str(lost))
            if failed_at is None:
                results[rank] = value
            else:
                failures.append((failed_at, rank, value))
        if failures:
            _, rank, (error, text) = min(failures, key=lambda failure: failure[:2])
            raise error from RankFailure(f"rank {rank}:\n{text}")
    return [results[rank] for rank in range(len(connections))]


def _end(processes: list[Any], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _rank_main(
    connection: Connection,
    rank: int,
    world_size: int,
    port: int,
    timeout: float,
    payload: bytes,
    world: StrictWorld | None,
) -> None:
    faulthandler.dump_traceback_later(max(1.0, timeout - 1.0))
    os.environ.update(
        _ENVIRONMENT,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        _join_group(timeout, world)
        fn, args = pickle.loads(payload)
        answer = pickle.dumps((None, fn(rank, *args)))
    except BaseException as error:
        answer = _failure(error)
    faulthandler.cancel_dump_traceback_later()
    connection.send_bytes(answer)
    connection.poll(timeout)  # until every rank has answered, so that no peer loses its connection
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _join_group(timeout: float, world: StrictWorld | None) -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    # Its first build takes minutes and only inference collectives use it. The attribute of that
    # name on the package is torch itself, hence sys.modules.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    backend = "gloo"
    if world is not None:
        import strict_group

        backend = strict_group.join(world)
    deepspeed.init_distributed(backend, timeout=timedelta(seconds=timeout), verbose=False)


def _failure(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        body = pickle.dumps((time.monotonic(), (error, text)))
        pickle.loads(body)
        return body
    except Exception:
        return pickle.dumps((time.monotonic(), (RankFailure(repr(error)), text)))
