import pytest
import torch

from eagle3.batch import Batch
from eagle3.flops import peak_tflops, useful_flops
from tests.conftest import make_batch, ragged_masks, tiny_config
from training.data import Loaded
from training.meter import Meter
from training.world import World


def counted(batch: Batch, masks: list[list[int]], num_steps: int) -> int:
    """Row by row: 2 operations a weight and pass; forward, input gradient, weight gradient."""
    c = batch.aux.shape[1] // 3
    config = tiny_config()
    q, kv = config.num_attention_heads * config.head_dim, 2 * 2 * config.head_dim
    total = 2 * batch.final.shape[0] * c * config.draft_vocab_size  # the teacher only looks
    for mask in masks:
        for t in range(len(mask)):
            total += 2 * 2 * (3 * c * c)  # fc: no gradient of its inputs
            total += 2 * 2 * c * (q + kv)  # token half of q, k, v: likewise
            total += 3 * 2 * c * kv  # hidden half of step-0 keys and values
            for k in range(num_steps):
                drafted = mask[t + 1 : t + 3 + k]
                if len(drafted) < k + 2 or not all(drafted):
                    break
                weights = 2 * c * q + 3 * c * config.intermediate_size
                weights += c * config.draft_vocab_size + (c * kv if k else 0)
                total += 3 * 2 * weights
                total += (4 + 10) * q * (t + 1 + k)  # scores and mix, and their backward pass
    return total


@pytest.mark.parametrize("num_steps", [1, 3])
def test_useful_flops_are_those_of_every_row_and_step(num_steps: int) -> None:
    masks, config = ragged_masks(), tiny_config()
    batch = make_batch(masks, config)
    assert useful_flops(batch, config, num_steps) == counted(batch, masks, num_steps)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_the_meter_divides_by_time_and_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("training.meter.time.perf_counter", lambda: now[0])
    world = World(rank=0, size=1, device=torch.device("cpu"))
    meter = Meter(world, peak_tflops=0.5)
    batch = make_batch([[0, 1, 1], [1]], tiny_config())

    def slow():
        for _ in range(2):
            now[0] += 0.5
            yield Loaded(batch=batch, numbers=[0, 1], generated=3, flops=1e11)

    assert len(meter.take(slow(), 2)) == 2
    now[0] = 14.0
    found = meter.values()
    assert found["train/tokens_per_s"] == 8 / 4 and found["train/supervised_tokens_per_s"] == 6 / 4
    assert found["train/data_wait"] == 0.25 and found["train/mfu"] == pytest.approx(0.1)
    assert 0.05 < found["train/peak_memory_gb"] < 100
    without = Meter(world, None)
    now[0] += 1
    assert "train/mfu" not in without.values()
