"""A drafter folder of either format: its two files, and what can be wrong with its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import UserError
from eagle3.manifest import read_json

WEIGHTS = "model.safetensors"
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError)
"""What a config.json with missing values or values of other types makes its readers raise."""


def load_config(folder: Path) -> dict[str, Any]:
    """config.json of a drafter folder.

    Raises:
        UserError: there is none, or it is not JSON.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no drafter: no config.json")
    return read_json(path, "export the drafter again")


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a drafter folder, by the names they have there.

    Raises:
        UserError: their file is missing or damaged.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(
            f"{folder} has no {WEIGHTS}: weights in several files, or in another form, have to be "
            "made this one"
        )
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged, or not readable for this user: {error}") from error


def with_maps(tensors: dict[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """A drafter of the whole vocabulary may come without maps: token i is token i then."""
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
    return tensors


def refuse(folder: Path, found: list[str]) -> None:
    """Raise UserError if a drafter folder has problems."""
    if found:
        raise UserError(f"the drafter in {folder} cannot be used:\n  " + "\n  ".join(found))


def unreadable(error: Exception) -> str:
    """One of UNREADABLE, in words."""
    if isinstance(error, KeyError):
        return f"config.json has no {error.args[0]}"
    return f"config.json: {error}" if isinstance(error, UserError) else f"config.json: {error!r}"


def tensor_problems(config: DrafterConfig, tensors: dict[str, Tensor]) -> list[str]:
    """What is missing, extra, misshaped or implausible; the embeddings are the target's affair."""
    found = []
    with torch.device("meta"):
        expected = Drafter(config).state_dict()
    for name, like in expected.items():
        if name.startswith("embed_tokens."):
            continue
        if name not in tensors:
            found.append(f"missing tensor {name}")
        elif tensors[name].shape != like.shape:
            found.append(f"{name} is {list(tensors[name].shape)}, not {list(like.shape)}")
        else:
            found += _value_problems(name, tensors[name])
    found += [f"extra tensor {n}" for n in tensors.keys() - expected.keys()]
    if not found:
        found += _vocab_problems(tensors["d2t"], tensors["t2d"])
    return found


def _value_problems(name: str, tensor: Tensor) -> list[str]:
    if name in ("d2t", "t2d"):
        if tensor.is_floating_point() or tensor.is_complex():
            return [f"{name} is {tensor.dtype}, not of whole numbers"]
    elif tensor.dtype not in FLOATS:
        return [f"{name} is {tensor.dtype}, not floating-point"]
    elif not torch.isfinite(tensor).all():
        return [f"{name} is not finite"]
    elif not tensor.any():
        return [f"{name} is all zero"]
    return []


def _vocab_problems(d2t: Tensor, t2d: Tensor) -> list[str]:
    ids = d2t.long() + torch.arange(d2t.numel())
    if ids.min() < 0 or ids.max() >= t2d.numel() or ids.unique().numel() != ids.numel():
        return ["d2t does not give distinct target ids"]
    mask = torch.zeros_like(t2d, dtype=torch.bool)
    mask[ids] = True
    return [] if torch.equal(mask, t2d.bool()) else ["t2d disagrees with d2t"]
