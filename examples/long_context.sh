#!/usr/bin/env bash
# A Qwen2.5 on sequences of LENGTH tokens (64K, 128K, 512K, 1M) with minfer; examples/launch/ starts it anywhere:
#   HF=Qwen2.5-3B/ DATA=data/mine OUT=runs/3b SIZE=3b LENGTH=512K bash examples/launch/one_node.sh [flags that win]
# DATA: a data set without .bin. OUT/start: the model for Megatron, which is made once, by
#   python tools/checkpoint/convert_qwen.py to-megatron --hf $HF --out $OUT/start --dtype bf16
# When stopped, the same command goes on from the newest checkpoint in OUT/trained. DRY_RUN=1 only checks the flags.
set -euo pipefail
: "${HF:?set it to the folder of the model}" "${DATA:?set it to the data set}" "${OUT:?set it to a folder for the run}"
ROOT=$(dirname "$0")/.. PYTHON=${PYTHON:-python3} GPUS=${GPUS:-8} NODES=${NODES:-1} LENGTH=${LENGTH:-128K}
START=$OUT/start RANKS=$((GPUS * NODES))
[ ! -f "$OUT/trained/latest_checkpointed_iteration.txt" ] || START=$OUT/trained

MEMORY=(--bf16 --use-distributed-optimizer --recompute-granularity full --recompute-method uniform
        --recompute-num-layers 1 --mlp-chunk-size 16384)
case $LENGTH in
    64K) TOKENS=65536 SEQUENCES=64 ;;
    128K) TOKENS=131072 SEQUENCES=32 ;;
    512K) TOKENS=524288 SEQUENCES=8 ;;
    1M) TOKENS=1048576 SEQUENCES=4 MEMORY+=(--offload-layer-inputs) ;;
    *) echo "LENGTH=$LENGTH is unknown; give 64K, 128K, 512K or 1M" >&2; exit 2 ;;
esac
CONTEXT=$((TOKENS / 32768 < RANKS ? TOKENS / 32768 : RANKS)) # ranks of a sequence; others hold other sequences
PARALLEL=(--context-parallel-size "$CONTEXT" --attn-type minfer --train-attn-config "minfer_qwen2.5_${SIZE:-3b}_0.90")
[ "$CONTEXT" -le "$GPUS" ] || PARALLEL+=(--attn-implementation dr_stripe
    --hierarchical-context-parallel-sizes "$GPUS" $((CONTEXT / GPUS)))
MODEL=(--model "$HF" --rope-scaling "yarn:$((TOKENS / 32768))" --seq-length "$TOKENS" --load "$START")
TRAIN=(--data-path "$DATA" --split 100,0,0 --global-batch-size "$SEQUENCES" --train-iters "${STEPS:-1000}" --lr 2e-5
       --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0 --clip-grad 1.0)
LOG=(--save "$OUT/trained" --save-interval 50 --log-interval 1 --log-throughput --tensorboard-dir "$OUT/tensorboard"
     --eval-interval 1000 --eval-iters 0 --exit-on-missing-checkpoint)
LAUNCH=(-m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS" --rdzv-backend c10d
        --rdzv-endpoint "${MASTER:-localhost:0}" "$ROOT/pretrain_qwen.py")
[ -z "${DRY_RUN:-}" ] || LAUNCH=("$ROOT/pretrain_qwen.py" --dry-run "$RANKS")
exec "$PYTHON" "${LAUNCH[@]}" "${PARALLEL[@]}" "${MODEL[@]}" "${TRAIN[@]}" "${MEMORY[@]}" "${LOG[@]}" "$@"
