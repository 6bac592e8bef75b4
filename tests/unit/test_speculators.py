"""Our drafter against speculators' Eagle3DraftModel with the same weights, and its file format."""

import json
from pathlib import Path

import pytest
import torch

from eagle3 import speculators_format
from eagle3.batch import Batch
from eagle3.drafter import Drafter
from eagle3.errors import UserError
from eagle3.loss import Teacher
from eagle3.target import Target
from eagle3.ttt import TTTModel, supervised_rows, unroll
from tests.unit.naive import naive_logits
from tests.unit.test_export import AUX, target_drafter
from training.export import check

STEPS = 3


def load(folder: Path) -> torch.nn.Module:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel.from_pretrained(folder, config=config).float().eval()


def one_turn(drafter: Drafter, rows: int = 40, prompt: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(3)
    size = drafter.config.hidden_size
    return Batch(
        input_ids=torch.randint(0, drafter.config.vocab_size, (rows,), generator=generator),
        loss_mask=torch.arange(rows) >= prompt,
        doc_starts=torch.tensor([0, rows]),
        aux=torch.randn(rows, 3 * size, generator=generator),
        final=torch.randn(rows, size, generator=generator),
        final_index=torch.arange(rows),
    )


def their_forward(model: torch.nn.Module, batch: Batch, mask: torch.Tensor | None = None) -> list:
    """Logits of each step, and the result; their rows are (x_{t+1}, h_t, y_{t+1})."""
    seen = []
    handle = model.lm_head.register_forward_hook(lambda _m, _i, output: seen.append(output[0]))
    rows = batch.num_rows - 1
    result = model(
        hidden_states=batch.aux[:-1][None],
        input_ids=batch.input_ids[1:][None],
        document_ids=torch.zeros(1, rows, dtype=torch.long),
        loss_mask=None if mask is None else mask[None],
        position_ids=torch.arange(1, rows + 1)[None],
        verifier_last_hidden_states=None if mask is None else batch.final[1:][None],
        ttt_steps=STEPS,
    )
    handle.remove()
    return [seen, result]


@pytest.mark.parametrize(
    "options",
    [
        {}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}, {"num_layers": 3},
        {"size": 2048},
    ],
)  # fmt: skip
def test_logits_of_every_step_are_the_same(target: Target, tmp_path: Path, options: dict) -> None:
    drafter = target_drafter(target, **options)
    speculators_format.save(drafter, tmp_path, target, AUX, STEPS)
    batch = one_turn(drafter)
    with torch.no_grad():
        theirs, _ = their_forward(load(tmp_path), batch)
        naive = naive_logits(drafter, batch, STEPS)
        for k, step in enumerate(unroll(drafter, batch, STEPS)):
            assert len(step.rows) > 20
            found = drafter.lm_head(step.states)
            torch.testing.assert_close(found, theirs[k][step.rows], rtol=1e-4, atol=1e-4)
            # their mask lets later rows see what ours does at every row whose tokens exist
            whole = slice(0, batch.num_rows - 1 - k)
            torch.testing.assert_close(naive[k][whole], theirs[k][whole], rtol=1e-4, atol=1e-4)


def test_loss_is_the_same_where_the_definitions_meet(target: Target, tmp_path: Path) -> None:
    """Theirs is KL, ours cross-entropy: they differ by the teacher's entropy."""
    from speculators.losses.eager import kl_div_loss

    drafter = target_drafter(target)
    speculators_format.save(drafter, tmp_path, target, AUX, STEPS)
    batch = one_turn(drafter)
    model = TTTModel(drafter, Teacher(target.lm_head(), drafter.vocab), [1.0] * STEPS)
    with torch.no_grad():
        theirs, _ = their_forward(load(tmp_path), batch)
        rows = supervised_rows(batch, STEPS)
        output = model(batch, 1.0 / rows, score=False)
        teacher = (batch.final @ target.lm_head().T)[:, drafter.vocab.target_ids]
        for k, step in enumerate(unroll(drafter, batch, STEPS)):
            p = teacher[step.rows + 1 + k]
            kl = kl_div_loss(theirs[k][step.rows][None], p[None])
            entropy = torch.distributions.Categorical(logits=p).entropy()
            found = output.step_loss[k] - entropy.sum()
            torch.testing.assert_close(kl.sum().reshape(()), found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_their_loader_reads_back_every_tensor(
    target: Target, tmp_path: Path, num_layers: int
) -> None:
    drafter = target_drafter(target, fc_norm=True, num_layers=num_layers)
    speculators_format.save(drafter, tmp_path, target, AUX, STEPS)
    model = load(tmp_path)
    found = model.state_dict()
    for name, tensor in drafter.state_dict().items():
        theirs = name.replace("midlayer.", "layers.0.")
        theirs = theirs.replace("layers.1.hidden_norm", "layers.1.input_layernorm")
        assert torch.equal(found[theirs], tensor), name
    assert model.config.eagle_aux_hidden_state_layer_ids == AUX
    assert model.config.transformer_layer_config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 3}, {"fc_norm": True, "norm_output": True}, {"size": 2048}]
)
def test_round_trip_is_bit_equal(target: Target, tmp_path: Path, options: dict) -> None:
    drafter = target_drafter(target, **options)
    speculators_format.save(drafter, tmp_path, target, AUX, STEPS)
    again, aux_layers = speculators_format.load(tmp_path, target)
    assert again.config == drafter.config and aux_layers == AUX
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert check(tmp_path) == 0
    found = speculators_format.load_vocab(tmp_path, target.vocab_size)
    assert torch.equal(found.target_ids, drafter.vocab.target_ids)


def test_a_whole_vocabulary_in_another_order_is_refused(target: Target, tmp_path: Path) -> None:
    """There are no maps to say it in."""
    drafter = target_drafter(target, size=2048)
    drafter.d2t[0], drafter.d2t[1] = 1, -1
    with pytest.raises(UserError, match="export.speculators=false"):
        speculators_format.save(drafter, tmp_path, target, AUX, STEPS)


def test_a_drafter_that_speculators_made_is_understood(target: Target, tmp_path: Path) -> None:
    """Its whole vocabulary, without maps, and its default layers; nothing of ours wrote it."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import LlamaConfig

    shape = {k: target.config[k] for k in ("hidden_size", "vocab_size", "intermediate_size")}
    layer = LlamaConfig(
        **shape, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=shape["vocab_size"]
    )
    model = Eagle3DraftModel(config)
    torch.nn.init.normal_(model.lm_head.weight)  # it would come from the target
    model.save_pretrained(str(tmp_path))
    drafter, aux_layers = speculators_format.load(tmp_path, Deeper(folder=target.folder))
    assert aux_layers == [2, 15, 27] and drafter.config.num_layers == 2
    assert drafter.config.rope_theta == 5e5 and drafter.vocab.size == shape["vocab_size"]
    assert torch.equal(drafter.layers["1"].mlp.up_proj.weight, model.layers[1].mlp.up_proj.weight)


class Deeper(Target):
    """A target with room for speculators' default layers."""

    num_layers = 30


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"speculators_model_type": "dflash"}, "dflash"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"embed_requires_grad": True}, "embeddings of its own"),
        ({"fc_norm": True}, "missing tensor fc_norm.0.weight"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "qwen3"),
        ({"transformer_layer_config": {"hidden_act": "gelu"}}, "activation is gelu"),
        ({"transformer_layer_config": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"transformer_layer_config": {"rope_parameters": {"rope_type": "yarn"}}},
            "rope_type yarn",
        ),
        ({"draft_vocab_size": 300}, "lm_head.weight is"),
    ],
)
def test_a_drafter_that_ours_cannot_be_is_refused(
    target: Target, tmp_path: Path, changes: dict, problem: str
) -> None:
    speculators_format.save(target_drafter(target), tmp_path, target, AUX, STEPS)
    data = json.loads((tmp_path / "config.json").read_text())
    for key, value in changes.items():
        data[key] = data[key] | value if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=problem):
        speculators_format.load(tmp_path, target)
    assert check(tmp_path) == 2
