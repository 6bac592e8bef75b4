"""From Hydra's words to a Config: the schema it composes by, the one place where its DictConfig
becomes dataclasses, and its complaints in ours."""

from __future__ import annotations

import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from eagle3 import checks
from eagle3.config import Config, ExpectConfig, TargetShape
from eagle3.errors import UserError

CONF = Path(__file__).resolve().parents[1] / "conf"
COMPLAINTS = (HydraException, OmegaConfBaseException, YAMLError)

APPEND = "\nTo append to your config"
"""Hydra's advice for an unknown key; no use where the schema has no such field."""
DETAILS = re.compile(r"\n +(full_key|reference_type|object_type)[:=].*")
REMEDIES = {
    re.compile(r"In '(\w+)/.*': ConfigKeyError .*\nKey '\1' not in 'Config'"): (
        "Is the file's first line `# @package _global_`?"
    ),
    re.compile("dict is not a subclass of BenchmarkConfig"): (
        "Give all of it at once: '+benchmark={mine: {path: prompts.jsonl, limit: 80}}'"
    ),
    re.compile("Config group override must be"): (
        "What has a folder in conf/ (target, server, deepspeed, ...) is never null: leave it out"
    ),
}
"""How a complaint reads -> what to do, where it does not say itself."""

OPTIONAL = {"target.shape": TargetShape, "extract.expect": ExpectConfig}
"""Parts that are None as long as nothing of them is set."""


def register() -> None:
    """Tell Hydra the schema.

    OmegaConf can set values in a part that is there, not in one that is None.
    """
    schema = OmegaConf.structured(Config)
    for key, part in OPTIONAL.items():
        OmegaConf.update(schema, key, part)
    ConfigStore.instance().store(name="schema", node=schema)


def from_dict_config(composed: DictConfig) -> Config:
    """Resolve and check a composed configuration.

    Raises:
        UserError: a required value is missing or a value does not fit; names the key.
    """
    try:
        for key, part in OPTIONAL.items():
            if OmegaConf.select(composed, key) == OmegaConf.structured(part):
                OmegaConf.update(composed, key, None)
        missing = OmegaConf.missing_keys(composed)
        if missing:
            raise UserError(f"required configuration values are missing: {sorted(missing)}")
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {error.full_key}: {_reason(error)}") from error
    except AttributeError as error:  # Hydra's + adds any key, and a dataclass takes none
        raise UserError(
            f"configuration: {error}: + only adds what has no fixed names, as server.args"
        ) from error
    assert isinstance(config, Config)
    checks.require(config)
    return config


def complaints() -> tuple[type[Exception], ...]:
    """What Hydra raises for what it was given, before it runs a command.

    Where it runs a sweep's jobs, perhaps in other processes, a job may have raised the last two.
    """
    sweeps = {"-m", "--multirun"} & {*sys.argv}
    refused = {"-c", "--cfg", "-i", "--info", "-r", "--run"} & {*sys.argv}  # beside a sweep
    return COMPLAINTS if sweeps and not refused else (*COMPLAINTS, ValueError, OSError)


def in_words(error: BaseException) -> str:
    """One of `complaints` with where it is from and a remedy."""
    text = _reason(error)
    if isinstance(error, UnicodeDecodeError):
        text = f"{_not_utf8() or 'a configuration file'} is not UTF-8: {text}"
    if isinstance(error, OverrideParseException):
        text = f"{error.override}: {text}"
    if isinstance(cause := error.__cause__, OmegaConfBaseException):
        text = f"{text.partition(APPEND)[0]}\n{cause.full_key}: {_reason(cause)}"
        if known := _known(cause):
            text += f"\nIt has: {', '.join(known)}"
        elif APPEND in str(error):
            text += APPEND + str(error).partition(APPEND)[2]
    return "\n".join([text, *(remedy for sign, remedy in REMEDIES.items() if sign.search(text))])


def _not_utf8() -> str:
    """Files of conf/ that are not; the error does not say which it was."""
    found = []
    for path in sorted(CONF.rglob("*.yaml")):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            found.append(str(path))
    return ", ".join(found)


def _reason(error: BaseException) -> str:
    return DETAILS.sub("", str(error))


def _known(error: OmegaConfBaseException) -> list[str]:
    """Fields of the part of the schema that a value was to be put in the place of, or that lacks
    the key."""
    key = isinstance(error, ConfigKeyError | ConfigAttributeError)
    node = error.parent_node if key else error.child_node
    part = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
    return [field.name for field in fields(part)] if is_dataclass(part) else []
