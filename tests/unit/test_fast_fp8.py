"""fp8 products against the same rounding written plainly; on a GPU also against bf16."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from eagle3.errors import UserError
from eagle3.fast.fp8 import Product, product_reference, quantise, quantise_reference
from eagle3.fast.step import fast_ttt
from eagle3.loss import Teacher
from eagle3.ttt import TTTModel, supervised_rows
from tests.conftest import laid_out, make_batch, small_masks, tiny_drafter

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from rounded import round_products

pytestmark = pytest.mark.usefixtures("interpreted")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def awkward(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows of very different size, one of them zero."""
    x = (
        torch.randn(rows, width, device=DEVICE)
        * torch.logspace(-4, 4, rows, device=DEVICE)[:, None]
    )
    x[1] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = awkward(9, 80, dtype)
    for part in (x, x[:, :32]):  # the latter is not contiguous
        data, scales = quantise(part)
        error = (data.float() * scales - part.float()).abs()
        assert (error <= part.float().abs() / 16 + scales * 2**-10).all()
        assert (data.float().abs().amax(dim=1)[2:] == 448).all()


@pytest.mark.gpu
def test_the_rounding_kernel_on_a_gpu() -> None:
    torch.manual_seed(0)
    x = awkward(9, 5000, torch.bfloat16)
    for part in (x, x[:, :32]):
        (data, scales), (data_ref, scales_ref) = quantise(part), quantise_reference(part)
        # the last bit of a quotient may differ between the two, and a value on the edge follows
        torch.testing.assert_close(scales, scales_ref, rtol=1e-6, atol=0)
        assert (data.float() != data_ref.float()).float().mean() < 1e-3


@pytest.mark.parametrize("outputs", [slice(None), slice(16), slice(16, None)])
def test_products(outputs: slice) -> None:
    torch.manual_seed(0)
    x, weight = awkward(9, 64, torch.bfloat16), awkward(48, 64, torch.bfloat16)
    exact = x.float() @ weight[outputs].float().T
    plain, rounded = Product(weight, fp8=False), Product(weight, fp8=True)
    torch.testing.assert_close(plain(x, outputs=outputs).float(), exact, rtol=1e-2, atol=1e-6)
    out = torch.empty(exact.shape, device=DEVICE, dtype=torch.bfloat16)
    assert rounded(x, out=out, outputs=outputs) is out
    expected = product_reference(x, weight[outputs])
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(rounded(x, outputs=outputs), out)
    lengths = x.float().norm(dim=1)[:, None] * weight[outputs].float().norm(dim=1)
    error = (out.float() - exact)[lengths > 0] / lengths[lengths > 0]
    assert 1e-4 < error.abs().max() < 0.05


@pytest.mark.parametrize("outputs", [slice(None), slice(16), slice(16, None)])
def test_gradients_of_inputs(outputs: slice) -> None:
    torch.manual_seed(0)
    weight = awkward(48, 64, torch.bfloat16)
    grad = awkward(9, 48, torch.bfloat16)[:, outputs]  # not contiguous
    exact = grad.float() @ weight[outputs].float()
    plain, rounded = Product(weight, fp8=False), Product(weight, fp8=True)
    torch.testing.assert_close(plain.grad_input(grad, outputs).float(), exact, rtol=1e-2, atol=1e-6)
    for _ in range(2):  # the second time with what the first rounded
        found = rounded.grad_input(grad, outputs)
        expected = product_reference(grad, weight[outputs].T)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)
    lengths = grad.float().norm(dim=1)[:, None] * weight[outputs].float().norm(dim=0)
    error = (found.float() - exact)[lengths > 0] / lengths[lengths > 0]
    assert 1e-4 < error.abs().max() < 0.05


@pytest.mark.skipif(GPU, reason="in Triton's interpreter")
def test_the_step_equals_the_plain_path_with_the_same_rounding() -> None:
    drafter, lm_head = tiny_drafter(torch.float32)
    with torch.no_grad():  # the fast path rounds the embeddings before this norm's weight
        drafter.midlayer.input_layernorm.weight.fill_(1)
    weights = [1.0, 0.8, 0.6]
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), weights)
    batch = make_batch(small_masks(), drafter.config, torch.float32)
    batch.layout = laid_out(batch)
    taught = model.teacher(batch.final, top1=False)
    scale = 1.0 / supervised_rows(batch, 3)

    def gradients(loss: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])

    exact = gradients(fast_ttt(drafter, batch, taught, weights, scale).loss)
    output = fast_ttt(drafter, batch, taught, weights, scale, fp8=True)
    found = gradients(output.loss)
    round_products(drafter)
    expected = model(batch, scale, score=False)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-4, atol=0)
    wanted = gradients(expected.loss)
    # an entry may round the other way where the two differ in the last bit of float32
    assert (found - wanted).norm() < 0.01 * wanted.norm()
    assert 0.02 * exact.norm() < (found - exact).norm() < 0.3 * exact.norm()


@pytest.mark.skipif(GPU, reason="a CPU cannot")
def test_fp8_without_a_gpu_is_refused_but_validation_needs_none() -> None:
    drafter, lm_head = tiny_drafter(torch.float32)
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0], fp8=True)
    batch = make_batch(small_masks(), drafter.config, torch.float32)
    with pytest.raises(UserError, match="train.fp8=true is not possible here: no GPU"):
        model(batch, torch.ones(1), score=False)
    with torch.no_grad():
        assert model(batch, torch.ones(1), score=False).loss > 0


@pytest.mark.gpu
def test_error_against_bf16_on_a_gpu() -> None:
    """Prints what fp8 does to the loss and the gradient at the sizes of a small Llama."""
    drafter, lm_head = tiny_drafter(
        torch.float32, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, vocab_size=8000, draft_vocab_size=4000,
        max_position_embeddings=8192,
    )  # fmt: skip
    weights = [0.8**k for k in range(5)]
    teacher = Teacher(lm_head, drafter.vocab)
    masks = [[0] * 100 + [1] * 900, ([0] * 30 + [1] * 50) * 12]
    batch = make_batch(masks, drafter.config, torch.bfloat16).to("cuda", torch.bfloat16)
    scale = 1.0 / supervised_rows(batch, 5)
    found = []
    for fp8 in (False, True):
        model = TTTModel(drafter, teacher, weights, fp8=fp8).cuda().bfloat16()
        model.zero_grad()
        loss = model(batch, scale, score=False).loss
        loss.backward()
        grads = [p.grad.flatten().float() for p in model.parameters() if p.requires_grad]
        found.append((loss.item(), torch.cat(grads)))
    (loss, grad), (loss8, grad8) = found
    error = ((grad8 - grad).norm() / grad.norm()).item()
    print(f"loss bf16 {loss:.4f} fp8 {loss8:.4f}; gradient off by {error:.1%}")  # noqa: T201
    assert abs(loss8 / loss - 1) < 0.02 and 0.005 < error < 0.3
