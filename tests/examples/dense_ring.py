"""examples/library/hugging_face_fsdp.py with exact attention."""

from examples.library import hugging_face_fsdp
from megatron_mtrain import AttentionConfig


def main() -> None:
    """Runs the example."""
    ours = hugging_face_fsdp.ATTENTION
    hugging_face_fsdp.ATTENTION = AttentionConfig.from_dict("dense", {"block_size": ours.block_size})
    try:
        hugging_face_fsdp.main()
    finally:
        hugging_face_fsdp.ATTENTION = ours
