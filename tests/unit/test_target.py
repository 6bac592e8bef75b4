"""A target whose files are not whole is a user's mistake, told with what to fetch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eagle3.errors import UserError
from eagle3.target import Target
from tests.conftest import TINY

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def identity_refused(folder: Path, told: str) -> None:
    with pytest.raises(UserError, match=told):
        Target.resolve(str(folder)).identity()


def test_a_pointer_in_place_of_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text(POINTER)
    identity_refused(folder, r"model\.safetensors is damaged, or a Git LFS pointer")


def test_a_shard_that_is_not_there(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "a.safetensors", "x": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    identity_refused(folder, r"lacks \['a\.safetensors'\]: the download is not complete")


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    identity_refused(folder, r"has no tokenizer_config\.json")


@pytest.mark.parametrize("text", ["{", "{}", '{"architectures": null}', POINTER])
def test_a_config_json_that_is_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json.*(not JSON|names no architecture)"):
        _ = Target.resolve(str(folder)).architecture
