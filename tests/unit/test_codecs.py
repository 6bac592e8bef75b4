import pytest
import torch

from eagle3.errors import UserError
from eagle3.store.codecs import CODECS, get, hadamard


def states(width: int = 384, rows: int = 64) -> torch.Tensor:
    """Rows like hidden states: a few channels hundreds of times larger than the rest."""
    torch.manual_seed(0)
    x = torch.randn(rows, width)
    x[:, 7] *= 300
    x[:, width // 2] *= 50
    return x


def error(codec: str, x: torch.Tensor) -> float:
    """Relative error of the values that are not outliers."""
    decoded = get(codec).decode(get(codec).encode(x)).float()
    plain = torch.ones(x.shape[1], dtype=torch.bool)
    plain[[7, x.shape[1] // 2]] = False
    return ((decoded - x)[:, plain].norm() / x[:, plain].norm()).item()


@pytest.mark.parametrize(("codec", "bound"), [("fp32", 0), ("bf16", 0.003), ("fp8", 0.03)])
def test_reconstruction_error(codec: str, bound: float) -> None:
    assert error(codec, states()) <= bound


def test_int4_keeps_ordinary_rows_within_its_levels() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 384)
    decoded = get("int4").decode(get("int4").encode(x)).float()
    assert (decoded - x).norm() < 0.12 * x.norm()


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_rows_decode_on_their_own_and_size_is_as_promised(codec: str) -> None:
    x = states()
    encoded = get(codec).encode(x)
    assert sum(t[0].nbytes for t in encoded.values()) == get(codec).bytes_per_row(x.shape[1])
    whole = get(codec).decode(encoded)
    part = get(codec).decode({k: v[10:13] for k, v in encoded.items()})
    assert torch.equal(part, whole[10:13])
    assert get(codec).decode(get(codec).encode(x[:0])).shape == (0, x.shape[1])


@pytest.mark.parametrize("codec", ["fp8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1e-20, 3e4])
def test_extreme_rows_stay_finite(codec: str, value: float) -> None:
    x = torch.full((2, 128), value)
    decoded = get(codec).decode(get(codec).encode(x)).float()
    torch.testing.assert_close(decoded, x, rtol=0.13, atol=1e-19)


def test_a_width_int4_cannot_pack_is_refused() -> None:
    with pytest.raises(UserError, match="multiple of 64"):
        get("int4").encode(torch.ones(1, 100))


def test_fp8_takes_any_width() -> None:
    x = torch.randn(3, 100)
    assert get("fp8").decode(get("fp8").encode(x)).shape == x.shape


def test_hadamard_is_its_own_inverse() -> None:
    h = hadamard(64, torch.device("cpu"))
    torch.testing.assert_close(h @ h, torch.eye(64))
