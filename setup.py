from setuptools import find_namespace_packages, setup

setup(
    name="megatron-mtrain",
    version="0.1.0",
    description="Distributed dynamic sparse attention for training Qwen2.5-class models on 64K to 1M tokens",
    license="Apache-2.0",
    python_requires=">=3.12",
    # kernels/ is a folder of the top level, linked into the package: see CONTRIBUTING.md.
    packages=find_namespace_packages(include=["megatron_mtrain", "megatron_mtrain.*"]),
    package_data={
        "megatron_mtrain.patterns": ["*.json"],
        "megatron_mtrain.train_attn_configs": ["*.yaml"],
    },
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; sys_platform == 'linux'",
        "megatron-core[training]>=0.19.2,<0.20",
        "numpy<2.5",  # Triton's interpreter breaks with 2.5
        "einops",  # for Megatron's hierarchical context parallelism
        "pyyaml",
        "sentencepiece",
        "tensorboard",
        "tokenizers",
        "transformers>=5",
    ],
    extras_require={
        "gpu": ["transformer-engine[core_cu13,pytorch]>=2.20", "flash-attn-4>=4.0.0b36"],
        # dashscope and llama-models carry the tokenizers of Qwen and Llama 3.
        "test": [
            "dashscope",
            "hypothesis",
            "llama-models",
            "pytest",
            "pytest-xdist",
            "ruff==0.17.6",
            "tiktoken",
        ],
        "docs": ["mkdocs-material", "mkdocstrings[python]"],
        "tools": ["huggingface_hub", "matplotlib", "pyarrow", "tiktoken", "xxhash", "zstandard"],
    },
)
