"""A target whose files are not whole is a user's mistake, told with what to fetch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.config import TargetConfig
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


@pytest.mark.parametrize("layer", [0, 3])
def test_an_adapter_merged_into_the_layers_makes_another_target(folder: Path, layer: int) -> None:
    """Whose embeddings are the same; states of both must not come into one store."""
    before = Target.resolve(str(folder)).identity()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert Target.resolve(str(folder)).identity() == before
    for name in ("q_proj", "v_proj"):
        weight = tensors[f"model.layers.{layer}.self_attn.{name}.weight"]
        down, up = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
        weight += (1e-2 * up @ down).to(weight.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    after = Target.resolve(str(folder)).identity()
    assert {key for key in before if before[key] != after[key]} == {"weights"}


@pytest.mark.parametrize("name", ["merges.txt", "tokenizer.model"])
def test_a_tokenizer_without_tokenizer_json_is_known_by_its_other_files(
    folder: Path, name: str
) -> None:
    (folder / name).write_text("a b\n")
    before = Target.resolve(str(folder)).identity()
    (folder / name).write_text("a c\n")
    assert Target.resolve(str(folder)).identity() == before  # nothing reads it beside the other
    (folder / "tokenizer.json").unlink()
    changed = Target.resolve(str(folder)).identity()
    (folder / name).write_text("a b\n")
    again = Target.resolve(str(folder)).identity()
    assert {key for key in again if again[key] != changed[key]} == {"tokenizer"}


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


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize("text", ["{", "[]", POINTER])
def test_a_file_that_is_not_the_json_it_should_be(folder: Path, name: str, text: str) -> None:
    if name == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / name).write_text(text)
    told = rf"{name} is damaged, not (JSON|a JSON object).*fetch|cannot be loaded: .*[Ff]etch"
    with pytest.raises(UserError, match=f"(?s){told}"):
        target = Target.resolve(str(folder))
        target.identity(), target.eos_ids, target.tokenizer  # noqa: B018


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {}}'])
def test_a_damaged_weight_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    identity_refused(
        folder, r"index\.json (is damaged, not JSON|names no weights).*fetch the target again"
    )


def test_a_config_json_without_a_size(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["X"], "hidden_size": 8}')
    with pytest.raises(UserError, match=r"no \['num_hidden_layers', 'vocab_size'\]"):
        Target.from_config(TargetConfig(path=str(folder)))


def test_files_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(UserError, match=r"config\.json cannot be read: Permission denied"):
        _ = Target.resolve(str(folder)).architecture
    monkeypatch.undo()
    monkeypatch.setattr("safetensors.safe_open", denied)
    identity_refused(folder, "not readable for this user")
