#!/usr/bin/env bash
# examples/long_context.sh on the eight GPUs of one node: Qwen2.5-3B at up to 1M tokens on 80 GB.
#   HF=Qwen2.5-3B/ DATA=data/mine OUT=runs/3b LENGTH=512K bash examples/launch/one_node.sh [flags]
set -euo pipefail
export SIZE=${SIZE:-3b}
export GPUS=8 NODES=1
exec bash "$(dirname "$0")/../long_context.sh" "$@"
