"""examples/library/hugging_face_fsdp.py with the attention of transformers in place of the ring."""

from transformers.integrations.sdpa_attention import sdpa_attention_forward

from examples.library import hugging_face_fsdp


def main() -> None:
    """Runs the example."""
    ours, hugging_face_fsdp.ring_attention = hugging_face_fsdp.ring_attention, sdpa_attention_forward
    try:
        hugging_face_fsdp.main()
    finally:
        hugging_face_fsdp.ring_attention = ours
