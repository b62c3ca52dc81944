#!/usr/bin/env bash
# Ring attention of every method, layout and ring shape against naive attention: on NCCL when there is a GPU for each
# of the eight ranks, else on gloo processes. Further arguments go to pytest; each file also runs alone:
#   pytest -s tests/ring/test_minfer_ring.py
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -x .venv/bin/python ]; then PYTHON=${PYTHON:-.venv/bin/python}; fi
exec "${PYTHON:-python3}" -m pytest tests/ring "$@"
