#!/usr/bin/env bash
# Sets up the development environment and runs every check, about 10 minutes on 2 cores. Arguments
# go to pytest: bash launch/test.sh -m "not slow"
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev

export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
ruff check
ruff format --check
lint-imports
mypy
pytest "$@"
