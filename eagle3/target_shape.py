"""The few facts of a target that planning needs, without its weights and without a network."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3.config import TargetConfig, TargetShape
from eagle3.errors import UserError
from eagle3.manifest import read_json

FETCH = "fetch the target again"
"""Remedy for a file of the target's folder."""


def load(path: Path) -> dict[str, Any]:
    """Contents of a target's config.json.

    Raises:
        UserError: it is none.
    """
    data = read_json(path, FETCH)
    if not data.get("architectures"):
        raise UserError(f"{path} names no architecture: it is not a language model's")
    return data


def from_json(data: dict[str, Any]) -> TargetShape:
    """From the contents of a config.json; multi-modal models nest the language model's.

    Raises:
        UserError: a size is missing.
    """
    text = {**data, **data.get("text_config", {})}
    sizes = ("hidden_size", "num_hidden_layers", "vocab_size")
    if missing := [size for size in sizes if size not in text]:
        raise UserError(f"the target's config.json has no {missing}: it is no language model's")
    return TargetShape(
        architecture=data["architectures"][0],
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        vocab_size=text["vocab_size"],
    )


def known(config: TargetConfig) -> TargetShape:
    """Shape of a run's target: of its config.json, and where there is none, `target.shape`.

    Looks in the folder, then in the hub's cache, then in `target.shape`, and only then asks the hub
    for config.json (never for weights).

    Raises:
        UserError: none of these has it, or config.json and `target.shape` differ.
    """
    path = _config_json(config, online=False)
    if path is None and config.shape is not None:
        return config.shape
    path = path or _config_json(config, online=True)
    if path is None:
        raise UserError(
            f"target.path={config.path} has no config.json here and the hub does not give it: set "
            "target.shape (architecture, hidden_size, num_layers, vocab_size), or fetch the model"
        )
    found = from_json(load(path))
    require_equal(config, found)
    return found


def require_equal(config: TargetConfig, found: TargetShape) -> None:
    """Raise UserError where `target.shape` is set and is not what config.json says."""
    if config.shape is None:
        return
    wanted, real = asdict(config.shape), asdict(found)
    if differing := [key for key in wanted if wanted[key] != real[key]]:
        raise UserError(
            "; ".join(
                f"target.shape.{key}={wanted[key]}, but config.json of target.path={config.path} "
                f"has {real[key]}"
                for key in differing
            )
            + ". Correct target.path or target.shape (null takes the shape from config.json)"
        )


def _config_json(config: TargetConfig, online: bool) -> Path | None:
    folder = Path(config.path)
    if folder.is_dir():
        path = folder / "config.json"
        return path if path.exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            hf_hub_download(
                config.path, "config.json", revision=config.revision, local_files_only=not online
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return None
