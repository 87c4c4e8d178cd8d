"""A simulated GPU: code that asks for device "cuda" runs on the CPU, under the rules of a real one.

    python tests/simulated_gpu.py -m pspo.train --run.max_steps 4 ...

* A "cuda" tensor wraps a CPU tensor; one TorchDispatchMode runs every operation on the wrapped ones.
* An operation that mixes "cuda" and CPU tensors raises, as a GPU build's does. CPU scalars (0-dim) may enter pointwise
  operations, CPU index tensors may index, and `copy_` copies both ways.
* While a CUDA graph is captured, what makes the CPU wait for the GPU raises.
* A CUDA graph records the operations of its capture, and replays them into the same memory: what has moved shows.
* `torch.cuda`'s queries, a generator of its own, autocast, fused AdamW.

Not simulated: time, memory, streams that race, asynchronous errors, NCCL, dtypes that only a GPU refuses.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_name("gpu_stub.cpp")


def load_stub() -> None:
    """Compile the stub of a GPU, which torch's C++ asks for, unless that was done before; load it before torch."""
    lib = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    version = importlib.metadata.version("torch")
    stub = Path(tempfile.gettempdir()) / f"simulated-gpu-{version}-{os.getuid()}.so"
    if not stub.exists() or stub.stat().st_mtime < SOURCE.stat().st_mtime:
        unfinished = stub.with_suffix(f".{os.getpid()}")
        paths = [f"-I{lib.parent}/include", f"-L{lib}", f"-Wl,-rpath,{lib}"]
        command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", *paths, "-o", unfinished, SOURCE]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
        unfinished.rename(stub)
    for library in (lib / "libtorch_global_deps.so", lib / "libc10.so", lib / "libtorch_cpu.so", stub):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


if "torch" not in sys.modules:
    load_stub()

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

CUDA = torch.device("cuda", 0)
MIXED = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
aten = torch.ops.aten

captures: list["Graph"] = []  # graphs that are being captured
VIEWS = {
    "view", "_unsafe_view", "expand", "slice", "select", "transpose", "t", "permute", "unsqueeze", "squeeze", "detach",
    "alias", "as_strided", "split", "split_with_sizes", "unbind", "lift_fresh", "diagonal", "_reshape_alias", "unfold",
    "view_as_real", "_local_scalar_dense", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
}  # fmt: skip
WAITS = {
    "_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select",
    "masked_scatter_backward", "bincount", "equal", "is_nonzero",
}  # fmt: skip


def wait(what: str) -> None:
    """Raise where the CPU may not wait for the GPU."""
    if captures:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")


# ---------------------------------------------------------------- tensors


class GpuTensor(torch.Tensor):
    """A "cuda" tensor; its numbers are those of `inner`, on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "GpuTensor":
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **layout, dtype=inner.dtype, device=CUDA)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def data_ptr(self):
        return self.inner.data_ptr()

    def __reduce_ex__(self, protocol):  # in files a CPU tensor; `load` puts it where map_location says
        wait("copy to the CPU, to save")
        return self.inner.__reduce_ex__(protocol)

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self):
        wait("tolist")
        return self.inner.tolist()

    def __repr__(self, **kwargs):
        return f"GpuTensor({self.inner!r})"

    @property
    def data(self):
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, value):
        if not on_gpu(value):
            raise RuntimeError("incompatible tensor type: .data of a cuda tensor set to a CPU tensor")
        torch.Tensor.data.__set__(self, value)
        self.inner = value.inner


def on_gpu(value: object) -> bool:
    return type(value) is GpuTensor


def on_cpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not on_gpu(value) and value.device.type == "cpu"


def pin_memory(tensor: torch.Tensor, *args) -> torch.Tensor:
    if on_gpu(tensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    pinned = tensor.clone()
    pinned.simulates_pinned = True
    return pinned


# ---------------------------------------------------------------- operations

INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
TAKES_SCALARS = {"where", "masked_fill", "masked_fill_", "lerp", "lerp_", "fill_"}  # besides those tagged pointwise
RANDOM = {
    "exponential_", "uniform_", "normal_", "random_", "bernoulli", "bernoulli_", "rand", "randn", "randint", "randperm",
    "multinomial", "rand_like", "randn_like", "randint_like", "native_dropout", "normal",
}  # fmt: skip


class SimulatedGpu(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def run(function, args: tuple, kwargs: dict):
    """One operation of the dispatcher, on wrapped tensors; its results are the GPU's if it runs there."""
    name = function._schema.name.split("::")[1]
    tensors = [value for value in leaves([*args, *kwargs.values()]) if isinstance(value, torch.Tensor)]
    wrappers = {id(tensor.inner): tensor for tensor in tensors if on_gpu(tensor)}
    runs_on_gpu = bool(wrappers)
    if kwargs.get("device") is not None:
        runs_on_gpu = torch.device(kwargs["device"]).type == "cuda"
    if not wrappers and not runs_on_gpu:
        return function(*args, **kwargs)
    check_devices(function, name, args, tensors)
    check_waits(name, args, kwargs, runs_on_gpu)
    if name in RANDOM and runs_on_gpu:
        function, kwargs = with_gpu_generator(function, kwargs)
    inner_args = convert(unwrap, args)
    inner_kwargs = {name: convert(unwrap, value) for name, value in kwargs.items()}
    if captures:
        captures[-1].remember(function, inner_args)
    result = function(*inner_args, **inner_kwargs)
    if captures and name not in VIEWS:
        captures[-1].steps.append((function, inner_args, inner_kwargs, result))
    if not runs_on_gpu:
        return result

    def wrap(value):
        if not on_cpu(value):
            return value
        if id(value) in wrappers:  # in place: the very tensor that came
            return wrappers[id(value)]
        return GpuTensor(value)

    return convert(wrap, result)


def leaves(value: object) -> list:
    """What lists and tuples hold, or the value itself."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def convert(function: Callable, value: object) -> object:
    """The value, or all that lists and tuples hold, by a function. (torch's `tree_map` takes half of a run's time.)"""
    if isinstance(value, (list, tuple)):
        return type(value)([convert(function, item) for item in value])
    return function(value)


def unwrap(value: object) -> object:
    if on_gpu(value):
        return value.inner
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def check_devices(function, name: str, args: tuple, tensors: list[torch.Tensor]) -> None:
    """Raise as a GPU build does if CPU and "cuda" tensors meet where they must not."""
    cpu_tensors = [tensor for tensor in tensors if on_cpu(tensor)]
    if not cpu_tensors or len(cpu_tensors) == len(tensors) or name in ("copy_", "_to_copy"):
        return
    if name in INDEXING:
        if on_cpu(args[0]):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        if len(args) > 2 and on_cpu(args[2]) and args[2].dim() > 0:
            raise RuntimeError(f"{MIXED} (values of {name})")
        return
    is_pointwise = torch.Tag.pointwise in function.tags or name in TAKES_SCALARS
    takes_scalars = is_pointwise or name.startswith("_foreach") or "fused" in name
    if not takes_scalars or any(tensor.dim() > 0 for tensor in cpu_tensors):
        raise RuntimeError(f"{MIXED} (when checking arguments of {function})")


def check_waits(name: str, args: tuple, kwargs: dict, runs_on_gpu: bool) -> None:
    """`wait` if the CPU waits for this operation."""
    if name in WAITS:
        wait(name)
    elif name == "_to_copy":
        check_transfer(args[0], runs_on_gpu, kwargs.get("non_blocking", False), is_target_pinned=True)
    elif name == "copy_" and args[1].dim() > 0:
        non_blocking = len(args) > 2 and args[2]
        check_transfer(args[1], on_gpu(args[0]), non_blocking, hasattr(args[0], "simulates_pinned"))
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        wait("repeat_interleave without output_size")
    elif name in INDEXING:
        for index in args[1]:
            if on_cpu(index):
                wait("copy of a CPU's index to the GPU")
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                wait("boolean mask")


def check_transfer(source: torch.Tensor, to_gpu: bool, non_blocking: bool, is_target_pinned: bool) -> None:
    """`wait` for a copy between CPU and GPU: there is none if it is non-blocking and the CPU's side pinned."""
    if source.numel() == 0:  # torch returns before it copies
        return
    if on_cpu(source) and to_gpu and not (non_blocking and hasattr(source, "simulates_pinned")):
        wait("copy to the GPU, unpinned")
    if on_gpu(source) and not to_gpu and not (non_blocking and is_target_pinned):
        wait("copy to the CPU")


def with_gpu_generator(function, kwargs: dict) -> tuple:
    """A random operation, and its arguments, with the GPU's generator unless it is given one."""
    generator = kwargs.get("generator")
    if generator is not None:
        if generator._cdata not in gpu_generators:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return function, kwargs
    packet = function.overloadpacket
    parameters = [argument.name for argument in function._schema.arguments if argument.name != "generator"]
    for overload in (function, *(getattr(packet, name) for name in packet.overloads())):
        names = [argument.name for argument in overload._schema.arguments]
        if "generator" in names and [name for name in names if name != "generator"] == parameters:
            return overload, {**kwargs, "generator": GENERATOR}
    return function, kwargs


# ---------------------------------------------------------------- attention

cpu_attention = torch.nn.functional.scaled_dot_product_attention


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """`scaled_dot_product_attention` by its formula, operation by operation; on the CPU what it was."""
    if not on_gpu(query):
        return cpu_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (states.to(torch.get_autocast_dtype("cuda")) for states in (query, key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # ATen would add a wrapped one as 0 and 1
        attn_mask = torch.where(attn_mask, torch.zeros((), dtype=query.dtype, device=query.device), -torch.inf)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, 0.0, is_causal, **options)[0]


# ---------------------------------------------------------------- torch.cuda

CpuGenerator = torch.Generator
gpu_generators = {}  # by address; they stay, so that no address is used twice


class Generator(CpuGenerator):
    def __new__(cls, device="cpu"):
        self = CpuGenerator.__new__(cls)
        if torch.device(device).type == "cuda":
            gpu_generators[self._cdata] = self
        return self

    def __init__(self, device="cpu"): ...


GENERATOR = Generator("cuda")


class Graph:
    """A CUDA graph: the operations of its capture, on the memory that they had then."""

    def __init__(self):
        self.steps = []
        self.before = []  # tensors that the capture has changed, and their values before

    def pool(self):
        return 0, 0

    def remember(self, function, args: tuple) -> None:
        """Keep what an operation is about to change: a capture computes nothing."""
        schema = getattr(function, "_schema", None)
        if schema is not None and schema.is_mutable:
            changed = [arg for arg, about in zip(args, schema.arguments, strict=False) if about.is_write]
            self.before += [(tensor, tensor.clone()) for tensor in leaves(changed)]

    def end_capture(self) -> None:
        """Put back what the capture has changed, and spoil what it has computed."""
        with torch.no_grad(), _disable_current_modes():
            for _, _, _, result in self.steps:
                for tensor in leaves(result):
                    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                        tensor.fill_(torch.nan)
            for tensor, values in reversed(self.before):
                tensor.copy_(values)

    def replay(self) -> None:
        with torch.no_grad(), _disable_current_modes():
            for function, args, kwargs, result in self.steps:
                fresh = function(*args, **kwargs)
                for tensor, value in zip(leaves(result), leaves(fresh), strict=True):
                    if isinstance(tensor, torch.Tensor) and tensor is not value:
                        tensor.copy_(value)


class Capture:
    def __init__(self, graph: Graph, pool=None, stream=None, capture_error_mode="global"):
        self.graph = graph

    def __enter__(self):
        wait("synchronize, before a capture")
        self.random_state = GENERATOR.get_state()
        captures.append(self.graph)

    def __exit__(self, *_):
        captures.pop().end_capture()
        GENERATOR.set_state(self.random_state)


class Stream:
    def wait_stream(self, other): ...
    def __enter__(self): ...
    def __exit__(self, *_): ...


def set_gpu_state(state, device="cuda") -> None:
    if on_gpu(state):
        raise TypeError("expected a torch.ByteTensor, but got torch.cuda.ByteTensor")
    GENERATOR.set_state(state)


def patch_cuda() -> None:
    """Replace what `torch.cuda` asks its driver."""
    gib = 2**30
    properties = types.SimpleNamespace(name="simulated H100", total_memory=80 * gib, major=9, minor=0)
    answers = {
        "is_available": True,
        "_lazy_init": None,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "mem_get_info": (78 * gib, 80 * gib),
        "max_memory_allocated": gib,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.is_current_stream_capturing = lambda: bool(captures)
    torch.cuda.synchronize = lambda device=None: wait("synchronize")
    torch.cuda.manual_seed_all = GENERATOR.manual_seed
    torch.cuda.get_rng_state = lambda device="cuda": GENERATOR.get_state()
    torch.cuda.set_rng_state = set_gpu_state
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = lambda device=None: Stream()
    torch.cuda.stream = lambda stream: stream
    torch.cuda.CUDAGraph = Graph
    torch.cuda.graph = Capture
    torch.cuda.graphs.graph_pool_handle = lambda: (0, 0)  # of make_graphed_callables
    torch.Generator = Generator
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # bitsandbytes looks for it


# ---------------------------------------------------------------- torch


def patch_torch() -> None:
    """Replace what asks for a GPU beneath the dispatcher."""
    cpu_tensor = torch.tensor
    cpu_load = torch.load

    def tensor(*args, **kwargs):
        torch._C._set_only_lift_cpu_tensors(True)  # of this thread: autograd has others
        return cpu_tensor(*args, **kwargs)

    def load(*args, map_location=None, **kwargs):
        if map_location is None or torch.device(map_location).type == "cpu":
            return cpu_load(*args, map_location=map_location, **kwargs)
        loaded = cpu_load(*args, map_location="cpu", **kwargs)
        return tree_map(lambda value: GpuTensor(value) if on_cpu(value) else value, loaded)

    torch.tensor = tensor
    torch.load = load
    torch.Tensor.pin_memory = pin_memory
    torch.nn.functional.scaled_dot_product_attention = attention
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        sys.modules[module]._foreach_supported_types.append(GpuTensor)
    torch.__future__.set_swap_module_params_on_conversion(True)  # ties stay, as where a GPU takes a parameter's data


def install() -> None:
    """Make torch.device("cuda") this simulation, for the rest of the process."""
    import torch._dynamo  # a dispatch mode needs it, and it names torch's functions while they are torch's

    torch.utils._device._device_constructors()  # remembers them, too: torch.tensor under torch.device("meta")
    patch_cuda()
    patch_torch()
    SimulatedGpu().__enter__()


def main() -> None:
    install()
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2 if is_module else 1 :]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.modules["simulated_gpu"] = sys.modules["__main__"]
    main()
