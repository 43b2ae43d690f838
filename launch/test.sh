#!/usr/bin/env bash
# Sets up the development environment and runs every check. Arguments go to pytest and choose what
# it runs, one test after the other: bash launch/test.sh tests/planner -m "not slow"
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev

export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
ruff check
ruff format --check
lint-imports
mypy
if [ $# -gt 0 ]; then
    exec pytest "$@"
fi
# Tests in one process share the cores; those that start ranks have all cores to themselves.
outcome=0
pytest -n auto --maxprocesses 8 -m "not ranks" || outcome=$?
pytest -m ranks || outcome=$?
exit "$outcome"
