#!/usr/bin/env bash
# examples/long_context.sh on one GPU: Qwen2.5-0.5B at up to 1M tokens on 80 GB.
#   HF=Qwen2.5-0.5B/ DATA=data/mine OUT=runs/0.5b LENGTH=128K bash examples/launch/one_gpu.sh [flags]
set -euo pipefail
export SIZE=${SIZE:-0.5b}
export GPUS=1 NODES=1
exec bash "$(dirname "$0")/../long_context.sh" "$@"
