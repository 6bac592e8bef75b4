"""The fast path against the plain one, which test_ttt holds against the naive form.

Without a GPU the Triton kernels run in Triton's interpreter, in float32, and flash attention is
replaced by its plain reference; that leaves the GPU's own arithmetic to the tests marked `gpu`.
"""

from __future__ import annotations

import copy

import pytest
import torch

from eagle3 import fast
from eagle3.batch import Batch, depths
from eagle3.fast import cross_entropy, diagonal, gather, norm, rope, step, varlen
from eagle3.fast import layout as layouts
from eagle3.fast import swiglu as swiglu_module
from eagle3.fast.diagonal import merge, merge_backward, merge_reference
from eagle3.fast.gather import (
    add_groups,
    add_groups_reference,
    scatter_rows,
    scatter_rows_reference,
)
from eagle3.fast.layout import Layout
from eagle3.fast.norm import add_norm, norm_backward, norm_reference
from eagle3.fast.rope import heads, heads_backward, heads_reference, rotation_table
from eagle3.fast.step import fast_ttt, scaled
from eagle3.fast.swiglu import swiglu, swiglu_backward_, swiglu_reference
from eagle3.loss import Teacher
from eagle3.ttt import TTTModel, TTTOutput, supervised_rows, unroll
from tests.conftest import make_batch, ragged_masks, tiny_config, tiny_drafter

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SMALL = [[1], [0, 1], [0, 0, 1, 1, 1, 1], [0] * 5, [1] * 7, [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 0]]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with conftest: Triton also looks when a kernel is called."""
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def laid_out(batch: Batch) -> Layout:
    return Layout.of(depths(batch), batch.doc_starts)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def wide(x: torch.Tensor) -> torch.Tensor:
    """A float64 leaf with the same values."""
    return x.detach().double().requires_grad_()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.detach(), rtol=2e-4, atol=2e-4)


# layout


def test_the_worked_example_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MIN_GAP", 3)
    found = Layout.of(torch.tensor([0, 2, 1, 0, 0, 0, 2, 1, 0]), torch.tensor([0, 9]))
    assert found.rows.tolist() == [1, 6, 2, 7] and found.sizes == (4, 2)
    assert found.slots.tolist() == [0, 2, 1, 3] and found.num_slots == 4
    assert found.query_starts.tolist() == [0, 2, 4] and found.key_starts.tolist() == [0, 3, 11]
    assert found.key_rows.tolist() == [*range(3), *range(8)]
    assert found.starts.tolist() == [0, 4, 6] and found.parts(5) == [slice(0, 4), slice(4, 6)]
    assert found.counts(3).tolist() == [4, 2, 0]


@pytest.mark.parametrize("min_gap", [1, 4, 64])
def test_every_layout_holds_each_supervised_row_once(
    min_gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "MIN_GAP", min_gap)
    batch = make_batch(ragged_masks(), tiny_config())
    depth, found = depths(batch), laid_out(batch)
    for k, size in enumerate(found.sizes):
        assert sorted(found.rows[:size].tolist()) == (depth > k).nonzero().flatten().tolist()
    assert found.counts(300).tolist() == supervised_rows(batch, 300).tolist()
    assert torch.equal(found.positions, batch.positions())
    assert len(found.slots.unique()) == len(found.slots)
    docs = batch.doc_of_row()
    ends = found.query_starts[1:].tolist()
    for row, slot in zip(found.rows.tolist(), found.slots.tolist(), strict=True):
        segment = next(i for i, end in enumerate(ends) if slot < end)
        keys = found.key_rows[found.key_starts[segment] : found.key_starts[segment + 1]]
        seen = keys[: len(keys) - (ends[segment] - 1 - slot)]
        assert seen.tolist() == [r for r in range(row + 1) if docs[r] == docs[row]]


def test_a_document_of_many_turns_has_few_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MIN_GAP", 1)
    batch = make_batch([([0] * 9 + [1] * 4) * 30], tiny_config())
    assert len(laid_out(batch).query_starts) - 1 == layouts.MAX_SEGMENTS


def test_nothing_supervised() -> None:
    found = laid_out(make_batch([[0, 0], [1]], tiny_config()))
    assert found.sizes == () and found.parts(3) == [] and found.counts(2).tolist() == [0, 0]


# kernels, each against its plain reference in float64


@pytest.mark.parametrize("second_rows", [0, 3])
def test_norms(second_rows: int) -> None:
    torch.manual_seed(0)
    x, residual, grad, direct = (random(5, 24) for _ in range(4))
    weight, second_weight = random(24), random(24)
    grad_second = random(second_rows, 24)
    total, normed, second = (torch.full_like(x, float("nan")) for _ in range(3))
    second = second[:second_rows]
    two = (second_weight, second) if second_rows else (None, None)
    rstd = add_norm(x, residual, weight, 1e-5, normed, total, *two)

    h, w, w2 = wide(total), wide(weight), wide(second_weight)
    first, other = norm_reference(h, w, 1e-5), norm_reference(h[:second_rows], w2, 1e-5)
    close(total, x.double() + residual.double())
    close(normed, first)
    close(second, other)
    reaching = direct[:4]
    objective = (first * grad).sum() + (other * grad_second).sum() + (h[:4] * reaching).sum()
    expected = torch.autograd.grad(objective, (h, w, w2))
    grad_x = torch.full_like(x, float("nan"))
    two = (second_weight, grad_second) if second_rows else (None, None)
    grad_weight, grad_second_weight = norm_backward(
        total, rstd, weight, grad, grad_x, reaching, *two
    )
    close(grad_x, expected[0])
    close(grad_weight, expected[1])
    assert (grad_second_weight is None) == (second_rows == 0)
    if grad_second_weight is not None:
        close(grad_second_weight, expected[2])


def test_swiglu() -> None:
    torch.manual_seed(0)
    gate_up, grad = random(3, 2 * 37), random(3, 37)
    out, exact = torch.empty_like(grad), wide(gate_up)
    swiglu(gate_up, out)
    expected = swiglu_reference(exact)
    close(out, expected)
    swiglu_backward_(gate_up, grad)
    close(gate_up, torch.autograd.grad(expected, exact, grad.double())[0])


@pytest.mark.parametrize("add", [True, False])
def test_scatter_rows(add: bool) -> None:
    torch.manual_seed(0)
    x, out = random(3, 2, 5), random(6, 2, 5)
    rows = torch.tensor([4, 0, 5], device=DEVICE)
    expected = scatter_rows_reference(x, rows, out, add)
    scatter_rows(x, rows, out, add)
    close(out, expected.double())


def test_add_groups() -> None:
    torch.manual_seed(0)
    x, total = random(4, 6, 10), random(4, 2, 10)
    expected = add_groups_reference(x, total)
    add_groups(x, total)
    close(total, expected.double())


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("num_heads", [2, 3])
def test_heads(rotated: bool, num_heads: int) -> None:
    torch.manual_seed(0)
    rows = torch.tensor([4, 0, 5], device=DEVICE)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5], device=DEVICE)
    table = rotation_table(16, 12, 1e4, rows.device) if rotated else None
    width, at_step = num_heads * 12, 2
    hidden, token, grad = random(3, width), random(9, width), random(3, num_heads, 12)
    out = torch.full((4, num_heads, 12), float("nan"), device=DEVICE)
    slots = torch.tensor([3, 0, 2], device=DEVICE)
    heads(hidden, token, rows, positions, table, at_step, out, slots)
    h, t = wide(hidden), wide(token)
    expected = heads_reference(h, t, rows, positions, table, at_step, num_heads)
    close(out[slots], expected)
    assert out[1].isnan().all()
    grad_h, grad_t = torch.autograd.grad(expected, (h, t), grad.double())
    grad_hidden, grad_token = torch.empty(3, width + 8, device=DEVICE)[:, :width], random(9, width)
    before = grad_token.clone()
    heads_backward(grad, rows, positions, table, at_step, grad_hidden, grad_token)
    close(grad_hidden, grad_h)
    close(grad_token - before, grad_t)


@pytest.mark.parametrize("num_own", [0, 1, 3])
def test_merge(num_own: int) -> None:
    torch.manual_seed(0)
    num_rows, slots = 4, torch.tensor([5, 0, 2, 3], device=DEVICE)
    starts = torch.tensor([0, 7, 12, 16, 20], device=DEVICE)
    q, attended, grad = random(6, 6, 10), random(6, 6, 10), random(num_rows, 6, 10)
    own_keys, own_values = random(20, 2, 10), random(20, 2, 10)
    logsumexp = random(6, 6)
    own = [slice(int(s), int(s) + num_rows) for s in starts[1 : num_own + 1]]

    def stacked(x: torch.Tensor) -> torch.Tensor:
        parts = [x[o] for o in own]
        return wide(torch.stack(parts, 1) if parts else x.new_empty(num_rows, 0, 2, 10))

    exact = [wide(q[slots]), stacked(own_keys), stacked(own_values)]
    expected, merged = merge_reference(*exact, attended[slots].double(), logsumexp[:, slots])
    expected_grads = torch.autograd.grad(
        expected, exact, grad.double(), allow_unused=True, materialize_grads=True
    )
    out = torch.empty_like(grad)
    merge(q, own_keys, own_values, num_own, slots, starts, attended, logsumexp, out)
    close(out, expected)
    close(logsumexp[:, slots], merged)
    grad_keys, grad_values = torch.zeros_like(own_keys), torch.zeros_like(own_values)
    # autograd above held the step-0 logsumexp fixed; through_it is what its own gradient adds to q
    through_it = torch.zeros_like(q)
    grad_q = merge_backward(
        q, own_keys, own_values, num_own, slots, starts, out, logsumexp, grad, through_it,
        grad_keys, grad_values,
    )  # fmt: skip
    close(grad_q, expected_grads[0])
    for j, part in enumerate(own):
        close(grad_keys[part], expected_grads[1][:, j])
        close(grad_values[part], expected_grads[2][:, j])
    assert not grad_keys[: starts[1]].any() and not grad_values[: starts[1]].any()


def test_segment_attention_reference_against_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MIN_GAP", 1)
    layout = laid_out(make_batch(SMALL, tiny_config()))
    torch.manual_seed(0)
    q = torch.randn(layout.num_slots, 4, 8, dtype=torch.float64, requires_grad=True)
    keys, values = (
        torch.randn(len(layout.key_rows), 4, 8, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    outputs = []
    for i in range(len(layout.query_starts) - 1):
        (a, b), (c, d) = layout.query_starts[i : i + 2], layout.key_starts[i : i + 2]
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(int(d - c - (b - a)))
        k, v = keys[c:d].transpose(0, 1), values[c:d].transpose(0, 1)
        attend = torch.nn.functional.scaled_dot_product_attention
        outputs.append(attend(q[a:b].transpose(0, 1), k, v, attn_mask=mask).transpose(0, 1))
    expected = torch.cat(outputs)
    with torch.no_grad():
        out, logsumexp = varlen.forward_reference(q, keys, values, layout)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(expected)
    found = varlen.backward_reference(
        grad, q.detach(), keys.detach(), values.detach(), out, logsumexp, layout
    )
    for a, b in zip(found, torch.autograd.grad(expected, (q, keys, values), grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk_bytes", [2**31, 1])
def test_cross_entropy(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    num_rows = 130
    states, weight, teacher_logits = random(num_rows, 16), random(50, 16), random(9, 50)
    teacher_rows = torch.randint(0, 9, (num_rows,), device=DEVICE)
    row_weights = torch.rand(num_rows, device=DEVICE)
    s, w = wide(states), wide(weight)
    reference = cross_entropy.soft_cross_entropy_reference
    expected = reference(s @ w.T, teacher_logits[teacher_rows].double())
    expected_grads = torch.autograd.grad((expected * row_weights).sum(), (s, w))
    best = (states @ weight.T).argmax(-1)
    run = cross_entropy.soft_cross_entropy
    for need_grad in (False, True):
        loss, top1, grad = run(states, weight, teacher_logits, teacher_rows, row_weights, need_grad)
        close(loss, expected)
        assert torch.equal(top1, best)
        assert (grad is not None) == need_grad
        if grad is not None:
            close(states, expected_grads[0])
            close(grad, expected_grads[1])


def test_scaling() -> None:
    x, factor = random(5000), torch.tensor(1 / 3, device=DEVICE)
    expected = x / 3
    narrow = scaled(x, factor, torch.bfloat16)
    torch.testing.assert_close(narrow.float(), expected, rtol=2**-7, atol=0)
    assert scaled(x, factor, torch.float32) is x
    torch.testing.assert_close(x, expected)


# the whole step


def reference(
    model: TTTModel, batch: Batch, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> tuple[TTTOutput, dict[str, torch.Tensor]]:
    """Output and gradients of the plain path, on copies in another type."""
    model = copy.deepcopy(model).to(dtype)
    with monkeypatch.context() as patch:
        patch.setattr(fast, "supported", lambda *_: False)
        moved = batch.to(DEVICE, dtype)
        rows = supervised_rows(moved, len(model.step_weights))
        output = model(moved, 1.0 / rows.clamp(min=1).double(), score=True)
        output.loss.backward()
    return output, gradients(model)


def agreeing(batch: Batch, model: TTTModel) -> Batch:
    """The batch with a target that agrees with the drafter at step 0 (even rows) or 1 (odd rows).

    Random ones would agree nowhere, and an acceptance count of 0 proves little.
    """
    wide_model, wide_batch = copy.deepcopy(model).cpu().double(), batch.to("cpu", torch.float64)
    with torch.no_grad():
        for k, step in enumerate(unroll(wide_model.drafter, wide_batch, 2)):
            taught = step.rows + 1 + k
            chosen = taught % 2 == k
            wide_batch.final[wide_batch.final_index[taught[chosen]]] = step.states[chosen]
    return wide_batch.to("cpu", batch.final.dtype)


def gradients(model: TTTModel) -> dict[str, torch.Tensor]:
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.skipif(GPU, reason="in Triton's interpreter")
@pytest.mark.parametrize("min_gap", [1, 64])
@pytest.mark.parametrize(
    "shape", [{}, {"num_attention_heads": 6, "head_dim": 12}, {"num_aux": 1}], ids=str
)
def test_loss_and_every_gradient_equal_the_plain_path(
    min_gap: int, shape: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "MIN_GAP", min_gap)
    drafter, lm_head = tiny_drafter(**shape)
    weights = [0.8**k for k in range(4)]
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), weights)
    batch = agreeing(make_batch(SMALL, drafter.config), model)
    expected, expected_grads = reference(model, batch, torch.float64, monkeypatch)
    assert expected.accepted[1] > 0

    model.float()
    batch = batch.to("cpu", torch.float32)
    batch.layout = laid_out(batch)
    taught = model.teacher(batch.final, top1=True)
    scale = 1.0 / supervised_rows(batch, 4)
    output = fast_ttt(drafter, batch, taught, weights, scale)
    (3 * output.loss).backward()
    assert output.rows.tolist() == expected.rows.tolist()
    assert output.accepted.tolist() == expected.accepted.tolist()
    torch.testing.assert_close(output.loss.double(), expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(output.step_loss, expected.step_loss.float(), rtol=1e-5, atol=0)
    found = gradients(model)
    assert found.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert relative(found[name] / 3, grad) < 3e-6, name

    with torch.no_grad():
        again = fast_ttt(drafter, batch, taught, weights, scale)
    assert not again.loss.requires_grad
    torch.testing.assert_close(again.loss, output.loss.detach(), rtol=1e-6, atol=0)


def test_the_plain_path_stays_where_the_fast_one_does_not_apply() -> None:
    drafter, _ = tiny_drafter()
    batch = make_batch(SMALL, drafter.config)
    assert not fast.supported(drafter, batch)
    batch.layout = laid_out(batch)
    assert not fast.supported(drafter, batch)  # not on a GPU


LONG = [
    [1], [0, 1], [1, 1], [0] * 127, [0] * 60 + [1] * 67, [1] * 128, [0] * 100 + [1] * 29,
    [0] * 1000 + [1] * 3000, ([0] * 30 + [1] * 50) * 12,
    [0] * 200 + [1] * 300 + [0] * 90 + [1] * 40,
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("masks", [LONG, [[1] * 129, [1] * 128]], ids=["ragged", "all"])
def test_bf16_is_as_near_float64_as_the_plain_path(
    masks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, acceptance and gradients; the gradient as a whole is within 1%."""
    drafter, lm_head = tiny_drafter(
        torch.float32, hidden_size=512, intermediate_size=1024, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, vocab_size=3000, draft_vocab_size=2000,
        max_position_embeddings=8192,
    )  # fmt: skip
    weights = [0.8**k for k in range(7)]
    with torch.no_grad():
        drafter.lm_head.weight /= 4  # logits about as spread out as a trained model's
        for module in drafter.midlayer.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.02)  # Llama's
    model = TTTModel(drafter, Teacher(lm_head / 4, drafter.vocab), weights).cuda().bfloat16()
    batch = agreeing(make_batch(masks, drafter.config, torch.bfloat16), model)
    expected, expected_grads = reference(model, batch, torch.float64, monkeypatch)
    _, plain_grads = reference(model, batch, torch.bfloat16, monkeypatch)

    moved = batch.to("cuda", torch.bfloat16)
    assert fast.supported(drafter, moved)
    scale = 1.0 / supervised_rows(moved, 7).clamp(min=1)
    output = model(moved, scale, score=True)
    output.loss.backward()
    assert output.rows.tolist() == expected.rows.tolist()
    torch.testing.assert_close(output.loss.double(), expected.loss, rtol=1e-3, atol=0)
    slack = 0.01 * output.rows[0].item() + 1  # near ties in bf16
    assert expected.accepted[1] > 4 * slack or len(masks) < 4
    assert (output.accepted - expected.accepted).abs().max() <= slack
    grads = gradients(model)
    errors = {
        n: (relative(grads[n], e), relative(plain_grads[n], e)) for n, e in expected_grads.items()
    }
    report = "\n".join(f"{n}: fast {a:.2%}, plain {b:.2%}" for n, (a, b) in errors.items())
    print(report)  # noqa: T201
    assert all(a < 1.05 * b for a, b in errors.values()), report
    flat = [torch.cat([g[n].flatten() for n in grads]) for g in (grads, expected_grads)]
    assert relative(*flat) < 0.01, report


@pytest.mark.gpu
def test_new_layouts_compile_nothing_new() -> None:
    kernels = [
        kernel
        for module in (gather, norm, rope, diagonal, swiglu_module, cross_entropy, step)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    ]

    def compiled() -> int:
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels)

    drafter, lm_head = tiny_drafter(torch.float32, hidden_size=64, head_dim=16)
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0, 0.8, 0.6]).cuda().bfloat16()
    found = []
    for seed in range(8):
        masks = [[0] * (seed + 1) + [1] * (3 * seed + 5), [1] * (16 + seed)]
        batch = make_batch(masks, drafter.config, seed=seed).to("cuda", torch.bfloat16)
        model(batch, torch.ones(3, device="cuda"), score=False).loss.backward()
        found.append(compiled())
    assert found[0] == found[-1], found
