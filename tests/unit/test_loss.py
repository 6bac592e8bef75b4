import pytest
import torch

from eagle3 import loss
from eagle3.loss import Teacher, soft_cross_entropy, soft_cross_entropy_reference
from eagle3.vocab import DraftVocab


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_fused_equals_reference(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_ROWS", 16)
    torch.manual_seed(0)
    hidden = torch.randn(rows, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 24, dtype=torch.float64, requires_grad=True)
    teacher_logits = torch.randn(rows + 5, 50, dtype=torch.float64)
    teacher_rows = torch.randperm(rows + 5)[:rows]
    summed, top1 = soft_cross_entropy(hidden, weight, teacher_logits, teacher_rows)
    expected = soft_cross_entropy_reference(hidden, weight, teacher_logits[teacher_rows])
    torch.testing.assert_close(summed, expected, rtol=1e-12, atol=0)
    assert torch.equal(top1, (hidden @ weight.T).argmax(-1))
    found = torch.autograd.grad(3.0 * summed, (hidden, weight))
    wanted = torch.autograd.grad(3.0 * expected, (hidden, weight))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_bf16_gradients_are_within_one_percent_of_float64() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(256, 64), torch.randn(512, 64) / 8
    teacher_logits = (torch.randn(256, 512) * 2).bfloat16()
    exact = [t.bfloat16().double().requires_grad_() for t in (hidden, weight)]
    expected = torch.autograd.grad(
        soft_cross_entropy_reference(*exact, teacher_logits.double()), exact
    )
    rounded = [t.bfloat16().requires_grad_() for t in (hidden, weight)]
    summed, _ = soft_cross_entropy(*rounded, teacher_logits, torch.arange(256))
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


def test_a_whole_vocabulary_teacher_has_nothing_outside() -> None:
    lm_head = torch.randn(10, 4)
    vocab = DraftVocab(target_ids=torch.arange(10), vocab_size=10)
    assert (Teacher(lm_head, vocab)(torch.randn(5, 4), top1=True).top1 >= 0).all()
