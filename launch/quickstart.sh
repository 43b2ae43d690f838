#!/usr/bin/env bash
# Trains a small byte-level Qwen3 on this machine's own Python sources: 4 CPU ranks, 2 pipeline
# stages of 2 sequence-parallel ranks, ZeRO-3. Needs nothing but Python and a few minutes.
# Arguments go to `infinipipe train`, for example: --steps 10 infinipipe.planner.recompute=full
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" ""

# one thread a rank: with more, 4 ranks on few cores fight over them
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore::FutureWarning
port="$(free_port)"
# DeepSpeed's shared-memory buffers outlive a killed run
trap 'rm -f /dev/shm/deepspeed_allreduce_buffer_*_"$port"_*' EXIT

deepspeed --hostfile /dev/null --num_accelerators 4 --master_port "$port" --no_local_rank \
    --module ds_infinipipe train --deepspeed_config configs/json/quickstart.json "$@"

echo "next: source .venv/bin/activate    # puts infinipipe and deepspeed on PATH
      infinipipe verify            # the same, exactly, as a plain run
      infinipipe plan --help       # plans without a GPU; README.md has the rest"
