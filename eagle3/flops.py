"""Model FLOPs utilisation: the work that a training step has to do, and what devices could do.

    MFU = useful FLOPs / (seconds * peak FLOP/s of all devices)

Useful FLOPs are what the step needs whatever a system does: nothing recomputed, nothing padded, no
row that no step supervises.
"""

from __future__ import annotations

from eagle3.batch import Batch, depths
from eagle3.drafter import DrafterConfig

PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
}
"""Dense bf16 peaks by a part of the device's name, from the makers' data sheets; first match."""


def peak_tflops(device_name: str) -> float | None:
    """Peak of a device as torch.cuda.get_device_name() calls it; None if it is not in the table."""
    words = f"{device_name} ".replace("-", " ")
    return next((peak for name, peak in PEAK_TFLOPS.items() if f"{name} " in words), None)


def useful_flops(batch: Batch, config: DrafterConfig, num_steps: int) -> float:
    """Forward and backward of one micro-batch, teacher included.

    Per batch of N rows of which R_k are supervised at step k, T of them in all steps, with hidden
    size H, A aux states, intermediate size I, query width Q, key and value width E, draft
    vocabulary V, and P_k visible (query, key) pairs at step k:

        fc                4 A H^2 N               forward and weight gradient; the inputs need none
        token half        4 H (Q + 2E) N          once, forward and weight gradient
        step-0 keys       6 H 2E N                hidden half, forward and both gradients
        queries and on    6 (H Q + Q H + 3 H I) T
        own keys          6 H 2E (T - R_0)
        lm_head           6 H V T
        teacher           2 H V M                 M rows with a teacher
        attention         14 Q sum_k P_k          forward 4, backward 10 (with its scores again)
    """
    depth, positions = depths(batch), batch.positions()
    steps = [depth > k for k in range(num_steps)]
    n, total, first = batch.num_rows, sum(int(s.sum()) for s in steps), int(steps[0].sum())
    pairs = sum(int((positions[s] + 1 + k).sum()) for k, s in enumerate(steps))
    h, v, i = config.hidden_size, config.draft_vocab_size, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    e = config.num_key_value_heads * config.head_dim
    return (
        4 * config.num_aux * h * h * n
        + 4 * h * (q + 2 * e) * n
        + 6 * h * 2 * e * n
        + 6 * (2 * h * q + 3 * h * i) * total
        + 6 * h * 2 * e * (total - first)
        + 6 * h * v * total
        + 2 * h * v * int((batch.final_index >= 0).sum())
        + 14 * q * pairs
    )
