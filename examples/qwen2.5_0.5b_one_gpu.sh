#!/usr/bin/env bash
# Qwen2.5-0.5B at 16384 tokens on one GPU with Transformer Engine, bf16 and the distributed optimizer.
# Usage: bash examples/qwen2.5_0.5b_one_gpu.sh [flags that win over the ones below]
# ATTN="--attn-type dense" compares with exact attention; --seq-length and --context-parallel-size go further.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
"$PYTHON" -m tools.data.make_demo_data --output demo/text

read -ra ATTN <<< "${ATTN:---attn-type minfer --train-attn-config minfer_qwen2.5_0.5b_0.90}"
PARALLEL=(--context-parallel-size 1 "${ATTN[@]}")
MODEL=(--num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 --num-query-groups 2
       --vocab-size 151936 --make-vocab-size-divisible-by 64)
DATA=(--data-path demo/text --tokenizer-type HuggingFaceTokenizer --tokenizer-model demo/text_tokenizer --split 100,0,0)
TRAIN=(--seq-length 16384 --global-batch-size 1 --train-iters "${STEPS:-10}" --lr 1e-4 --lr-warmup-iters 2
       --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0 --bf16 --use-distributed-optimizer)
LOG=(--log-interval 1 --eval-interval 1000 --eval-iters 0 --log-throughput)

"$PYTHON" -m torch.distributed.run --nproc-per-node "${GPUS:-1}" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
    pretrain_qwen.py "${PARALLEL[@]}" "${MODEL[@]}" "${DATA[@]}" "${TRAIN[@]}" "${LOG[@]}" "$@"
