"""Our drafter against speculators' Eagle3DraftModel with the same weights, and its file format."""

from pathlib import Path

import pytest
import torch

from eagle3 import export
from eagle3.batch import Batch
from eagle3.drafter import Drafter
from eagle3.loss import Teacher
from eagle3.target import Target
from eagle3.ttt import TTTModel, supervised_rows, unroll
from tests.unit.naive import naive_logits
from tests.unit.test_export import AUX, target_drafter

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
    "options", [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}]
)
def test_logits_of_every_step_are_the_same(target: Target, tmp_path: Path, options: dict) -> None:
    drafter = target_drafter(target, **options)
    export.save_speculators(drafter, tmp_path, target, AUX, STEPS)
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
    export.save_speculators(drafter, tmp_path, target, AUX, STEPS)
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


def test_their_loader_reads_back_every_tensor(target: Target, tmp_path: Path) -> None:
    drafter = target_drafter(target, fc_norm=True)
    export.save_speculators(drafter, tmp_path, target, AUX, STEPS)
    model = load(tmp_path)
    found = model.state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(found[name.replace("midlayer.", "layers.0.")], tensor), name
    assert model.config.eagle_aux_hidden_state_layer_ids == AUX
    assert model.config.transformer_layer_config.rope_parameters["rope_theta"] == 10000.0
