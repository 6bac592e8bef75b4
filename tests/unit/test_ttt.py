import pytest
import torch

from eagle3.decode import ChainDrafter
from eagle3.loss import Teacher
from eagle3.ttt import TTTModel, supervised_rows, unroll
from tests.conftest import make_batch, ragged_masks, tiny_drafter
from tests.unit.naive import naive_logits, naive_loss, supervised

OPTIONS = [
    {}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}, {"num_layers": 2},
    {"num_layers": 3, "norm_output": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_loss_and_every_gradient_equal_the_naive_form(options: dict) -> None:
    drafter, lm_head = tiny_drafter(**options)
    batch = make_batch(ragged_masks(), drafter.config)
    weights = [0.8**k for k in range(5)]
    expected, counts, accepted = naive_loss(drafter, lm_head, batch, weights)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    expected_grads = torch.autograd.grad(expected, parameters)

    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), weights)
    rows = supervised_rows(batch, len(weights))
    output = model(batch, 1.0 / rows.clamp(min=1).double(), score=True)
    grads = torch.autograd.grad(output.loss, parameters)

    assert rows.tolist() == output.rows.tolist() == counts
    assert output.accepted.tolist() == accepted
    torch.testing.assert_close(output.loss, expected, rtol=1e-10, atol=0)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mask", [[0] * 6, [1], [0, 1]])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_batch_with_nothing_supervised_gives_zero_gradients(
    mask: list[int], num_layers: int
) -> None:
    drafter, lm_head = tiny_drafter(num_layers=num_layers)
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0, 0.8])
    output = model(make_batch([mask], drafter.config), torch.ones(2), score=True)
    output.loss.backward()
    assert output.loss.item() == 0 and output.rows.tolist() == [0, 0]
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("options", OPTIONS)
def test_every_step_equals_a_step_by_step_cached_drafter(options: dict) -> None:
    """Step k of the unroll is what a server computes there, at every supervised row."""
    drafter, _ = tiny_drafter(**options)
    batch = make_batch([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1]], drafter.config)
    steps = list(unroll(drafter, batch, 4))
    assert len(steps) == 4
    for k, step in enumerate(steps):
        logits = drafter.lm_head(step.states)
        for i, t in enumerate(step.rows.tolist()):
            chain = ChainDrafter(drafter)
            chain.extend(batch.aux[: t + 1], batch.input_ids[1 : t + 2])
            for j in range(k):  # feed the true tokens, as teacher forcing does, and our own states
                _, fed = drafter.outputs(chain.last_state)
                token = batch.input_ids[t + 2 + j].view(1)
                chain.last_state = chain._layers(fed, token, torch.tensor([t + 1 + j]))
            torch.testing.assert_close(chain.logits(), logits[i], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_pruned_rows_equal_the_full_unroll(num_layers: int) -> None:
    drafter, _ = tiny_drafter(num_layers=num_layers)
    batch = make_batch(ragged_masks(), drafter.config)
    everything = naive_logits(drafter, batch, 3)
    for k, step in enumerate(unroll(drafter, batch, 3)):
        assert step.rows.tolist() == supervised(batch, k)
        found = drafter.lm_head(step.states)
        torch.testing.assert_close(found, everything[k][step.rows], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_drafting_restores_the_cache(num_layers: int) -> None:
    drafter, _ = tiny_drafter(num_layers=num_layers)
    batch = make_batch([[0, 1, 1, 1, 1, 1]], drafter.config)
    chain = ChainDrafter(drafter)
    chain.extend(batch.aux[:3], batch.input_ids[1:4])
    first = chain.draft(4)
    assert chain.draft(4) == first and chain.num_rows == 3
    assert set(first) <= set(drafter.vocab.target_ids.tolist())
