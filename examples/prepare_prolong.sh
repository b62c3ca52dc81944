#!/usr/bin/env bash
# ProLong (512K) from the hub to a dataset for Megatron; run again to go on after an interruption.
#   RAW_DATASET_DIR=/data/raw PROCESSED_DATA_DIR=/data/prolong SOURCE_TOKENIZER=Llama-3/ TARGET_TOKENIZER=Qwen2.5/ \
#       bash examples/prepare_prolong.sh
# DOMAINS=book-524288,arxiv        only these, downloaded and converted (all: 228 GB, 19 GB after sampling);
#                                  with weights on all of them (book-524288@0.3,arxiv@0.7) in this proportion
# RAW_GB=40 PROCESSED_GB=4         the room these need, in GB       SAMPLE_INTERVAL=4   every 4th sample
# DOWNLOAD=no                      use what is there                WORKERS=16          processes (all cores)
set -euo pipefail
: "${RAW_DATASET_DIR:?set it to the folder for the download}" "${PROCESSED_DATA_DIR:?set it to the folder for the result}"
: "${SOURCE_TOKENIZER:?set it to the tokenizer of Llama-3}" "${TARGET_TOKENIZER:?set it to the tokenizer to train with}"
export DOMAINS=${DOMAINS:-} raw=$RAW_DATASET_DIR/long-context-524288
PYTHON=${PYTHON:-python}

room() { # folder, GB: stop when its disk has less, counting what an earlier run left there
    mkdir -p "$1"
    local free=$(($(df -Pk "$1" | awk 'NR == 2 {print $4}') + $(du -sk "$1" | cut -f1)))
    [ $((free / 1000000)) -ge "$2" ] || { echo "$1: room for $((free / 1000000)) GB, $2 GB needed" >&2; exit 1; }
}

if [ "${DOWNLOAD:-yes}" = yes ]; then
    room "$raw" "${RAW_GB:-228}"
    "$PYTHON" - <<'PY'
import os
from huggingface_hub import snapshot_download
chosen = [f"{domain.partition('@')[0].strip()}/*" for domain in os.environ["DOMAINS"].split(",") if domain]
snapshot_download("princeton-nlp/prolong-data-512K", repo_type="dataset", local_dir=os.environ["raw"],
                  allow_patterns=chosen or None)
PY
fi
room "$PROCESSED_DATA_DIR" "${PROCESSED_GB:-19}"
"$PYTHON" "$(dirname "$0")/../tools/data/prolong_to_indexed.py" --input "$raw" --domains "$DOMAINS" --split train \
    --output "$PROCESSED_DATA_DIR/prolong" --seq-length 524288 --sample-interval "${SAMPLE_INTERVAL:-4}" \
    --source-tokenizer "$SOURCE_TOKENIZER" --target-tokenizer "$TARGET_TOKENIZER" ${WORKERS:+--workers "$WORKERS"}
