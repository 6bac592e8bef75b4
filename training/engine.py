"""The DeepSpeed engine over the model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from eagle3.config import Config
from eagle3.ttt import TTTModel, TTTOutput
from training import optimizer as optimizers
from training.deepspeed_settings import deepspeed_config, offloads_optimizer, uses_bf16
from training.world import World, use_threads


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

    if offloads_optimizer(config):
        use_threads(host_works=True)
    model.to(world.device)
    if uses_bf16(config):
        model.bfloat16()
    optimizer = optimizers.build(model.drafter, config.optimizer, config.train.ema)
    # ZeRO 0 in bf16 takes a first step on gradients of 0, which must not decay the weights and must
    # not count
    set_learning_rate(optimizer, 0.0)
    engine, *_ = deepspeed.initialize(
        model=EngineModel(model), optimizer=optimizer, config=deepspeed_config(config)
    )
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
