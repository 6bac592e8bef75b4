import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3 import export, speculators_format
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.target import Target
from eagle3.vocab import DraftVocab
from training.export import check

AUX = [1, 3, 4]


def target_drafter(target: Target, size: int = 256, **options: Any) -> Drafter:
    """size: of the draft vocabulary."""
    torch.manual_seed(0)
    config = DrafterConfig.for_target(target.config, 3, draft_vocab_size=size, **options)
    vocab = DraftVocab.build(torch.randint(0, 99, (target.vocab_size,)), size)
    return Drafter.fresh(config, vocab, target.embeddings(), target.lm_head())


def write(
    target: Target, folder: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> Drafter:
    drafter = target_drafter(target, **options)
    export.save_sglang(drafter, folder, target, AUX, dtype, Manifest(kind="drafter", match={}))
    return drafter


@pytest.mark.parametrize(
    "options",
    [
        {}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}, {"num_layers": 3},
        {"size": 2048},
    ],
)  # fmt: skip
def test_round_trip_is_bit_equal(target: Target, tmp_path: Path, options: dict) -> None:
    drafter = write(target, tmp_path, **options)
    again, aux_layers = export.load_sglang(tmp_path, target)
    assert again.config == drafter.config and aux_layers == AUX
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_config_says_everything_a_server_needs(target: Target, tmp_path: Path) -> None:
    write(target, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]  # SGLang adds 1
    assert data["rope_theta"] == data["rope_parameters"]["rope_theta"] == 10000.0
    assert data["max_position_embeddings"] >= target.config["max_position_embeddings"]
    assert data["head_dim"] == 64 and data["draft_vocab_size"] == 256
    assert not data["tie_word_embeddings"]


def damage_tensor(folder: Path, name: str, value: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("lm_head.weight", None, "missing tensor lm_head.weight"),
        ("midlayer.self_attn.q_norm.weight", torch.ones(64), "extra tensor"),
        ("fc.weight", torch.ones(128, 5), "not \\[128, 384\\]"),
        ("norm.weight", torch.full((128,), torch.nan), "not finite"),
        ("midlayer.mlp.up_proj.weight", torch.zeros(384, 128), "all zero"),
        ("d2t", torch.zeros(256, dtype=torch.int64), "t2d disagrees"),
        ("d2t", torch.arange(256), "t2d disagrees|distinct"),
        ("d2t", -torch.arange(256), "distinct"),
        ("d2t", torch.zeros(256), "d2t is torch.float32"),
        ("fc.weight", torch.ones(128, 384, dtype=torch.int8), "fc.weight is torch.int8"),
        ("fc.weight", torch.ones(128, 384).to(torch.float8_e4m3fn), "fc.weight is torch.float8"),
    ],
)
def test_damaged_tensors_are_named(
    target: Target, tmp_path: Path, name: str, value, problem: str
) -> None:
    write(target, tmp_path)
    damage_tensor(tmp_path, name, value)
    with pytest.raises(UserError, match=problem):
        export.load_sglang(tmp_path, target)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"eagle_config": {}}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}}, "not distinct"),
        ({"eagle_config": ["ids"]}, "config.json: AttributeError"),
        ({"norm_before_fc": True}, "norm_before_fc disagrees"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": "128"}, "hidden_size is '128'"),
        ({"num_hidden_layers": None}, "num_layers is None"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": None}, "k_proj.weight is [64, 256], not [128, 256]"),
        ({"rope_theta": 5.0}, "rope_theta"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"bias": True}, "bias would add"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_type default"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "does not divide hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"num_hidden_layers": 2}, "missing tensor layers.1.self_attn.q_proj"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type llama3"),
        ({"num_aux_hidden_states": 4}, "disagrees"),
        ({"draft_vocab_size": 300}, "lm_head.weight is"),
        ({"head_dim": 32}, "q_proj"),
    ],
)
def test_wrong_configs_are_named(
    target: Target, tmp_path: Path, changes: dict, problem: str
) -> None:
    write(target, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert any(problem in p for p in export.problems(tmp_path))


def test_a_missing_value_is_named(target: Target, tmp_path: Path) -> None:
    write(target, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    del data["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert export.problems(tmp_path) == ["config.json has no intermediate_size"]


def test_a_whole_vocabulary_needs_no_maps(target: Target, tmp_path: Path) -> None:
    """SGLang serves such a drafter; with fewer tokens it would not know which they are."""
    write(target, tmp_path, size=2048)
    damage_tensor(tmp_path, "d2t", None)
    damage_tensor(tmp_path, "t2d", None)
    again, _ = export.load_sglang(tmp_path, target)
    assert torch.equal(again.vocab.target_ids, torch.arange(2048)) and again.t2d.all()
    assert torch.equal(export.load_vocab(tmp_path, 2048).target_ids, torch.arange(2048))


def test_weights_beside_the_weights_are_a_problem(target: Target, tmp_path: Path) -> None:
    write(target, tmp_path)
    save_file({"fc.weight": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    (found,) = export.problems(tmp_path)
    assert found.startswith("model-00001-of-00002.safetensors beside")


@pytest.mark.parametrize("form", ["sglang", "speculators"])
@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("model.safetensors", b"", "is damaged"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "is damaged"),
        ("model.safetensors", None, "has no model.safetensors"),
        ("config.json", b'{"architectures":', "is damaged, not JSON"),
        ("config.json", b"[]", "is damaged, not a JSON object"),
        ("config.json", None, "no config.json"),
    ],
)
def test_check_tells_of_a_damaged_file(
    target: Target, tmp_path: Path, capsys, form: str, name: str, content: bytes | None, told: str
) -> None:
    if form == "sglang":
        write(target, tmp_path)
    else:
        speculators_format.save(target_drafter(target), tmp_path, target, AUX, 3)
    assert check(tmp_path) == 0
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert check(tmp_path) == 2
    assert told in capsys.readouterr().out


def test_the_names_of_newer_checkpoints_are_understood(target: Target, tmp_path: Path) -> None:
    drafter = write(target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    again, _ = export.load_sglang(tmp_path, target)
    assert torch.equal(again.midlayer.mlp.up_proj.weight, drafter.midlayer.mlp.up_proj.weight)


def test_a_target_that_leaves_its_key_value_heads_open(target: Target) -> None:
    config = {**target.config, "num_key_value_heads": None, "head_dim": None}
    shape = DrafterConfig.for_target(config, 3, draft_vocab_size=50)
    assert shape.num_key_value_heads == shape.num_attention_heads


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "found"),
    [(5120, 96, 8, (40, 8)), (4096, 96, 8, (32, 8)), (4096, 32, 8, (32, 8)), (300, 7, 7, (2, 2))],
)
def test_heads_divide_the_hidden_size(
    hidden: int, heads: int, kv_heads: int, found: tuple[int, int]
) -> None:
    """transformers refuses the config.json of others, in the server and in speculators' export."""
    target = {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": 128, "intermediate_size": 64, "vocab_size": 100,
        "max_position_embeddings": 64,
    }  # fmt: skip
    config = DrafterConfig.for_target(target, 3, draft_vocab_size=50)
    assert (config.num_attention_heads, config.num_key_value_heads) == found
    assert config.head_dim == 128
    with pytest.raises(UserError, match="draft.num_attention_heads=11 must divide"):
        DrafterConfig.for_target(
            target, 3, draft_vocab_size=50, num_attention_heads=11, num_key_value_heads=1
        )
    for name in ("num_attention_heads", "intermediate_size", "max_position_embeddings"):
        with pytest.raises(UserError, match=name):
            DrafterConfig.for_target({**target, name: None}, 3, draft_vocab_size=50)


def test_a_small_mla_target_gets_a_head() -> None:
    target = dict(hidden_size=64, intermediate_size=160, kv_lora_rank=16, vocab_size=100)
    target |= dict(max_position_embeddings=512, rms_norm_eps=1e-6)
    config = DrafterConfig.for_target(target, 3, draft_vocab_size=50)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (1, 1, 128)


@pytest.mark.parametrize("step", ["save_file", "write_json"])
def test_a_kill_amid_an_export_leaves_no_manifest_of_another_drafter(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    write(target, tmp_path)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export, step, killed)
        write(target, tmp_path, norm_output=True)
    with pytest.raises(UserError, match="run `export` first"):
        Manifest.load(tmp_path, export.KIND)
    write(target, tmp_path)
    assert export.problems(tmp_path) == []
