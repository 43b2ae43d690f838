#!/usr/bin/env bash
# Trains from a DeepSpeed JSON on the accelerators of this machine, or of those in HOSTFILE:
#   bash launch/train.sh [LAUNCHER OPTIONS --] run.json [--steps N] [key=value ...]
#   HOSTFILE=hosts bash launch/train.sh run.json
#   DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 bash launch/train.sh --num_accelerators 4 -- run.json
# Relative paths are those of the folder it is called from.
set -euo pipefail
options=()
if [[ " $* " == *" -- "* ]]; then
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
fi
[ $# -ge 1 ] || { sed -n '2,6p' "${BASH_SOURCE[0]}" >&2; exit 2; }
config="$(realpath "$1")"
hostfile="$(realpath "${HOSTFILE:-/dev/null}")"
called_from="$PWD"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" ""
cd "$called_from"

# several nodes have to agree on a port: the launcher's own, unless --master_port is given
if [ "$hostfile" = /dev/null ] && [[ " ${options[*]-} " != *" --master_port"* ]]; then
    options+=(--master_port "$(free_port)")
fi
exec deepspeed --hostfile "$hostfile" --no_local_rank ${options[@]+"${options[@]}"} \
    --module ds_infinipipe train --deepspeed_config "$config" "${@:2}"
