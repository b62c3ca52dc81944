"""Turn a Hugging Face Qwen2, Qwen2.5 or Qwen3 model into a Megatron checkpoint, and a trained one back.

    python tools/checkpoint/convert_qwen.py to-megatron --hf Qwen2.5-3B --out checkpoints/start --dtype bf16
    torchrun ... pretrain_qwen.py --model Qwen2.5-3B --load checkpoints/start --save checkpoints/trained ...
    python tools/checkpoint/convert_qwen.py to-hf --megatron checkpoints/trained --out Qwen2.5-3B-512K

The checkpoint loads on any number of tensor-, pipeline-, context- and data-parallel ranks, with local or
Transformer Engine layers; it is a release in Megatron's words, so training starts at step 0 with new
optimizer state. to-hf takes config.json and the tokenizer from --hf-config, else from the checkpoint or from
the folders that its run named; YaRN is written as the run had it. --verify compares the logits of both
models on random tokens, in float32.

Runs on the CPU, with one tensor of one layer in memory at a time. --out appears when all is written and
verified."""

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.checkpoint.output_folder import check_vacant, new_folder

DTYPES = ("fp32", "bf16", "fp16")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    directions = parser.add_subparsers(dest="direction", required=True, metavar="{to-megatron,to-hf}")
    forward = directions.add_parser("to-megatron", help="Hugging Face folder to Megatron checkpoint")
    forward.add_argument("--hf", required=True, type=Path, metavar="DIR", help="folder with config.json")
    back = directions.add_parser("to-hf", help="Megatron checkpoint to Hugging Face folder")
    back.add_argument(
        "--megatron",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder that --save named; its newest is taken",
    )
    back.add_argument(
        "--hf-config", type=Path, metavar="DIR", help="folder of the original model: config.json, tokenizer"
    )
    for direction in (forward, back):
        direction.add_argument(
            "--out", required=True, type=Path, metavar="DIR", help="folder to make; an empty one may be there"
        )
        direction.add_argument("--dtype", choices=DTYPES, help="of the weights (as they are)")
        direction.add_argument("--verify", action="store_true", help="compare the logits of both models")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    """Converts. Raises ValueError for what cannot be converted or written; nothing is left then."""
    check_vacant(args.out)
    from tools.checkpoint import conversion  # seconds to import: what is wrong at a glance is said before

    start = time.monotonic()
    dtype = conversion.DTYPES.get(args.dtype)
    with new_folder(args.out) as scratch:
        with _naming_failed_writes(args.out):
            if args.direction == "to-megatron":
                shape = conversion.to_megatron(args.hf, scratch, dtype)
            else:
                shape = conversion.to_hf(args.megatron, scratch, args.hf_config, dtype)
        if args.verify:
            from tools.checkpoint.verify import verify

            pair = (args.hf, scratch) if args.direction == "to-megatron" else (scratch, args.megatron)
            print(verify(*pair))
    seconds = time.monotonic() - start
    made = f"{shape.family}, {shape.num_layers} layers, vocabulary {shape.vocab_size}"
    print(f"{args.out}: {made}, {seconds:.1f} s")


@contextmanager
def _naming_failed_writes(out: Path) -> Iterator[None]:
    """Says which folder could not be written: write() knows the reason alone, torch's writer not even
    that."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {error.filename or out}: {error.strerror or error}") from None
    except RuntimeError as error:
        reason = error.__context__ or error
        raise ValueError(f"cannot write {out}: {reason}; is there room for the weights?") from None


def main() -> None:
    """Runs the command line; what the user can mend ends in one line and exit code 1."""
    args = parse_arguments()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks for a GPU: the CPU does it all
    logging.disable(logging.WARNING)  # of libraries, about GPUs and process groups that are not there
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(args)
    except (ValueError, OSError) as error:
        sys.exit(f"convert_qwen: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit("convert_qwen: interrupted; nothing is left")
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()
