import numpy as np
import pytest
import torch

from eagle3.errors import UserError
from eagle3.store import codecs
from eagle3.store.codecs import CODECS, BlockFp8, Cast, Format, RotatedInt, hadamard

FORMATS: dict[str, Format] = {
    "bf16": Cast(torch.bfloat16), "fp32": Cast(torch.float32), "fp8": BlockFp8(128),
    "int8": RotatedInt(8, 64), "int6": RotatedInt(6, 32), "int4": RotatedInt(4, 32),
}  # fmt: skip


def states(width: int = 384, rows: int = 64) -> torch.Tensor:
    """Rows like hidden states: a few channels hundreds of times larger than the rest."""
    torch.manual_seed(0)
    x = torch.randn(rows, width)
    x[:, 7] *= 300
    x[:, width // 2] *= 50
    return x


def error(decoded: torch.Tensor, x: torch.Tensor, apart_from: int = 0) -> float:
    """Relative error of the values outside the blocks of `apart_from` values with outliers."""
    plain = torch.ones(x.shape[1], dtype=torch.bool)
    for channel in (7, x.shape[1] // 2):
        start = channel // apart_from * apart_from if apart_from else channel
        plain[start : start + max(apart_from, 1)] = False
    return ((decoded.float() - x)[:, plain].norm() / x[:, plain].norm()).item()


@pytest.mark.parametrize(
    ("name", "apart", "bound"),
    [
        ("fp32", 0, 0), ("bf16", 0, 0.003), ("fp8", 0, 0.03),
        ("int8", 64, 0.01), ("int6", 32, 0.035), ("int4", 32, 0.15),
    ],
)  # fmt: skip
def test_reconstruction_error(name: str, apart: int, bound: float) -> None:
    x = states()
    assert error(FORMATS[name].decode(FORMATS[name].encode(x)), x, apart) <= bound


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_decode_on_their_own_and_size_is_as_promised(name: str) -> None:
    x, form = states(), FORMATS[name]
    encoded = form.encode(x)
    assert sum(t[0].nbytes for t in encoded.values()) == form.bytes_per_row(x.shape[1])
    whole = form.decode(encoded)
    part = form.decode({k: v[10:13] for k, v in encoded.items()})
    assert torch.equal(part, whole[10:13])
    pieces = [form.encode(p) for p in x.split([1, 40, 23])]
    for key, tensor in encoded.items():
        assert torch.equal(torch.cat([p[key] for p in pieces]), tensor), "depends on other rows"
    assert form.decode(form.encode(x[:0])).shape == (0, x.shape[1])


@pytest.mark.parametrize("name", ["fp8", "int4", "int6", "int8"])
@pytest.mark.parametrize("value", [0.0, 1e-20, 3e4])
def test_extreme_rows_stay_finite(name: str, value: float) -> None:
    x = torch.full((2, 128), value)
    decoded = FORMATS[name].decode(FORMATS[name].encode(x)).float()
    torch.testing.assert_close(decoded, x, rtol=0.13, atol=1e-19)


@pytest.mark.parametrize("name", ["fp8", "int4", "int6", "int8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_shows_after_decoding(name: str, bad: float) -> None:
    """Checks look at decoded states: encoding must not make a broken state look sound."""
    x = states()
    x[3, 100] = bad
    decoded = FORMATS[name].decode(FORMATS[name].encode(x)).float()
    assert not torch.isfinite(decoded[3]).all()
    assert torch.isfinite(decoded[[0, 1, 2, 4]]).all()


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_every_level_survives_packing(bits: int) -> None:
    levels = torch.arange(2**bits, dtype=torch.int32).repeat(3, 1)
    levels[1] |= 0x4B << 24  # as a float's exponent
    packed = codecs._pack(levels, bits)
    assert packed.shape == (3, 2**bits * bits // 8)
    assert torch.equal(codecs._unpack(packed, bits).int(), levels & 255)


def plain_bytes(form: BlockFp8 | RotatedInt, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a block format writes, one plain step after the other."""
    blocks = x.float().unflatten(1, (-1, form.block))
    largest = codecs.FP8_MAX if isinstance(form, BlockFp8) else 2 ** (form.bits - 1) - 1
    if isinstance(form, RotatedInt):
        blocks = blocks @ hadamard(form.block, x.device)
    exact = (blocks.abs().amax(dim=-1, keepdim=True) / largest).clamp(min=1e-30)
    scales = exact.bfloat16()
    scales = torch.where(scales.float() < exact, scales * (1 + 2**-7), scales)
    kept = {"scales": scales.squeeze(-1)}
    values = blocks / scales.float()
    if isinstance(form, BlockFp8):
        values = values.clamp(-largest, largest).to(torch.float8_e4m3fn)
        return kept | {"values": values.flatten(1)}
    levels = (values.round().clamp(-largest, largest) + largest + 1).to(torch.uint8).flatten(1)
    bits = np.unpackbits(levels.numpy()[..., None], axis=-1, bitorder="little")[..., : form.bits]
    packed = np.packbits(bits.reshape(len(x), -1), axis=1, bitorder="little")
    return kept | {"values": torch.from_numpy(packed)}


@pytest.mark.parametrize("name", ["fp8", "int4", "int6", "int8"])
@pytest.mark.parametrize(
    "scale", [1e-38, 1e-30, 1e-29, 1e-20, 1e-3, 1.0, 300.0, 3e4, 1e20, 1e36]
)  # fmt: skip
def test_bytes_are_those_of_the_plain_steps(name: str, scale: float) -> None:
    """Of random values in float32 and bf16, of ties, of blocks of one value, of outliers."""
    form, x = FORMATS[name], states() / 300
    rows = {
        "float32": x,
        "bf16": x.bfloat16(),
        "ties": (x * 64).round() / 64,
        "constant": torch.ones_like(x) * x[:, :1],
        "one of a block": x * (torch.arange(x.shape[1]) % 128 == 7),
        "zero": x * 0,
    }
    for kind, values in rows.items():
        values = values * scale
        assert torch.isfinite(values).all()
        wanted, found = plain_bytes(form, values), form.encode(values)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            equal = torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8))
            assert equal, f"{key} of {kind}"


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_halves_round_to_even_levels(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level and every half between two, in blocks of scale 1."""
    monkeypatch.setattr(codecs, "hadamard", lambda size, device: torch.eye(size))
    largest = 2 ** (bits - 1) - 1
    halves = torch.arange(-2 * largest, 2 * largest + 1) / 2
    blocks = torch.nn.functional.pad(halves, (0, -len(halves) % 31)).unflatten(0, (-1, 31))
    blocks = torch.nn.functional.pad(blocks, (1, 0), value=largest)
    encoded = RotatedInt(bits, 32).encode(blocks)
    assert (encoded["scales"] == 1).all()
    levels = codecs._unpack(encoded["values"], bits).int() - largest - 1
    assert torch.equal(levels, torch.from_numpy(np.rint(blocks.numpy())).int())


def test_a_width_that_cannot_be_rotated_is_refused() -> None:
    with pytest.raises(UserError, match="multiple of 32"):
        FORMATS["int4"].encode(torch.ones(1, 100))


def test_fp8_takes_any_width() -> None:
    x = torch.randn(3, 100)
    assert FORMATS["fp8"].decode(FORMATS["fp8"].encode(x)).shape == x.shape


def test_hadamard_is_its_own_inverse() -> None:
    h = hadamard(64, torch.device("cpu"))
    torch.testing.assert_close(h @ h, torch.eye(64))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_codec_keeps_both_kinds_of_states(name: str) -> None:
    codec, x = codecs.get(name), states(rows=4)
    encoded = codec.encode(aux=x, final=x[:2, :128])
    assert all(key.startswith(("aux.", "final.")) for key in encoded)
    assert codec.decode("aux", encoded).shape == x.shape
    assert codec.decode("final", encoded).shape == (2, 128)
    aux, final = codec.bytes_per_row(3, 128)
    assert sum(t.nbytes for t in encoded.values()) == 4 * aux + 2 * final
