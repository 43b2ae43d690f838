#!/usr/bin/env bash
# Trains from a DeepSpeed JSON on the accelerators of this machine, or of those in HOSTFILE:
#   bash launch/train.sh run.json [--steps N] [key=value ...]
#   HOSTFILE=hosts bash launch/train.sh run.json
# Relative paths are those of the folder it is called from.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,5p' "${BASH_SOURCE[0]}" >&2; exit 2; }
config="$(realpath "$1")"
hostfile="$(realpath "${HOSTFILE:-/dev/null}")"
called_from="$PWD"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" ""
cd "$called_from"

# chunks differ in size every step, which fragments the default allocator
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec deepspeed --hostfile "$hostfile" --no_local_rank \
    --module ds_infinipipe train --deepspeed_config "$config" "${@:2}"
