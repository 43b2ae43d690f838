#!/usr/bin/env bash
# Sets up the development environment and runs every check. Arguments go to pytest and choose what
# it runs, one test after the other: bash launch/test.sh tests/planner -m "not slow". With --thorough
# in front, property tests try five times as many examples.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev

if [ "${1:-}" = --thorough ]; then
    export HYPOTHESIS_PROFILE=thorough
    shift
fi
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # each of many processes would compile the package anew
trap 'echo "$SECONDS s in all"' EXIT
ruff check
ruff format --check
lint-imports
mypy
if [ $# -eq 0 ]; then
    # each process takes the next test in order; ranks share the cores out among themselves, and one
    # process more makes tests on two cores take a quarter longer
    processes="$(python -c 'import os; print(min(8, len(os.sched_getaffinity(0))))')"
    set -- -n "$processes" --dist loadgroup --no-loadscope-reorder
fi
pytest --durations=10 "$@"
