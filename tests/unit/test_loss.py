import pytest
import torch

from eagle3 import loss
from eagle3.loss import LOSSES, Teacher, lm_head_loss, loss_reference
from eagle3.vocab import DraftVocab


@pytest.mark.parametrize("kind", sorted(LOSSES))
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_fused_equals_reference(rows: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_ROWS", 16)
    torch.manual_seed(0)
    hidden = torch.randn(rows, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 24, dtype=torch.float64, requires_grad=True)
    teacher_logits = torch.randn(rows + 5, 50, dtype=torch.float64)
    teacher_rows = torch.randperm(rows + 5)[:rows]
    summed, top1, _ = lm_head_loss(hidden, weight, teacher_logits, teacher_rows, kind)
    expected = loss_reference(hidden, weight, teacher_logits[teacher_rows], kind)
    torch.testing.assert_close(summed, expected, rtol=1e-12, atol=0)
    assert torch.equal(top1, (hidden @ weight.T).argmax(-1))
    found = torch.autograd.grad(3.0 * summed, (hidden, weight))
    wanted = torch.autograd.grad(3.0 * expected, (hidden, weight))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_rows_weigh_what_they_should(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the loss of one row after another; the sum without weights is what it was."""
    monkeypatch.setattr(loss, "CHUNK_ROWS", 4)
    torch.manual_seed(0)
    hidden = torch.randn(9, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 24, dtype=torch.float64, requires_grad=True)
    teacher_logits = torch.randn(9, 50, dtype=torch.float64)
    row_weights = torch.tensor([0.5, 2.0, 1.0, 1e-6, 1e6, 0.25, 1.0, 3.0, 1.5])
    rest = weight, teacher_logits, torch.arange(9), kind
    summed, _, plain = lm_head_loss(hidden, *rest, row_weights)
    assert torch.equal(plain, lm_head_loss(hidden, *rest)[0]) and not plain.requires_grad
    expected = torch.zeros((), dtype=torch.float64)
    for i, factor in enumerate(row_weights.double()):
        one = slice(i, i + 1)
        expected = expected + factor * loss_reference(
            hidden[one], weight, teacher_logits[one], kind
        )
    torch.testing.assert_close(summed, expected, rtol=1e-12, atol=0)
    found = torch.autograd.grad(summed, (hidden, weight))
    wanted = torch.autograd.grad(expected, (hidden, weight))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_bf16_gradients_are_within_one_percent_of_float64(kind: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(256, 64).bfloat16(), (torch.randn(512, 64) / 8).bfloat16()
    teacher_logits = hidden.float() @ weight.float().T + 0.7 * torch.randn(256, 512)
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    expected = torch.autograd.grad(loss_reference(*exact, teacher_logits.double(), kind), exact)
    rounded = [t.requires_grad_() for t in (hidden, weight)]
    summed, _, _ = lm_head_loss(*rounded, teacher_logits, torch.arange(256), kind)
    for found, wanted in zip(torch.autograd.grad(summed, rounded), expected, strict=True):
        assert (found.double() - wanted).norm() < 0.01 * wanted.norm()


def test_teacher_top1_counts_tokens_outside_the_draft_vocabulary_as_rejections() -> None:
    torch.manual_seed(0)
    lm_head, final = torch.randn(40, 8), torch.randn(200, 8)
    vocab = DraftVocab(target_ids=torch.arange(0, 40, 2), vocab_size=40)
    rows = Teacher(lm_head, vocab)(final, top1=True)
    best = (final @ lm_head.T).argmax(-1)
    assert torch.equal(rows.top1, vocab.draft_index[best])
    assert (rows.top1 == -1).any() and (rows.top1 >= 0).any()
    torch.testing.assert_close(rows.logits, final @ lm_head[::2].T)


def test_the_teacher_is_not_rounded() -> None:
    torch.manual_seed(0)
    lm_head, final = torch.randn(40, 8).bfloat16(), torch.randn(20, 8).bfloat16()
    teacher = Teacher(lm_head, DraftVocab(target_ids=torch.arange(40), vocab_size=40))
    found = teacher(final, top1=False).logits
    torch.testing.assert_close(found, final.float() @ lm_head.float().T)


def test_a_whole_vocabulary_teacher_has_nothing_outside() -> None:
    lm_head = torch.randn(10, 4)
    vocab = DraftVocab(target_ids=torch.arange(10), vocab_size=10)
    assert (Teacher(lm_head, vocab)(torch.randn(5, 4), top1=True).top1 >= 0).all()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("tv", "tv_loss"), ("log_acceptance", "neg_log_acceptance_loss"), ("hard_ce", "ce_loss")],
)
def test_losses_are_those_of_speculators(ours: str, theirs: str) -> None:
    from speculators.losses import eager

    torch.manual_seed(0)
    logits, teacher = torch.randn(1, 40, 30) * 2, torch.randn(1, 40, 30) * 2
    expected = getattr(eager, theirs)(logits, teacher).flatten()
    found = LOSSES[ours](teacher[0].softmax(-1), logits[0].log_softmax(-1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_every_loss_is_least_where_the_drafter_agrees(kind: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 20) * 3
    p = logits.softmax(-1)
    other = (logits + torch.randn(5, 20)).log_softmax(-1)
    agreeing = logits.log_softmax(-1) if kind != "hard_ce" else (100 * logits).log_softmax(-1)
    assert (LOSSES[kind](p, agreeing) < LOSSES[kind](p, other)).all()


def test_a_teacher_speaks_a_vocabulary_in_any_order() -> None:
    """A drafter of another origin may number its tokens otherwise."""
    torch.manual_seed(0)
    lm_head, final = torch.randn(9, 4), torch.randn(7, 4)
    vocab = DraftVocab(target_ids=torch.tensor([5, 0, 7, 2]), vocab_size=9)
    taught = Teacher(lm_head, vocab)(final, top1=True)
    everything = final @ lm_head.T
    torch.testing.assert_close(taught.logits, everything[:, vocab.target_ids])
    assert taught.top1 is not None
    assert torch.equal(taught.top1, vocab.draft_index[everything.argmax(dim=-1)])
