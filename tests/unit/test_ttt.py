from dataclasses import replace

import pytest
import torch

from eagle3 import loss
from eagle3.batch import Batch
from eagle3.loss import LOSSES, Teacher
from eagle3.ttt import TTTModel, supervised_rows, supervised_weight, unroll
from tests.chain_drafter import ChainDrafter
from tests.conftest import laid_out, make_batch, ragged_masks, small_masks, tiny_drafter, weighted
from tests.unit.naive import documents, naive_logits, naive_loss, naive_sums, supervised

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


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_every_loss_equals_the_naive_form(kind: str) -> None:
    drafter, lm_head = tiny_drafter()
    batch = make_batch(small_masks(), drafter.config)
    expected, _, _ = naive_loss(drafter, lm_head, batch, [1.0, 0.7], kind)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0, 0.7], kind)
    output = model(batch, 1.0 / supervised_rows(batch, 2).double(), score=False)
    torch.testing.assert_close(output.loss, expected, rtol=1e-10, atol=0)
    for found, wanted in zip(
        torch.autograd.grad(output.loss, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", sorted(LOSSES))
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}], ids=str)
def test_weighted_documents_equal_the_naive_weighted_mean(options: dict, kind: str) -> None:
    drafter, lm_head = tiny_drafter(**options)
    batch = weighted(make_batch(small_masks(), drafter.config))
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0, 0.7, 0.5], kind)

    def loss_and_gradients(scale: torch.Tensor, of: Batch) -> tuple[torch.Tensor, ...]:
        output = model(of, scale, score=True)
        return output.loss, *torch.autograd.grad(output.loss, parameters)

    expected, counts, accepted = naive_loss(drafter, lm_head, batch, model.step_weights, kind)
    wanted = (expected, *torch.autograd.grad(expected, parameters))
    found = loss_and_gradients(1.0 / supervised_weight(batch, 3), batch)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)
    plain = replace(batch, row_weights=None)
    unweighted = loss_and_gradients(1.0 / supervised_weight(plain, 3), plain)
    assert not torch.allclose(unweighted[1], wanted[1], rtol=0.01)

    # only ratios count; 4 is a power of two, so that not a bit changes
    more = replace(batch, row_weights=4 * batch.row_weights)
    for a, b in zip(loss_and_gradients(1.0 / supervised_weight(more, 3), more), found, strict=True):
        assert torch.equal(a, b)
    # what is reported counts rows
    ones = torch.ones(3, dtype=torch.float64)
    reported, before = model(batch, ones, score=True), model(plain, ones, score=True)
    assert torch.equal(reported.step_loss, before.step_loss)
    assert reported.rows.tolist() == counts and reported.accepted.tolist() == accepted


def test_micro_batches_of_any_cut_add_up_to_the_whole() -> None:
    """Each with the scale of all, as accumulation and ranks have it; some have no weights."""
    drafter, lm_head = tiny_drafter()
    whole = weighted(make_batch(small_masks(), drafter.config))
    parts = [
        replace(part, row_weights=None) if (part.row_weights == 1).all() else part
        for part in documents(whole)
    ]
    assert {part.row_weights is None for part in parts} == {True, False}
    expected, _, _ = naive_loss(drafter, lm_head, whole, [1.0, 0.7])
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0, 0.7])
    scale = 1.0 / sum(supervised_weight(part, 2) for part in parts)
    total = sum(model(part, scale, score=False).loss for part in parts)
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=0)
    for found, wanted in zip(
        torch.autograd.grad(total, parameters), torch.autograd.grad(expected, parameters),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


def test_the_weight_of_a_step_is_that_of_its_supervised_rows() -> None:
    drafter, _ = tiny_drafter()
    batch = make_batch(small_masks(), drafter.config)
    rows = supervised_rows(batch, 9).double()
    assert torch.equal(supervised_weight(batch, 9), rows) and rows[-1] == 0
    batch = weighted(batch)
    expected = [sum(batch.row_weights[supervised(batch, k)].tolist()) for k in range(9)]
    assert supervised_weight(batch, 9).tolist() == expected
    batch.layout = laid_out(batch)
    assert supervised_weight(batch, 9).tolist() == expected


LENGTHS = [
    [1], [0, 1], [1, 1], [0] * 127, [1] * 127, [0] * 90 + [1] * 38, [1] * 129,
]  # fmt: skip
TURNS = [0] * 70 + [1] * 250 + [0] * 30 + [1] * 50


@pytest.mark.parametrize(("num_layers", "repeats"), [(1, 10), (2, 2)])
def test_packed_documents_equal_each_alone_at_awkward_lengths(
    num_layers: int, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1, 2, 127, 128, 129 and 4,000 tokens, masks all 0 and all 1, twenty turns; several chunks."""
    monkeypatch.setattr(loss, "CHUNK_ROWS", 400)
    drafter, lm_head = tiny_drafter(
        num_layers=num_layers, hidden_size=8, num_aux=2, intermediate_size=12, head_dim=8,
        num_attention_heads=1, num_key_value_heads=1, vocab_size=23, draft_vocab_size=17,
    )  # fmt: skip
    batch = make_batch([*LENGTHS, TURNS * repeats], drafter.config)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    sums, counts, accepted = torch.zeros(2, dtype=torch.float64), [0, 0], [0, 0]
    expected_grads = [torch.zeros_like(p) for p in parameters]
    for alone in documents(batch):
        parts, rows, hits = naive_sums(drafter, lm_head, alone, 2)
        sums += torch.stack(parts).detach()
        counts = [a + b for a, b in zip(counts, rows, strict=True)]
        accepted = [a + b for a, b in zip(accepted, hits, strict=True)]
        grads = torch.autograd.grad(parts[0] + 0.5 * parts[1], parameters)
        for total, grad in zip(expected_grads, grads, strict=True):
            total += grad
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0, 0.5])
    output = model(batch, torch.ones(2), score=True)
    assert output.rows.tolist() == counts and min(counts) > 800
    assert output.accepted.tolist() == accepted and accepted[1] > 0
    torch.testing.assert_close(output.step_loss.double(), sums, rtol=1e-6, atol=0)
    for found, wanted in zip(
        torch.autograd.grad(output.loss, parameters), expected_grads, strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)


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


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_worked_example_of_the_documentation(num_layers: int) -> None:
    """Which rows each step supervises, and whose states reach them."""
    drafter, _ = tiny_drafter(num_layers=num_layers)
    batch = make_batch([[0, 0, 1, 1, 1]], drafter.config)
    batch.aux.requires_grad_()
    seen = {}
    for k, step in enumerate(unroll(drafter, batch, 2)):
        for i, t in enumerate(step.rows.tolist()):
            (grad,) = torch.autograd.grad(step.states[i].sum(), batch.aux, retain_graph=True)
            seen[t, k] = grad.abs().sum(dim=1).nonzero().flatten().tolist()
    assert seen == {(1, 0): [0, 1], (2, 0): [0, 1, 2], (1, 1): [0, 1]}


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
