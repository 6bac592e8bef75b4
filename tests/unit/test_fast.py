"""The fast path against the plain one, which test_ttt holds against the naive form.

Without a GPU the Triton kernels run in Triton's interpreter, in float32; that leaves the GPU's own
arithmetic to the tests marked `gpu`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3 import fast
from eagle3.batch import Batch
from eagle3.fast import diagonal, flash, gather, norm, rope, step, swiglu
from eagle3.fast import fp8 as fp8_module
from eagle3.fast import loss as losses
from eagle3.fast.step import fast_ttt
from eagle3.loss import LOSSES, Teacher
from eagle3.ttt import TTTModel, TTTOutput, supervised_rows, supervised_weight, unroll
from tests.conftest import laid_out, make_batch, small_masks, tiny_drafter, weighted

pytestmark = pytest.mark.usefixtures("interpreted")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
NORMS = {"norm_before_fc": True, "norm_output": True}
JUMPING = ("tv", "log_acceptance")
"""Losses whose gradient jumps where teacher and drafter agree."""


def reference(
    model: TTTModel, batch: Batch, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> tuple[TTTOutput, dict[str, torch.Tensor]]:
    """Output and gradients of the plain path, on copies in another type."""
    model = copy.deepcopy(model).to(dtype)
    with monkeypatch.context() as patch:
        patch.setattr(fast, "obstacle", lambda *_: "a test")
        moved = batch.to(DEVICE, dtype)
        total = supervised_weight(moved, len(model.step_weights))
        output = model(moved, 1.0 / total.masked_fill(total == 0, 1), score=True)
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
@pytest.mark.parametrize(
    "shape", [{}, {"num_attention_heads": 6, "head_dim": 12}, {"num_aux": 1}], ids=str
)
def test_loss_and_every_gradient_equal_the_plain_path(
    shape: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_with_the_plain_path(shape, "soft_ce", monkeypatch)


@pytest.mark.skipif(GPU, reason="in Triton's interpreter")
@pytest.mark.parametrize("options", [NORMS, {"fc_norm": True}], ids=str)
def test_optional_norms_equal_the_plain_path(
    options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_with_the_plain_path(options, "soft_ce", monkeypatch)


@pytest.mark.skipif(GPU, reason="in Triton's interpreter")
@pytest.mark.parametrize("kind", sorted(LOSSES.keys() - {"soft_ce"}))
def test_other_losses_equal_the_plain_path(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_with_the_plain_path({}, kind, monkeypatch)


@pytest.mark.skipif(GPU, reason="in Triton's interpreter")
@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_weighted_documents_equal_the_plain_path(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_with_the_plain_path({}, kind, monkeypatch, weighted)


def compare_with_the_plain_path(
    shape: dict,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Batch], Batch] = lambda batch: batch,
) -> None:
    drafter, lm_head = tiny_drafter(**shape)
    weights = [0.8**k for k in range(4)]
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), weights, kind)
    batch = prepare(make_batch(small_masks(), drafter.config))
    if kind not in JUMPING:  # they have no gradient where teacher and drafter are the same
        batch = agreeing(batch, model)
    expected, expected_grads = reference(model, batch, torch.float64, monkeypatch)
    assert expected.accepted[1] > 0 or kind in JUMPING

    model.float()
    batch = batch.to("cpu", torch.float32)
    batch.layout = laid_out(batch)
    taught = model.teacher(batch.final, top1=True)
    scale = 1.0 / supervised_weight(batch, 4)
    output = fast_ttt(drafter, batch, taught, weights, scale, kind)
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
        again = fast_ttt(drafter, batch, taught, weights, scale, kind)
    assert not again.loss.requires_grad
    torch.testing.assert_close(again.loss, output.loss.detach(), rtol=1e-6, atol=0)


@pytest.mark.skipif(GPU, reason="in Triton's interpreter")
@pytest.mark.parametrize("on_fast_path", [True, False])
def test_a_frozen_lm_head_changes_no_other_gradient(on_fast_path: bool) -> None:
    drafter, lm_head = tiny_drafter(torch.float32)
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0, 0.8])
    batch = make_batch(small_masks(), drafter.config, torch.float32)
    batch.layout = laid_out(batch)
    found = []
    for trained in (True, False):
        drafter.lm_head.weight.requires_grad_(trained)
        model.zero_grad()
        if on_fast_path:
            taught = model.teacher(batch.final, top1=False)
            output = fast_ttt(drafter, batch, taught, model.step_weights, torch.ones(2))
        else:
            output = model(batch, torch.ones(2), score=False)
        output.loss.backward()
        found.append(gradients(model))
    assert found[0].pop("drafter.lm_head.weight").any() and found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


def test_the_plain_path_stays_where_the_fast_one_does_not_apply() -> None:
    drafter, _ = tiny_drafter()
    batch = make_batch(small_masks(), drafter.config)
    batch.layout = laid_out(batch)
    assert fast.obstacle(drafter, batch) == "no GPU"


def test_groups_too_wide_for_some_gpus_take_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile holds all heads of a group; one of 64 rows does not fit an RTX 40's shared memory."""
    rows = [tile[0] for tiles in flash.TILES.values() for tile in tiles]
    assert min(rows) >= fast.WIDEST_GROUP
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    aux = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda")
    batch: Any = SimpleNamespace(aux=aux, layout="a layout")
    found = []
    for groups in (2, 1):
        shape = {"num_attention_heads": 34, "num_key_value_heads": groups}
        drafter, _ = tiny_drafter(torch.bfloat16, **shape)
        found.append(fast.obstacle(drafter, batch))
    told = "draft.num_attention_heads=34 is more than 32 times draft.num_key_value_heads=1"
    assert found == [None, told]


LONG = [
    [1], [0, 1], [1, 1], [0] * 127, [0] * 60 + [1] * 67, [1] * 128, [0] * 100 + [1] * 29,
    [0] * 1000 + [1] * 3000, ([0] * 30 + [1] * 50) * 12,
    [0] * 200 + [1] * 300 + [0] * 90 + [1] * 40,
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in sorted(LOSSES)), ("soft_ce", NORMS), ("soft_ce", {"fc_norm": True})],
    ids=str,
)
@pytest.mark.parametrize("masks", [LONG, [[1] * 129, [1] * 128]], ids=["ragged", "all"])
def test_bf16_is_as_near_float64_as_the_plain_path(
    masks: list[list[int]], kind: str, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, acceptance and gradients; with soft_ce the gradient as a whole is within 1%.

    Not with the others, whose gradient jumps: rounded states alone move many a p to the other side
    of q, and many a teacher to another token. There both paths are equally far off.
    """
    drafter, lm_head = tiny_drafter(
        torch.float32, hidden_size=512, intermediate_size=1024, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, vocab_size=3000, draft_vocab_size=2000,
        max_position_embeddings=8192, **options,
    )  # fmt: skip
    weights = [0.8**k for k in range(7)]
    with torch.no_grad():
        drafter.lm_head.weight /= 4  # logits about as spread out as a trained model's
        for module in drafter.midlayer.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.02)  # Llama's
    model = TTTModel(drafter, Teacher(lm_head / 4, drafter.vocab), weights, kind).cuda().bfloat16()
    batch = make_batch(masks, drafter.config, torch.bfloat16)
    if kind not in JUMPING:
        batch = agreeing(batch, model)
    expected, expected_grads = reference(model, batch, torch.float64, monkeypatch)
    _, plain_grads = reference(model, batch, torch.bfloat16, monkeypatch)

    moved = batch.to("cuda", torch.bfloat16)
    assert fast.obstacle(drafter, moved) is None
    scale = 1.0 / supervised_rows(moved, 7).clamp(min=1)
    output = model(moved, scale, score=True)
    output.loss.backward()
    assert output.rows.tolist() == expected.rows.tolist()
    torch.testing.assert_close(output.loss.double(), expected.loss, rtol=1e-3, atol=0)
    slack = 0.02 * output.rows[0].item() + 1  # near ties in bf16
    assert expected.accepted[1] > 4 * slack or len(masks) < 4 or kind in JUMPING
    assert (output.accepted - expected.accepted).abs().max() <= slack
    grads = gradients(model)
    errors = {
        n: (relative(grads[n], e), relative(plain_grads[n], e)) for n, e in expected_grads.items()
    }
    report = "\n".join(f"{n}: fast {a:.2%}, plain {b:.2%}" for n, (a, b) in errors.items())
    print(report)  # noqa: T201
    most = 1.5 if kind in JUMPING else 1.05
    assert all(a < most * b for a, b in errors.values()), report
    flat = [torch.cat([g[n].flatten() for n in grads]) for g in (grads, expected_grads)]
    assert relative(*flat) < 0.01 or kind != "soft_ce", report


@pytest.mark.gpu
def test_the_slow_path_on_a_gpu_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    drafter, lm_head = tiny_drafter(torch.float32, hidden_size=64, head_dim=16, num_layers=2)
    model = TTTModel(drafter, Teacher(lm_head, drafter.vocab), [1.0]).cuda().bfloat16()
    batch = make_batch(small_masks(), drafter.config).to("cuda", torch.bfloat16)
    for _ in range(2):
        model(batch, torch.ones(1, device="cuda"), score=False).loss.backward()
    told = [r.getMessage() for r in caplog.records if "slow path" in r.getMessage()]
    assert told == ["training takes the slow path: draft.num_layers=2, not 1"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "fp8"), [*((kind, False) for kind in sorted(LOSSES)), ("soft_ce", True)]
)
def test_new_layouts_compile_nothing_new(kind: str, fp8: bool) -> None:
    """The number of compiled kernels after the first batch stays, whatever the layouts."""
    kernels = [
        kernel
        for module in (gather, norm, rope, diagonal, flash, swiglu, losses, step, fp8_module)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    ]

    def compiled() -> int:
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels)

    drafter, lm_head = tiny_drafter(torch.float32, hidden_size=64, head_dim=16)
    teacher = Teacher(lm_head, drafter.vocab)
    model = TTTModel(drafter, teacher, [1.0, 0.8, 0.6], kind, fp8).cuda().bfloat16()
    found = []
    for seed in range(8):
        masks = [[0] * (seed + 1) + [1] * (3 * seed + 5), [1] * (16 + seed)]
        batch = make_batch(masks, drafter.config, seed=seed).to("cuda", torch.bfloat16)
        model(batch, torch.ones(3, device="cuda"), score=False).loss.backward()
        found.append(compiled())
    assert found[0] == found[-1], found


def test_a_batch_with_nothing_supervised_gives_every_parameter_a_zero_gradient() -> None:
    drafter, lm_head = tiny_drafter(torch.float32)
    batch = make_batch([[0] * 6, [1]], drafter.config, torch.float32)
    batch.layout = laid_out(batch)
    taught = Teacher(lm_head, drafter.vocab)(batch.final, top1=True)
    output = fast_ttt(drafter, batch, taught, [1.0, 0.8], torch.ones(2))
    output.loss.backward()
    assert output.loss.item() == 0 and output.rows.tolist() == output.accepted.tolist() == [0, 0]
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name
