"""Each kernel of the fast path against its plain reference in float64.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3.fast import flash
from eagle3.fast import loss as losses
from eagle3.fast.attention import UnrollAttention
from eagle3.fast.diagonal import merge, merge_backward, merge_reference
from eagle3.fast.gather import add_rows, add_rows_reference
from eagle3.fast.norm import add_norm, norm_backward, norm_reference
from eagle3.fast.rope import heads, heads_backward, heads_reference, rotation_table
from eagle3.fast.step import scaled
from eagle3.fast.swiglu import swiglu, swiglu_backward_, swiglu_reference
from eagle3.loss import LEAST_OVERLAP, LOSSES
from tests.conftest import laid_out, make_batch, small_masks, tiny_config

pytestmark = pytest.mark.usefixtures("interpreted")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def wide(x: torch.Tensor) -> torch.Tensor:
    """A float64 leaf with the same values."""
    return x.detach().double().requires_grad_()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.detach(), rtol=2e-4, atol=2e-4)


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


def test_add_rows() -> None:
    torch.manual_seed(0)
    x, out = random(3, 5), random(6, 5)
    rows = torch.tensor([4, 0, 5], device=DEVICE)
    expected = add_rows_reference(x, rows, out)
    add_rows(x, rows, out)
    close(out, expected.double())


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
    in_slots = random(4, num_heads, 12)
    in_slots[slots] = grad
    heads_backward(in_slots, rows, positions, table, at_step, grad_hidden, grad_token, slots)
    close(grad_hidden, grad_h)
    close((grad_token - before) / 2, grad_t)


@pytest.mark.parametrize("num_own", [0, 1, 3])
def test_merge(num_own: int) -> None:
    torch.manual_seed(0)
    num_rows, slots = 4, torch.tensor([5, 0, 2, 3], device=DEVICE)
    starts = torch.tensor([0, 7, 12, 16, 20], device=DEVICE)
    q, attended, grad = random(6, 6, 10), random(6, 6, 10), random(num_rows, 6, 10)
    own_keys, own_values = random(20, 2, 10), random(20, 2, 10)
    logsumexp = random(6, 6)  # [S, Q]
    own = [slice(int(s), int(s) + num_rows) for s in starts[1 : num_own + 1]]

    def stacked(x: torch.Tensor) -> torch.Tensor:
        parts = [x[o] for o in own]
        return wide(torch.stack(parts, 1) if parts else x.new_empty(num_rows, 0, 2, 10))

    exact = [wide(q[slots]), stacked(own_keys), stacked(own_values)]
    expected, merged = merge_reference(*exact, attended[slots].double(), logsumexp[slots])
    expected_grads = torch.autograd.grad(
        expected, exact, grad.double(), allow_unused=True, materialize_grads=True
    )
    out = torch.empty_like(grad)
    merge(q, own_keys, own_values, num_own, slots, starts, attended, logsumexp, out)
    close(out, expected)
    close(logsumexp[slots], merged)
    grad_keys, grad_values = torch.zeros_like(own_keys), torch.zeros_like(own_values)
    in_slots, grad_q = (torch.full_like(q, float("nan")) for _ in range(2))
    delta = torch.zeros_like(logsumexp)
    merge_backward(
        q, own_keys, own_values, num_own, slots, starts, out, logsumexp, grad, in_slots, delta,
        grad_q, grad_keys, grad_values,
    )  # fmt: skip
    close(delta[slots], (out * grad).sum(-1).double())
    assert torch.equal(in_slots[slots], grad) and in_slots[[1, 4]].isnan().all()
    # autograd above held the step-0 logsumexp fixed; through it goes what flash adds to grad_q
    close(grad_q[slots], expected_grads[0])
    for j, part in enumerate(own):
        close(grad_keys[part], expected_grads[1][:, j])
        close(grad_values[part], expected_grads[2][:, j])
    assert not grad_keys[: starts[1]].any() and not grad_values[: starts[1]].any()


@pytest.mark.parametrize(
    ("blocks", "num_heads", "size"),
    [
        *(((16, 16), *shape) for shape in ((4, 16), (6, 10), (2, 24))),
        *((blocks, 6, 10) for blocks in ((16, 32), (32, 16), None)),
        (None, 64, 8),  # the widest group: a piece of one query in some kernels
    ],
)
def test_flash(
    blocks: tuple[int, int] | None, num_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against autograd through the reference, over ragged documents and three steps."""
    for name in flash.TILES if blocks else ():
        monkeypatch.setitem(flash.TILES, name, ((*blocks, 1, 1),) * 2)
    masks = [
        [1], [0, 1, 1], [1, 1, 1], [1] * 34, [0] * 40, [0] * 37 + [1] * 30 + [0] * 41 + [1] * 3,
        [0] * 16 + [1] * 18,
    ]  # fmt: skip
    batch = make_batch(masks, tiny_config())
    layout = laid_out(batch).to(DEVICE)
    torch.manual_seed(0)
    num_queries = len(layout.rows)
    q, grad = (random(3, num_queries, num_heads, size) for _ in range(2))
    keys, values = random(batch.num_rows, 2, size), random(batch.num_rows, 2, size)
    q[2, :9] = grad[2, :9] = 0  # rows that ended
    exact = [wide(q), wide(keys), wide(values)]
    expected = [flash.attend_reference(step, *exact[1:], layout) for step in exact[0]]
    attention = flash.Flash(layout, num_heads, 2, size)
    out, logsumexp, delta = torch.empty_like(q), *torch.empty(2, *q.shape[:3], device=DEVICE)
    for k in range(3):
        out[k] = attention.attend(q[k], keys, values, logsumexp[k])
        delta[k] = (out[k] * grad[k]).sum(-1)
        close(out[k], expected[k][0])
        close(logsumexp[k], expected[k][1])
    objective = (torch.stack([x for x, _ in expected]) * grad).sum()
    grad_q, *grad_kv = torch.autograd.grad(objective, exact)
    for k in range(3):
        found = torch.ones_like(q[k])
        attention.add_grad_q(q[k], keys, values, grad[k], logsumexp[k], delta[k], found)
        close(found - 1, grad_q[k])
    found_kv = attention.grad_keys_values(q, keys, values, grad, logsumexp, delta)
    for a, b in zip(found_kv, grad_kv, strict=True):
        close(a, b)


@pytest.mark.parametrize("num_rows", [5, 6, 7])
def test_what_kernels_read_is_aligned_whatever_the_layout(num_rows: int) -> None:
    """Triton compiles a kernel anew for a pointer of other alignment."""
    config = tiny_config(num_attention_heads=3, num_key_value_heads=1, head_dim=16)
    layout = laid_out(make_batch([[0] + [1] * (num_rows + 3)], config)).to(DEVICE)
    token, key_value = random(num_rows + 4, 5 * 16), random(num_rows + 4, 2 * 16)
    attention = UnrollAttention(config, layout, layout.parts(3), token, key_value)
    attention.start_backward()
    for tensor in (attention.q, attention.logsumexp, attention.delta, attention.grad_mixed):
        assert all(step.data_ptr() % 16 == 0 for step in tensor)


def test_a_launch_takes_all_pieces_of_a_long_batch() -> None:
    """A grid's first axis has room for 2^31 - 1 programs, the others for 65,535."""
    layout = laid_out(make_batch([[0] + [1] * 70_001], tiny_config(num_aux=1, hidden_size=8)))
    attention = flash.Flash(layout, 32, 1, 256)  # in one kernel, a piece holds one query
    for name in flash.TILES:
        assert all(programs <= 65_535 for programs in attention._grid(name)[1:])


def test_every_piece_of_a_document_is_in_the_tables_once() -> None:
    starts = torch.tensor([0, 5, 5, 6, 14])
    docs, firsts = flash._cut(starts, 4, bound=14 // 4 + 4)
    assert list(zip(docs.tolist(), firsts.tolist(), strict=True))[:5] == [
        (0, 0), (0, 4), (2, 5), (3, 6), (3, 10),
    ]  # fmt: skip
    assert (firsts[5:] > 14).all()
    docs, firsts = flash._by_work(docs, firsts, torch.tensor([3, 9, 1, 7, 2, 0, 0]))
    assert firsts.tolist()[:5] == [4, 6, 0, 10, 5] and docs.tolist()[:5] == [0, 3, 0, 3, 2]


def test_flash_fits_every_gpu_that_the_fast_path_runs_on() -> None:
    """Compiled for GPUs that need not be there; in a process without the interpreter."""
    script = Path(__file__).with_name("compile_flash.py")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = [sys.executable, script]
    found = subprocess.run(run, env=env, check=True, capture_output=True, text=True)
    shared = json.loads(found.stdout)
    assert {gpu for gpu, _, _, _ in shared} == {80, 89, 90}
    limits = {80: 163, 89: 99, 90: 227}  # KiB of one program: A100, RTX 40, H100
    too_large = [row for row in shared if row[3] > limits[row[0]] * 1024]
    assert not too_large


def test_flash_reference_against_pytorch() -> None:
    batch = make_batch(small_masks(), tiny_config())
    layout = laid_out(batch)
    torch.manual_seed(0)
    q = torch.randn(len(layout.rows), 4, 8, dtype=torch.float64)
    keys, values = torch.randn(2, batch.num_rows, 2, 8, dtype=torch.float64)
    out, _ = flash.attend_reference(q, keys, values, layout)
    docs, rows = batch.doc_of_row(), layout.rows.sort().values
    visible = (docs[rows, None] == docs) & (rows[:, None] >= torch.arange(batch.num_rows))
    found = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, keys, values)), attn_mask=visible, enable_gqa=True
    )
    torch.testing.assert_close(out, found.transpose(0, 1))


@pytest.mark.parametrize("kind", sorted(LOSSES))
@pytest.mark.parametrize(
    ("chunk_bytes", "num_rows", "block", "whole_row"),
    [(2**31, 25, 64, 64), (1, 130, 64, 64), (2**31, 25, 16, 0), (2**31, 25, 64, 0)],
)
def test_losses(
    chunk_bytes: int,
    num_rows: int,
    block: int,
    whole_row: int,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(losses, "BLOCK", block)
    monkeypatch.setattr(losses, "WHOLE_ROW", whole_row)
    torch.manual_seed(0)
    states, weight = random(num_rows, 16), random(50, 16)
    teacher_rows = torch.randint(0, 9, (num_rows,), device=DEVICE)
    teacher_logits = random(9, 50)
    teacher_logits[8] += 60 * (torch.arange(50, device=DEVICE) == 3)  # next to no overlap
    states[teacher_rows == 8] = -10 * weight[3]
    row_weights = torch.rand(num_rows, device=DEVICE)
    s, w = wide(states), wide(weight)
    p = teacher_logits[teacher_rows].double().softmax(-1)
    expected = LOSSES[kind](p, (s @ w.T).log_softmax(-1))
    assert kind != "log_acceptance" or expected.max() == -math.log(LEAST_OVERLAP)
    expected_grads = torch.autograd.grad((expected * row_weights).sum(), (s, w))
    best = (states @ weight.T).argmax(-1)
    run = losses.lm_head_loss
    for need_grad in (False, True):
        loss, top1, grad = run(
            states, weight, teacher_logits, teacher_rows, row_weights, kind, need_grad
        )
        close(loss, expected)
        assert torch.equal(top1, best)
        assert (grad is not None) == need_grad
        if grad is not None:
            close(states, expected_grads[0])
            close(grad, expected_grads[1])


@pytest.mark.parametrize("need_grad", [False, True])
def test_one_chunk_of_logits_at_a_time(need_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a chunk made is gone before the next one's logits are."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1)  # 128 rows
    product, alive = losses.wide_product, []

    def counted(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
        alive.append(sum(x.shape == (128, 20) for x in tensors))
        return product(states, weight)

    monkeypatch.setattr(losses, "wide_product", counted)
    states, weight, teacher_logits = random(300, 16), random(20, 16), random(9, 20)
    rows = torch.zeros(300, dtype=torch.int64, device=DEVICE)
    ones = torch.ones(300, device=DEVICE)
    losses.lm_head_loss(states, weight, teacher_logits, rows, ones, "soft_ce", need_grad)
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("of", ["drafter", "teacher"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("whole_row", [0, 64])
@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_a_row_that_is_not_finite_has_no_finite_loss(
    kind: str, whole_row: int, value: float, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training ends when a loss is not finite; a minimum or maximum may drop a NaN on the way."""
    monkeypatch.setattr(losses, "BLOCK", 16)
    monkeypatch.setattr(losses, "WHOLE_ROW", whole_row)
    torch.manual_seed(0)
    states, weight, teacher_logits = random(3, 16), random(50, 16), random(3, 50)
    if of == "drafter":
        states[1] = value
    else:
        teacher_logits[1, 20] = value
    rows, ones = torch.arange(3, device=DEVICE), torch.ones(3, device=DEVICE)
    loss, _, _ = losses.lm_head_loss(states, weight, teacher_logits, rows, ones, kind, False)
    # the best of a teacher's row is still known if another entry is NaN
    known = kind == "hard_ce" and of == "teacher"
    assert loss.isfinite().tolist() == [True, known, True]


@pytest.mark.parametrize("spread", [1, 3])
@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_bf16_gradients_are_within_one_percent_of_float64(kind: str, spread: int) -> None:
    """Of the loss given the states; a draft that is nearly right, as late in training.

    spread: the logits' standard deviation.
    """
    torch.manual_seed(0)
    states, weight = random(40, 64).bfloat16(), (random(512, 64) * spread / 8).bfloat16()
    teacher_logits = states.float() @ weight.float().T + 0.7 * random(40, 512)
    s, w = wide(states), wide(weight)
    p = teacher_logits.double().softmax(-1)
    expected = LOSSES[kind](p, (s @ w.T).log_softmax(-1)).sum()
    expected_grads = torch.autograd.grad(expected, (s, w))
    ones = torch.ones(40, device=DEVICE)
    rows = torch.arange(40, device=DEVICE)
    _, _, grad = losses.lm_head_loss(states, weight, teacher_logits, rows, ones, kind, True)
    for found, wanted in zip((states, grad), expected_grads, strict=True):
        assert (found.double() - wanted).norm() < 0.01 * wanted.norm()


def test_scaling() -> None:
    x, factor = random(5000), torch.tensor(1 / 3, device=DEVICE)
    expected = x / 3
    narrow = scaled(x, factor, torch.bfloat16)
    torch.testing.assert_close(narrow.float(), expected, rtol=2**-7, atol=0)
    assert scaled(x, factor, torch.float32) is x
    torch.testing.assert_close(x, expected)
