"""What is known to go wrong between a drafter that was trained and the one that a server runs.

Each cause can be tried on the drafter itself: a server with that fault drafts what the drafter,
changed likewise, drafts. `eval.parity` looks for the one whose drafts the live server accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.drafter import Drafter
from eagle3.walk import replayed, teacher_forced

Change = Callable[[Drafter], AbstractContextManager[None]]


@contextmanager
def _as_it_is(drafter: Drafter) -> Iterator[None]:
    yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One fault.

    change: makes the drafter what the server then runs, for as long as its context lasts.
    aux: what the server feeds it in place of the aux states [T, A * H].
    late: places by which the token that a row reads lies before the right one.
    ids: target id that the server makes of each target id it was meant to propose [vocab_size].
    """

    name: str
    remedy: str
    change: Change = _as_it_is
    aux: Callable[[Tensor], Tensor] | None = None
    late: int = 0
    ids: Tensor | None = None

    def histograms(
        self, drafter: Drafter, tokens: list[int], loss_mask: list[int], aux: Tensor, num_steps: int
    ) -> list[list[int]]:
        """As `eagle3.walk.sample_histograms`, of a server with this fault."""
        read = [tokens[0]] * self.late + tokens[: len(tokens) - self.late]
        with self.change(drafter):
            seen = aux if self.aux is None else self.aux(aux)
            drafts = teacher_forced(drafter, read, loss_mask, seen, num_steps)
        if self.ids is not None:
            drafts = torch.where(drafts < 0, drafts, self.ids[drafts.clamp(min=0)])
        return replayed(drafts, tokens, loss_mask)


NONE = Cause(name="no fault", remedy="")


def known_causes(drafter: Drafter, target_lm_head: Tensor) -> list[Cause]:
    """All that would change what this drafter drafts.

    Args:
        target_lm_head: of the whole vocabulary [vocab_size, H].
    """
    config, vocab = drafter.config, drafter.vocab
    misread = torch.full((config.vocab_size,), -1)
    misread[vocab.target_ids] = vocab.d2t
    upside_down = (
        "the order of eagle_aux_hidden_state_layer_ids in the drafter's config.json must be that "
        "of training, lowest layer first"
    )
    causes = [
        Cause(
            name="aux layers in another order",
            remedy=upside_down,
            aux=lambda aux: aux.unflatten(-1, (config.num_aux, -1)).flip(-2).flatten(-2),
        ),
        Cause(
            name="rows read the token at their own place, not the one after it",
            remedy="the engine must shift the token ids by one against the hidden states",
            late=1,
        ),
        Cause(
            name="d2t taken for target ids; it holds offsets",
            remedy="target id = draft id + d2t[draft id]; look at how the engine loads d2t",
            ids=misread,
        ),
        Cause(
            name="lm_head taken from the target",
            remedy="the engine must load the drafter's own lm_head.weight",
            change=_with(("lm_head.weight", target_lm_head[vocab.target_ids])),
        ),
        Cause(
            name="norm_output the other way round",
            remedy="the state fed back comes after the final norm exactly if config.json says "
            "norm_output; the engine must know that key",
            change=_configured(norm_output=not config.norm_output),
        ),
    ]
    for name in ("input_norm", "fc_norm"):
        if getattr(drafter, name) is not None:
            key = "norm_before_fc" if name == "input_norm" else "fc_norm"
            causes.append(
                Cause(
                    name=f"{key} left out",
                    remedy=f"an engine that does not know {key} drops the norm: use a newer one",
                    change=_with((name, None)),
                )
            )
    for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm"):
        causes.append(
            Cause(
                name=f"{name}.weight not loaded",
                remedy="look for missing keys in the server's log",
                change=_with((f"{name}.weight", torch.ones(config.hidden_size))),
            )
        )
    if config.rope_theta != 10000.0:
        causes.append(
            Cause(
                name="rope_theta left at 10000",
                remedy="config.json must give rope_theta both at the top and in rope_parameters",
                change=_configured(rope_theta=10000.0),
            )
        )
    return causes


def _with(*changes: tuple[str, Any]) -> Change:
    """Attributes by dotted name, put in place of the drafter's."""

    @contextmanager
    def change(drafter: Drafter) -> Iterator[None]:
        with ExitStack() as stack:
            for path, value in changes:
                *parents, name = path.split(".")
                holder: Any = drafter.get_submodule(".".join(parents))
                old = getattr(holder, name)
                if isinstance(old, nn.Parameter):
                    value = nn.Parameter(value.to(old), requires_grad=False)
                stack.callback(setattr, holder, name, old)
                setattr(holder, name, value)
            yield

    return change


def _configured(**values: Any) -> Change:
    """Values of the drafter's configuration, which its attention has too."""

    @contextmanager
    def change(drafter: Drafter) -> Iterator[None]:
        config = replace(drafter.config, **values)
        names = [name for name, m in drafter.named_modules() if hasattr(m, "config")]
        with _with(*((f"{name}.config".lstrip("."), config) for name in names))(drafter):
            yield

    return change
