# megatron_mtrain on NVIDIA's PyTorch image: Python 3.12, CUDA, NCCL with its network plug-ins, Transformer Engine.
#   docker build -t megatron-mtrain .
#   docker run --rm --gpus all --ipc host megatron-mtrain bash examples/qwen2.5_0.5b_one_gpu.sh
ARG BASE=nvcr.io/nvidia/pytorch:26.04-py3
FROM ${BASE}
WORKDIR /workspace/megatron_mtrain
COPY . .
# PIP_CONSTRAINT of the image keeps its own torch, Triton, numpy and Transformer Engine; the rest is as tested.
RUN pip install --no-cache-dir -e '.[tools]' $(grep -E '^(megatron-core|tokenizers|transformers)==' constraints.txt) && \
    python -c 'import transformer_engine.pytorch, megatron_mtrain.model'
