"""Adam's two moments as float32, bfloat16, or 8 bits in blocks.

**bfloat16** has 8 significant bits. With beta2 = 0.999 a step changes the second moment by about one part in a
thousand, less than half of the last bit, so rounding to nearest would never let it shrink. It is rounded
stochastically: up with the probability that makes the mean exact. The first moment moves by a tenth per step and is
rounded to nearest.

**8bit** keeps one code per element and, per block of 256, the largest magnitude as float32. Blocks keep an outlier
from spoiling more than its neighbours, and codes are denser near zero: both as in Dettmers et al. 2022
(arXiv:2110.02861). Their dynamic tree is a table; here a value is a power of its code, the fourth for the signed first
moment and the eighth for the second, whose square root is what the step divides by. Powers need roots and products
only, which are vector instructions where a table would be a gather. The largest codes are 3 % apart, and the smallest
value is 4e-9 of a block's largest. Both codes are rounded stochastically: to nearest, a first moment below 6e-4 of its
block's largest would stay for ever after its gradient has gone, while what it is divided by shrinks. A second moment
that is not zero never becomes zero, so that nothing is divided by eps alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from elixir.hardware.process_memory import HEAP
from elixir.kernels.adam.adam_rule import numbers_on, rounded_root
from elixir.optimizer_states import (
    BLOCK_NUMEL,
    SIGNED_MAX,
    UNSIGNED_MAX,
    MomentKind,
    check_kind,
    decode_signed,
    decode_unsigned,
    fourth_power,
    moments_size,
)

_TINY = 1e-30
"""Smallest scale that is divided by; a block below it counts as zero."""


@dataclass(frozen=True)
class Moments:
    """Both moments of a flat tensor. Codes are padded to whole blocks; the scales are there with 8 bits only."""

    kind: MomentKind
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    exp_avg_scale: torch.Tensor | None = None
    exp_avg_sq_scale: torch.Tensor | None = None
    first: int = field(default=0, kw_only=True)
    """The position of the first element: elements are named by positions in a longer tensor, of which these moments may
    lack some. With 8 bits it is a multiple of `BLOCK_NUMEL`."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that exist, in the order in which the step functions take them."""
        if self.exp_avg_scale is None or self.exp_avg_sq_scale is None:
            return self.exp_avg, self.exp_avg_sq
        return self.exp_avg, self.exp_avg_scale, self.exp_avg_sq, self.exp_avg_sq_scale

    def cut(self, start: int, stop: int) -> Moments:
        """Views of the moments of elements `start` to `stop`, which then count from 0; with 8 bits, of the blocks that
        hold them."""
        start, stop = start - self.first, stop - self.first
        if self.exp_avg_scale is None or self.exp_avg_sq_scale is None:
            return Moments(self.kind, self.exp_avg[start:stop], self.exp_avg_sq[start:stop])
        blocks = slice(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
        part = slice(blocks.start * BLOCK_NUMEL, blocks.stop * BLOCK_NUMEL)
        scales = self.exp_avg_scale[blocks], self.exp_avg_sq_scale[blocks]
        return Moments(self.kind, self.exp_avg[part], self.exp_avg_sq[part], *scales)


class MasterStates(NamedTuple):
    """Master weights and their moments, all flat."""

    master: torch.Tensor
    moments: Moments


def moment_numel(numel: int, kind: MomentKind) -> int:
    """Elements of one moment of a tensor of `numel`, padding included."""
    return -(-numel // BLOCK_NUMEL) * BLOCK_NUMEL if kind == "8bit" else numel


def make_moments(numel: int, moments: str = "float32", device: torch.device | str = "cpu") -> Moments:
    """Zero moments of a flat tensor.

    Args:
        numel: of the tensor.
        moments: their kind.
        device: where they are.
    """

    def make(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    kind = check_kind(moments)
    HEAP.trim_if_over(moments_size(kind).nbytes(numel))
    if kind != "8bit":
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        return Moments(kind, make(numel, dtype), make(numel, dtype))
    blocks = -(-numel // BLOCK_NUMEL)
    return Moments(
        kind,
        make(moment_numel(numel, kind), torch.int8),
        make(moment_numel(numel, kind), torch.uint8),
        make(blocks, torch.float32),
        make(blocks, torch.float32),
    )


def read_moments(moments: Moments, numel: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments of `numel` elements from `start` on as flat float32 tensors."""
    stop = start + numel
    if moments.kind != "8bit":
        part = moments.cut(start, stop)
        return part.exp_avg.float(), part.exp_avg_sq.float()
    rows = _rows(moments, start, stop)
    before = start % BLOCK_NUMEL
    avg, square = decode_signed(rows[0], rows[1]), decode_unsigned(rows[2], rows[3])
    return avg.view(-1)[before : before + numel], square.view(-1)[before : before + numel]


def write_moments(
    moments: Moments, start: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: int | None = None
) -> None:
    """Puts flat float32 moments in place from element `start` on: of a step with this number, or loaded ones (None).

    Loaded ones are rounded to the nearest that the kind has. bfloat16: within 2^-9 of each value. 8bit: within half the
    distance of two codes, which is 1.6 % of the largest in a block of 256 and less further down. In 8-bit blocks that
    these elements do not fill, the others keep their codes where the scale stays, and are rounded once more where not;
    in a step without bias.
    """
    numel = exp_avg.numel()
    if moments.kind == "8bit":
        if numel:
            _write_8bit(moments, start, exp_avg, exp_avg_sq, step)
        return
    part = moments.cut(start, start + numel)
    part.exp_avg.copy_(exp_avg)
    if moments.kind == "bfloat16" and step is not None:
        exp_avg_sq = _rounded_at_random(exp_avg_sq, _noise(numel, noise_seed(step, start, exp_avg_sq.device)))
    part.exp_avg_sq.copy_(exp_avg_sq)


def noise_seed(step: int, offset: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """The seed of `_noise`: a number that depends on the step, and the position of the first element.

    So a step is rounded alike whether it runs at once or in pieces, and alike in every run.
    """
    seed = (step * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64 >> 32
    offset = (offset + 2**31) % 2**32 - 2**31  # positions count modulo 2^32, as the sums with them do
    return numbers_on(device, (seed - 2**31, offset), torch.int32)


def _rounded_at_random(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """float32 values that bfloat16 has, each rounded so that the mean is exact."""
    # A float32 is a bfloat16 with 16 more bits: a random number added to those carries as often as it should.
    rounded = (values.view(torch.int32) + (noise & 0xFFFF)) & -0x10000
    # Where all exponent bits are set (inf, nan), a carry would make another number of it.
    return torch.where(values.isfinite(), rounded.view(torch.float32), values)


def _rows(moments: Moments, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the blocks that hold elements `start` to `stop`: codes as ``[blocks, BLOCK_NUMEL]``, and scales."""
    part = moments.cut(start, stop)
    codes, codes_sq = part.exp_avg.view(-1, BLOCK_NUMEL), part.exp_avg_sq.view(-1, BLOCK_NUMEL)
    scale, scale_sq = cast("tuple[torch.Tensor, torch.Tensor]", (part.exp_avg_scale, part.exp_avg_sq_scale))
    return codes, scale, codes_sq, scale_sq


def _write_8bit(
    moments: Moments, start: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: int | None
) -> None:
    codes, scale, codes_sq, scale_sq = _rows(moments, start, start + exp_avg.numel())
    low, device = start % BLOCK_NUMEL, exp_avg.device
    high = low + exp_avg.numel()
    ends = (low, codes.numel() - high)
    avg, square = ((F.pad(each, ends) if any(ends) else each).view_as(codes) for each in (exp_avg, exp_avg_sq))
    mine: torch.Tensor | None = None
    if any(ends):
        mine = torch.zeros(codes.numel(), dtype=torch.bool, device=device)
        mine[low:high] = True
        mine = mine.view_as(codes)
        avg = torch.where(mine, avg, decode_signed(codes, scale))
        square = torch.where(mine, square, decode_unsigned(codes_sq, scale_sq))
    largest, largest_sq = avg.abs().amax(1), square.amax(1)
    if step is None:
        noise = noise_sq = torch.full_like(avg, 0.5)
    else:
        bits = _noise(codes.numel(), noise_seed(step, start - low, device)).view_as(codes)
        if mine is not None:
            # Values that were stepped already were rounded with this noise: the same noise again would be a bias.
            other = _noise(codes.numel(), noise_seed(-1 - step * BLOCK_NUMEL - low, start - low, device))
            bits = torch.where(mine, bits, other.view_as(codes))
        noise, noise_sq = ((half & 0xFFFF).float() * 2.0**-16 for half in (bits, bits >> 16))
    new, new_sq = _encode_signed(avg, largest, noise), _encode_unsigned(square, largest_sq, noise_sq)
    if mine is not None:
        new = torch.where(mine | (largest != scale)[:, None], new, codes.float())
        new_sq = torch.where(mine | (largest_sq != scale_sq)[:, None], new_sq, codes_sq.float())
    for target, values in ((codes, new), (codes_sq, new_sq), (scale, largest), (scale_sq, largest_sq)):
        target.copy_(values)


def _encode_signed(values: torch.Tensor, scale: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Codes as floats; up or down so that the mean of what is read back is the value."""
    share = values.abs() * (1.0 / scale.clamp_min(_TINY))[:, None]
    below = (rounded_root(rounded_root(share)) * SIGNED_MAX).floor().clamp(max=SIGNED_MAX - 1.0)
    lower = fourth_power(below * (1.0 / SIGNED_MAX))
    upper = fourth_power((below + 1.0) * (1.0 / SIGNED_MAX))
    code = below + (noise * (upper - lower) < share - lower).float()
    return torch.where(values < 0, -code, code)


def _encode_unsigned(values: torch.Tensor, scale: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Encodes as `_encode_signed` does, but keeps values above zero that are not zero."""
    share = values * (1.0 / scale.clamp_min(_TINY))[:, None]
    below = (rounded_root(rounded_root(rounded_root(share))) * UNSIGNED_MAX).floor().clamp(max=UNSIGNED_MAX - 1.0)
    lower = fourth_power(below * (1.0 / UNSIGNED_MAX))
    upper = fourth_power((below + 1.0) * (1.0 / UNSIGNED_MAX))
    lower, upper = lower * lower, upper * upper
    code = below + (noise * (upper - lower) < share - lower).float()
    return torch.where(values > 0, code.clamp_min(1.0), code)


def _noise(numel: int, seed: torch.Tensor) -> torch.Tensor:
    """32 random bits per element as int32: the finaliser of MurmurHash3 (Appleby, public domain) over the position.

    Needs no state and no generator, so it is the same on every device and in the C++ kernel.
    """
    bits = torch.arange(numel, dtype=torch.int32, device=seed.device) + seed[1]
    bits = bits * -0x61C8864F + seed[0]  # an odd number near 2^32 over the golden ratio spreads neighbours
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * -0x7A143595
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits * -0x3D4D51CB
    return bits ^ ((bits >> 16) & 0xFFFF)
