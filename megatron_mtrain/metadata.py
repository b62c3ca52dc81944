"""The metadata of a torch_dist checkpoint, checked before anybody unpickles it.

Tensors and arguments are read by torch.load(weights_only=True), by torch and by Megatron. But the file
.metadata is a plain pickle, which can name any function to call: a checkpoint from elsewhere could run code.
Here it is read by an unpickler that knows the classes of a checkpoint and nothing else.
"""

import pickle
from pathlib import Path

import torch

MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
NAMES = {
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),  # where the checkpoint was written
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        # A dotted name could walk from an allowed module to whatever that module imports.
        allowed = module in MODULES and "." not in name or (module, name) in NAMES or dtype
        found = super().find_class(module, name) if allowed else None
        if found is None or (module in MODULES and getattr(found, "__module__", None) != module):
            raise _Foreign(f"{module}.{name}")
        return found


class _Foreign(Exception):
    pass


def check_metadata(folder: Path) -> None:
    """Raises ValueError when the .metadata of a checkpoint folder names code, or cannot be read."""
    path = folder / ".metadata"
    try:
        with open(path, "rb") as stream:
            _Unpickler(stream).load()
    except _Foreign as error:
        raise ValueError(
            f"checkpoint metadata {path} asks for {error}, which no checkpoint needs; do not load it"
        ) from None
    except Exception as error:  # a damaged pickle fails in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"checkpoint metadata {path} is damaged ({reason}); copy it again") from None


def check_checkpoint(folder: str | None, step: int | None = None) -> None:
    """Checks the checkpoint that Megatron would load from a --load folder; does nothing where there is none.

    `step` is the --ckpt-step, None for the newest. Raises ValueError for metadata that is damaged or names
    code, and for a tracker file that names no checkpoint.
    """
    tracker = Path(folder or "") / "latest_checkpointed_iteration.txt"
    if folder is None or not tracker.is_file():
        return
    text = tracker.read_text(errors="replace").strip()
    if step is None and text != "release" and not text.isdecimal():
        raise ValueError(f"{tracker} says {text!r}; it has to be an iteration or release, write one of them")
    name = "release" if step is None and text == "release" else f"iter_{int(step or text):07d}"
    found = tracker.with_name(name)
    if not found.is_dir():
        saved = sorted(path.name for path in tracker.parent.glob("iter_*") if (path / ".metadata").is_file())
        raise ValueError(f"--load has no {found}; complete ones: {', '.join(saved) or 'none'}")
    if (found / ".metadata").is_file():
        check_metadata(found)
