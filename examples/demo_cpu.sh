#!/usr/bin/env bash
# A small Qwen on real text (Python's own sources, one token a byte), minfer on a ring of two processes.
# Runs on a laptop without a GPU in a few minutes: loss falls from 5.5 to below 3 nats a byte.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python -m tools.data.make_demo_data --output demo/text

PARALLEL=(--context-parallel-size 2 --attn-type minfer --train-attn-config minfer_demo)
MODEL=(--num-layers 2 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --num-query-groups 2)
DATA=(--data-path demo/text --tokenizer-type HuggingFaceTokenizer --tokenizer-model demo/text_tokenizer --split 99,1,0)
TRAIN=(--seq-length 4096 --global-batch-size 1 --train-iters "${STEPS:-150}" --lr 2e-3 --lr-decay-style cosine
       --lr-warmup-iters 10 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --bf16)
LOG=(--log-interval 5 --eval-interval 1000 --eval-iters 1 --tensorboard-dir demo/tensorboard --log-throughput
     --save demo/checkpoint --save-interval 1000)

torchrun --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 pretrain_qwen.py \
    "${PARALLEL[@]}" "${MODEL[@]}" "${DATA[@]}" "${TRAIN[@]}" "${LOG[@]}" "$@"
