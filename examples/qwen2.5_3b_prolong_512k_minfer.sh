#!/usr/bin/env bash
# Qwen2.5-3B from 32K to 512K tokens on ProLong, minfer on a two-level ring; Hugging Face folders in, out.
#   HF=Qwen2.5-3B/ DATA=data/prolong OUT=runs/3b_minfer bash examples/qwen2.5_3b_prolong_512k_minfer.sh
# Flags at the end win over the ones below. DATA: what prepare_prolong.sh wrote, without .bin. STEPS=140 is about one
# pass over it. 32 GPUs (GPUS=8 NODES=4): on several nodes, with OUT on a disk they share, start it on each with
# its NODE=0, 1, ... and MASTER=first-node:29500. When stopped, the same command goes on from the newest checkpoint.
set -euo pipefail
: "${HF:?set it to the folder of the model}" "${DATA:?set it to the data set}" "${OUT:?set it to a folder for the run}"
ROOT=$(dirname "$0")/.. PYTHON=${PYTHON:-python3} GPUS=${GPUS:-8} NODES=${NODES:-4} NODE=${NODE:-0}
mkdir -p "$OUT"
convert() { "$PYTHON" "$ROOT/tools/checkpoint/convert_qwen.py" "$@"; }

START=$OUT/start
[ "$NODE" != 0 ] || [ -d "$START" ] || convert to-megatron --hf "$HF" --out "$START" --dtype bf16
until [ -d "$START" ]; do sleep 5; done
[ ! -f "$OUT/trained/latest_checkpointed_iteration.txt" ] || START=$OUT/trained

PARALLEL=(--context-parallel-size $((GPUS * NODES)) --attn-type minfer
          --train-attn-config minfer_qwen2.5_3b_0.90 --attn-implementation dr_stripe
          --hierarchical-context-parallel-sizes "$GPUS" "$NODES")
MODEL=(--model "$HF" --rope-scaling yarn:16 --seq-length 524288 --load "$START" --exit-on-missing-checkpoint)
TRAIN=(--data-path "$DATA" --split 100,0,0 --global-batch-size 64 --train-iters "${STEPS:-140}" --lr 2e-5
       --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0 --clip-grad 1.0)
MEMORY=(--bf16 --use-distributed-optimizer --recompute-granularity full --recompute-method uniform
        --recompute-num-layers 1)
LOG=(--save "$OUT/trained" --save-interval 20 --log-interval 1 --log-throughput --tensorboard-dir "$OUT/tensorboard"
     --eval-interval 1000 --eval-iters 0)

"$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS" --rdzv-backend c10d \
    --rdzv-endpoint "${MASTER:-localhost:0}" "$ROOT/pretrain_qwen.py" \
    "${PARALLEL[@]}" "${MODEL[@]}" "${TRAIN[@]}" "${MEMORY[@]}" "${LOG[@]}" "$@"

[ "$NODE" != 0 ] || convert to-hf --megatron "$OUT/trained" --hf-config "$HF" --out "$OUT/hf"
