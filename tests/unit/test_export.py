import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3 import export
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import UserError
from eagle3.manifest import Manifest
from eagle3.target import Target
from eagle3.vocab import DraftVocab

AUX = [1, 3, 4]


def target_drafter(target: Target, **options: object) -> Drafter:
    torch.manual_seed(0)
    config = DrafterConfig.for_target(target.config, 3, draft_vocab_size=256, **options)
    vocab = DraftVocab.build(torch.randint(0, 99, (target.vocab_size,)), 256)
    return Drafter.fresh(config, vocab, target.embeddings(), target.lm_head())


def write(
    target: Target, folder: Path, dtype: torch.dtype = torch.float32, **options: object
) -> Drafter:
    drafter = target_drafter(target, **options)
    export.save_sglang(drafter, folder, target, AUX, dtype, Manifest(kind="drafter", match={}))
    return drafter


@pytest.mark.parametrize(
    "options",
    [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}, {"num_layers": 3}],
)
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
        ({"rope_theta": 5.0}, "rope_theta"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
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


def test_the_names_of_newer_checkpoints_are_understood(target: Target, tmp_path: Path) -> None:
    drafter = write(target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    again, _ = export.load_sglang(tmp_path, target)
    assert torch.equal(again.midlayer.mlp.up_proj.weight, drafter.midlayer.mlp.up_proj.weight)


def test_a_small_mla_target_gets_a_head() -> None:
    target = dict(hidden_size=64, intermediate_size=160, kv_lora_rank=16, vocab_size=100)
    target |= dict(max_position_embeddings=512, rms_norm_eps=1e-6)
    config = DrafterConfig.for_target(target, 3, draft_vocab_size=50)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (1, 1, 128)
