"""Runs Megatron's own training loop on CPU with gloo when the machine has no GPU.

Megatron-Core names CUDA devices, streams and random generators directly. `enable_without_gpu()` answers those calls for
a CPU, in one place, before Megatron starts; with a GPU it does nothing but `skip_helper_build()`. No Megatron source is
copied. What a CPU run needs on the command line is in `CPU_DEFAULTS`, so a CPU recipe has the flags of a GPU recipe.
"""

import importlib.util
import os
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

# argparse destination -> value; fused kernels, Transformer Engine and NCCL exist only on a GPU.
CPU_DEFAULTS = {
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "transformer_impl": "local",
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "gradient_accumulation_fusion": False,
}


def enable_without_gpu() -> bool:
    """Prepares Megatron for this machine; returns True when it will run on CPU. Call it once, before Megatron starts."""
    skip_helper_build()
    if torch.cuda.is_available():
        return False
    _answer_device_calls()
    _answer_random_calls()
    _patch_megatron()
    _CpuTensors().__enter__()
    return True


def skip_helper_build() -> None:
    """Keeps Megatron from building its dataset helpers when the wheel already ships them compiled.

    The wheel has the compiled module but not its Makefile, so the build that Megatron always starts would end the run.
    """
    import megatron.core.datasets.utils as dataset_utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        dataset_utils.compile_helpers = lambda: None


class _CpuTensors(TorchFunctionMode):
    """Creates and keeps on the CPU every tensor for which CUDA is asked."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if _names_cuda(arg) else arg for arg in args)
        result = func(*args, **kwargs)
        # The optimizer sorts parameters by the name of their type and knows only the CUDA names.
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _names_cuda(device) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _Idle:
    """A stream or an event: on a CPU everything has finished by the time somebody asks."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def _answer_device_calls() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    # Architecture 10 is the one of which Megatron does not ask for CUDA_DEVICE_MAX_CONNECTIONS.
    properties = SimpleNamespace(name="cpu", major=10, minor=0, multi_processor_count=os.cpu_count())
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.Stream = cuda.Event = _Idle
    cuda.current_stream = cuda.default_stream = lambda device=None: _Idle()
    cuda.stream = lambda stream: nullcontext()
    for name in ("synchronize", "empty_cache", "set_device", "set_stream", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.memory_stats = lambda device=None: defaultdict(int)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def _answer_random_calls() -> None:
    cuda = torch.cuda
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        module.manual_seed = torch.default_generator.manual_seed
        module.manual_seed_all = lambda seed: None  # torch.manual_seed has seeded the CPU when it calls this


def _patch_megatron() -> None:
    import torch._dynamo

    import megatron.core.tensor_parallel.random as random
    import megatron.training.training as training

    # Compiling small fused functions costs a CPU run minutes and gains it nothing.
    torch._dynamo.config.disable = True
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
