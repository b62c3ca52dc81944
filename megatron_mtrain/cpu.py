"""Runs Megatron's own training loop on CPU with gloo when the machine has no GPU.

Megatron-Core names CUDA devices, streams and random generators directly. `prepare_megatron()` answers those
calls for a CPU, in one place, before Megatron starts. With a GPU it only mends two things of the wheel that
are not about the CPU, `_skip_helper_build` and `_use_group_step_adam`, and watches the process of
--async-save. What a CPU run needs on the command line is in `CPU_DEFAULTS`, so a CPU recipe has the flags of
a GPU recipe.
"""

import importlib.util
import logging
import os
import threading
import time
import warnings
from collections import defaultdict
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace

import megatron.core.datasets.utils as dataset_utils
import megatron.core.optimizer as optimizer
import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
import megatron.core.tensor_parallel.random as random
import megatron.training.training as training
import torch
import torch._dynamo
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from torch.optim.adam import adam
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


@cache
def prepare_megatron() -> None:
    """Makes Megatron run on this machine, with or without a GPU. Call it before Megatron starts."""
    _skip_helper_build()
    _use_group_step_adam()
    PersistentAsyncCaller.async_loop = staticmethod(partial(_prepared_async_loop, os.getpid()))
    if not torch.cuda.is_available():
        _answer_device_calls()
        _answer_random_calls()
        _start_without_cuda()
        _CpuTensors().__enter__()


def _skip_helper_build() -> None:
    """Keeps Megatron from building its dataset helpers when the wheel already ships them compiled.

    The wheel has the compiled module but not its Makefile, so the build that Megatron always starts would end
    the run.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        dataset_utils.compile_helpers = lambda: None


_async_loop = PersistentAsyncCaller.async_loop


def _prepared_async_loop(rank_process: int, *args, **kwargs) -> None:
    """The process that writes the checkpoints of --async-save: it starts afresh, so it is prepared afresh.

    It waits for its rank's requests for ever: without the watch it would outlive a rank that is killed.
    """
    threading.Thread(target=_end_with, args=(rank_process,), daemon=True).start()
    prepare_megatron()
    _async_loop(*args, **kwargs)


def _end_with(process: int) -> None:
    try:
        while True:
            os.kill(process, 0)  # sends nothing, asks whether it exists
            time.sleep(1)
    except ProcessLookupError:
        os._exit(1)


class GroupStepAdam(torch.optim.Optimizer):
    """Adam that counts steps per parameter group, as the fused Adams of Transformer Engine and Apex do.

    Megatron's distributed optimizer saves and loads exactly that. torch's Adam makes its state only in the
    first step and counts per parameter: loading before that step fails. With this class a checkpoint also
    moves between a CPU and a GPU host, since both have the same optimizer state.
    """

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode=True, capturable=False):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One step over all parameters that have a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param] = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
            done = group.get("step", 0)
            adam(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [torch.tensor(float(done)) for _ in params],
                decoupled_weight_decay=self.adam_w_mode,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                **{key: group[key] for key in ("lr", "weight_decay", "eps")},
            )
            group["step"] = done + 1


def _use_group_step_adam() -> None:
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


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


def _start_without_cuda() -> None:
    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # It warns that the CPU generator moves while the CUDA generator is in use; here they are one.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
    # Compiling small fused functions costs a CPU run minutes and gains it nothing.
    torch._dynamo.config.disable = True
