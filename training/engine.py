"""The DeepSpeed engine, and what has to be set up before there can be one."""

from __future__ import annotations

import contextlib
import copy
import difflib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.ttt import TTTModel, TTTOutput
from training import optimizer as optimizers

OURS = {
    "train_batch_size": "train.tokens_per_batch and train.accumulation",
    "train_micro_batch_size_per_gpu": "train.tokens_per_batch",
    "gradient_accumulation_steps": "train.accumulation",
    "optimizer": "the optimizer group",
    "scheduler": "the optimizer group",
    "fp16": "nothing: use bf16 or fp32",
    "amp": "nothing: use bf16 or fp32",
    "torch_autocast": "nothing: use bf16 or fp32",
    "bfloat16": "deepspeed.bf16, its present name",
    "gradient_allreduce_op": "the loss, which counts on the mean",
    "managed_gradient_accumulation": "train.accumulation",
}
"""DeepSpeed keys that our own configuration decides."""

ALONE = torch.get_num_threads()
"""Threads that torch takes by itself: all cores, or what OMP_NUM_THREADS says."""

BESIDE_A_GPU = 8
"""Threads of a rank whose work a GPU does: more only wait for each other in short operations."""

UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, AssertionError)
"""What values of other types or out of range make DeepSpeed raise; its own class is a pydantic
model for sections only."""

KEEP_GATHERED = "stage3_param_persistence_threshold"
"""ZeRO 3 keeps parameters up to this size whole on every rank."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> World:
        """Join the process group: the launcher's, or one of a single process without a launcher."""
        import deepspeed

        if "RANK" not in os.environ:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                port = sock.getsockname()[1]
            os.environ |= {
                "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        use_threads(host_works=device.type == "cpu")
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cpu":
            # DeepSpeed would compile a C++ extension for shared-memory collectives: minutes, and it
            # needs a compiler. gloo does the same work. Safe: the table only says what may be
            # built.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, on every rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


@contextlib.contextmanager
def group_left_at_end() -> Iterator[None]:
    """Around a program: leave the process group, if one was joined, before the interpreter ends.

    A group that is still there then may abort the process: its threads drop what they hold while
    the interpreter they need goes away. Seen in one of ten ends of gloo's ranks on busy cores.
    An error other than a user's mistake leaves nothing: it may have come amid an operation whose
    end the other ranks will never reach, and leaving would wait for it.
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code not in (None, 0, 2):
            raise
        _leave()
        raise
    _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def use_threads(host_works: bool) -> None:
    """Take this rank's share of the machine's cores, unless OMP_NUM_THREADS says how many.

    torchrun sets it to 1 for several ranks if it is not set. One rank that works on the CPU keeps
    what it has, so its results do too.

    Args:
        host_works: the CPU does what takes time; else at most BESIDE_A_GPU threads are of use.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    # of torchrun, of DeepSpeed's launcher; without either all ranks may be on this machine
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")
    ranks = int(next(os.environ[name] for name in names if name in os.environ))
    threads = max(1, ALONE // ranks)
    if not host_works:
        threads = min(threads, BESIDE_A_GPU)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def deepspeed_config(config: Config) -> dict[str, Any]:
    """The user's DeepSpeed configuration and the keys we decide.

    Raises:
        UserError: the user's sets one of ours, has a key or value that DeepSpeed has no use for, or
            asks for what we cannot save.
    """
    theirs = {key: value for key, value in config.deepspeed.items() if value is not None}
    for key, instead in OURS.items():
        if key in theirs:
            raise UserError(f"deepspeed.{key} is decided by {instead}; remove it")
    _require_read(theirs)
    clipping = theirs.get("gradient_clipping", 0.0)
    if not isinstance(clipping, int | float) or clipping < 0:
        raise UserError(f"deepspeed.gradient_clipping={clipping} must be at least 0; 0 is none")
    zero = dict(theirs.get("zero_optimization") or {})
    if not isinstance(stage := zero.get("stage", 0), int):
        raise UserError(f"deepspeed.zero_optimization.stage={stage!r} must be a number")
    for part, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = (zero.get(part) or {}).get("device") or "none"
        if device not in ("none", "cpu"):
            raise UserError(
                f"deepspeed.zero_optimization.{part}.device must be cpu or none: checkpoints need "
                "the optimizer state in memory"
            )
        if device == "cpu" and zero.get("stage", 0) < least:
            raise UserError(
                f"deepspeed.zero_optimization.{part} does nothing below ZeRO stage {least}: set "
                f"deepspeed.zero_optimization.stage={least}, or remove it"
            )
    accumulated = (theirs.get("data_types") or {}).get("grad_accum_dtype")
    if uses_bf16(config) and zero.get("stage", 0) == 0 and accumulated == "fp32":
        raise UserError(
            "deepspeed.data_types.grad_accum_dtype=fp32 needs ZeRO 1 to 3 in bf16: set "
            "deepspeed=zero1, or remove it"
        )
    if zero.get("stage", 0) == 3:
        # see `_keep_whole`
        if KEEP_GATHERED in zero:
            raise UserError(f"deepspeed.zero_optimization.{KEEP_GATHERED} is decided; remove it")
        zero[KEEP_GATHERED] = 10**12
    return {
        **theirs,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.train.accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }


class _Asked(dict[str, Any]):
    """A configuration that knows which keys its reader asked for."""

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default) if key in self else default

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:  # `in config.keys()` asks, too
        return self

    def __copy__(self) -> _Asked:
        return self


def _require_read(theirs: dict[str, Any]) -> None:
    """Refuse what DeepSpeed would pass over in silence: it forbids unknown keys in its sections
    only, and has no list of the others. Those that this version reads are those it asks for.

    Raises:
        UserError: names the key and the nearest that is read, or says what DeepSpeed refuses.
    """
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    # a copy: DeepSpeed fills sections in
    asked = _Asked(copy.deepcopy({**theirs, "train_micro_batch_size_per_gpu": 1}))
    try:
        DeepSpeedConfig(asked)
    except (DeepSpeedConfigError, *UNREADABLE) as error:
        raise UserError(f"DeepSpeed refuses what `deepspeed` says: {error}") from error
    for key in sorted(theirs.keys() - asked.keys_asked):
        near = difflib.get_close_matches(key, asked.keys_asked - OURS.keys(), n=1)
        remedy = f"correct it to {near[0]}" if near else "remove it"
        raise UserError(f"deepspeed.{key} is nothing that DeepSpeed reads: {remedy}")


def uses_bf16(config: Config) -> bool:
    return bool((config.deepspeed.get("bf16") or {}).get("enabled", False))


def offloads_optimizer(config: Config) -> bool:
    """Whether the optimizer steps on the host."""
    zero = config.deepspeed.get("zero_optimization") or {}
    return bool((zero.get("offload_optimizer") or {}).get("device", "none") == "cpu")


class EngineModel(nn.Module):
    """What the engine wraps: the model with a tuple for output.

    DeepSpeed prepares a backward pass by hooks on the tensors that it finds in a forward's output,
    and it looks into tuples, not into our dataclass.
    """

    def __init__(self, model: TTTModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        output = self.model(*inputs)
        return tuple(getattr(output, item.name) for item in fields(output))


def forward(engine: Any, *inputs: Any) -> TTTOutput:
    """The model's output on a batch, for `engine.backward(output.loss)`."""
    names = (item.name for item in fields(TTTOutput))
    return TTTOutput(**dict(zip(names, engine(*inputs), strict=True)))


def initialize(model: TTTModel, config: Config, world: World) -> Any:
    """A DeepSpeed engine over the model's trainable parameters.

    Raises:
        UserError: DeepSpeed's part of the configuration cannot be.
    """
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfigError
    from pydantic import ValidationError

    if offloads_optimizer(config):
        use_threads(host_works=True)
    model.to(world.device)
    if uses_bf16(config):
        model.bfloat16()
    optimizer = optimizers.build(model.drafter, config.optimizer, config.train.ema)
    # ZeRO 0 in bf16 takes a first step on gradients of 0, which must not decay the weights and must
    # not count
    set_learning_rate(optimizer, 0.0)
    try:
        engine, *_ = deepspeed.initialize(
            model=EngineModel(model), optimizer=optimizer, config=deepspeed_config(config)
        )
    except (ValidationError, DeepSpeedConfigError) as error:
        raise UserError(f"DeepSpeed refuses what `deepspeed` says: {error}") from error
    optimizer.state.clear()
    if engine.zero_optimization_stage() == 3:
        _keep_whole(engine)
    return engine


def _keep_whole(engine: Any) -> None:
    """Have ZeRO 3 split optimizer state, master weights and gradients, but not the parameters.

    It would gather each module's weights when the module is called. A TTT step uses most weights of
    its one layer outside their modules' calls and all of them at once, so they stay gathered:
    DeepSpeed gathers again what it marks as persistent, here everything, after each step.
    """
    offload = engine.optimizer.parameter_offload
    offload._remove_module_hooks()
    offload.persistent_parameters[0].all_gather(offload.persistent_parameters)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
