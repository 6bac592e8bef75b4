"""The DeepSpeed engine, and what has to be set up before there can be one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from eagle3.config import Config
from eagle3.errors import UserError
from eagle3.ttt import TTTModel

OURS = {
    "train_batch_size": "train.tokens_per_batch and train.accumulation",
    "train_micro_batch_size_per_gpu": "train.tokens_per_batch",
    "gradient_accumulation_steps": "train.accumulation",
    "optimizer": "the optimizer group",
    "scheduler": "the optimizer group",
    "fp16": "nothing: use bf16 or fp32",
}
"""DeepSpeed keys that our own configuration decides."""


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


def deepspeed_config(config: Config) -> dict[str, Any]:
    """The user's DeepSpeed configuration and the keys we decide.

    Raises:
        UserError: the user's sets one of ours, or asks for ZeRO 3.
    """
    theirs = config.deepspeed
    for key, instead in OURS.items():
        if key in theirs:
            raise UserError(f"deepspeed.{key} is decided by {instead}; remove it")
    if theirs.get("zero_optimization", {}).get("stage", 0) > 2:
        raise UserError("deepspeed.zero_optimization.stage must be 0, 1 or 2")
    return {
        **theirs,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.train.accumulation,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }


def uses_bf16(config: Config) -> bool:
    return bool(config.deepspeed.get("bf16", {}).get("enabled", False))


def initialize(model: TTTModel, config: Config, world: World) -> Any:
    """A DeepSpeed engine over the model's trainable parameters, with AdamW."""
    import deepspeed

    model.to(world.device)
    if uses_bf16(config):
        model.bfloat16()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.optimizer.lr,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        weight_decay=config.optimizer.weight_decay,
        fused=False,
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(config)
    )
    return engine


def set_learning_rate(engine: Any, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
