"""Adam's two moments as float32, bfloat16, or 8 bits in blocks, and a step with each.

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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch

from elixir.hardware.process_memory import HEAP
from elixir.kernels.adam.adam_rule import adam_, adam_rule, numbers_on, rounded_root, write_weights_
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


def write_moments(moments: Moments, start: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """Puts flat float32 moments in place from element `start` on, rounded to the nearest that the kind has.

    bfloat16: within 2^-9 of each value. 8bit: within half the distance of two codes, which is 1.6 % of the largest in a
    block of 256 and less further down; what else is in a block that gets another scale is rounded anew.
    """
    stop = start + exp_avg.numel()
    if moments.kind != "8bit":
        part = moments.cut(start, stop)
        part.exp_avg.copy_(exp_avg)
        part.exp_avg_sq.copy_(exp_avg_sq)
        return
    if start == stop:
        return
    rows = _rows(moments, start, stop)
    before = start % BLOCK_NUMEL
    behind = rows[0].numel() - before - exp_avg.numel()
    avg, square = (torch.nn.functional.pad(values, (before, behind)) for values in (exp_avg, exp_avg_sq))
    mine = torch.zeros(rows[0].numel(), dtype=torch.bool, device=avg.device)
    mine[before : before + exp_avg.numel()] = True
    half = torch.full_like(avg, 0.5).view_as(rows[0])
    _merge(rows, avg.view_as(rows[0]), square.view_as(rows[0]), mine.view_as(rows[0]), half, half)


def noise_seed(step: int, offset: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """The seed of `_noise`: a number that depends on the step, and the position of the first element.

    So a step is rounded alike whether it runs at once or in pieces, and alike in every run.
    """
    seed = (step * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64 >> 32
    offset = (offset + 2**31) % 2**32 - 2**31  # positions count modulo 2^32, as the sums with them do
    return numbers_on(device, (seed - 2**31, offset), torch.int32)


def adam_bfloat16_(
    gradient: torch.Tensor,
    master: torch.Tensor,
    weight_out: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: torch.Tensor,
    seed: torch.Tensor,
) -> None:
    """`adam_` with bfloat16 moments; `seed` is of `noise_seed`."""
    new_master, new_avg, new_sq = adam_rule(gradient, master, exp_avg.float(), exp_avg_sq.float(), scalars)
    write_weights_(new_master, master, weight_out)
    exp_avg.copy_(new_avg)
    # A float32 is a bfloat16 with 16 more bits: a random number added to those carries as often as it should.
    bits = new_sq.view(torch.int32)
    rounded = (bits + (_noise(gradient.numel(), seed) & 0xFFFF)) & -0x10000
    # Where all exponent bits are set (inf, nan), a carry would make another number of it.
    exp_avg_sq.copy_(torch.where(new_sq.isfinite(), rounded.view(torch.float32), new_sq))


def adam_8bit_(  # noqa: PLR0913 - compiled code takes its tensors one by one
    gradient: torch.Tensor,
    master: torch.Tensor,
    weight_out: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_scale: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_sq_scale: torch.Tensor,
    scalars: torch.Tensor,
    seed: torch.Tensor,
    find_scales: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    encode: Callable[..., None] | None = None,
) -> None:
    """`adam_` with 8-bit moments; all but the scales are given as blocks, of shape ``[blocks, BLOCK_NUMEL]``.

    In two passes, the first of which only finds the new scales: so that neither, compiled, keeps new moments in memory
    until their scale is known. `find_scales` and `encode` are the passes where they are compiled.
    """
    state = (exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, scalars)
    scale, scale_sq = (find_scales or find_8bit_scales)(gradient, master, *state)
    (encode or encode_8bit_)(gradient, master, weight_out, *state, seed, scale, scale_sq)
    exp_avg_scale.copy_(scale)
    exp_avg_sq_scale.copy_(scale_sq)


def find_8bit_scales(
    gradient: torch.Tensor,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_scale: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_sq_scale: torch.Tensor,
    scalars: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per block, the largest new moments; pure."""
    avg, square = decode_signed(exp_avg, exp_avg_scale), decode_unsigned(exp_avg_sq, exp_avg_sq_scale)
    _, new_avg, new_sq = adam_rule(gradient, master, avg, square, scalars)
    return new_avg.abs().amax(1), new_sq.amax(1)


def encode_8bit_(  # noqa: PLR0913 - compiled code takes its tensors one by one
    gradient: torch.Tensor,
    master: torch.Tensor,
    weight_out: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_scale: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_sq_scale: torch.Tensor,
    scalars: torch.Tensor,
    seed: torch.Tensor,
    scale: torch.Tensor,
    scale_sq: torch.Tensor,
) -> None:
    """New weights, and codes by new scales; the scales themselves are left as they were."""
    avg, square = decode_signed(exp_avg, exp_avg_scale), decode_unsigned(exp_avg_sq, exp_avg_sq_scale)
    new_master, new_avg, new_sq = adam_rule(gradient, master, avg, square, scalars)
    write_weights_(new_master, master, weight_out)
    noise = _noise(gradient.numel(), seed).view(-1, BLOCK_NUMEL)
    exp_avg.copy_(_encode_signed(new_avg, scale, (noise & 0xFFFF).float() * 2.0**-16))
    exp_avg_sq.copy_(_encode_unsigned(new_sq, scale_sq, ((noise >> 16) & 0xFFFF).float() * 2.0**-16))


def adam_8bit_part_(
    gradient: torch.Tensor, master: torch.Tensor, moments: Moments, scalars: torch.Tensor, step: int, start: int
) -> None:
    """`adam_` for elements of one block, whose other elements belong to other parameters, or to none.

    The others keep their moments: to the bit where the scale stays, else rounded once more, without bias.

    Args:
        gradient: flat.
        master: flat float32 weights; updated.
        moments: of what these are part of.
        scalars: of `adam_scalars`.
        step: number of this step.
        start: place of the first element in what `moments` are of.
    """
    low = start % BLOCK_NUMEL
    high = low + master.numel()
    rows = _rows(moments, start, start + master.numel())
    row_gradient, row = (
        torch.nn.functional.pad(tensor, (low, BLOCK_NUMEL - high)).view(1, -1) for tensor in (gradient, master)
    )
    avg, square = decode_signed(rows[0], rows[1]), decode_unsigned(rows[2], rows[3])
    new_row, new_avg, new_sq = adam_rule(row_gradient, row, avg, square, scalars)
    places = torch.arange(BLOCK_NUMEL, device=master.device)
    mine = ((places >= low) & (places < high)).view(1, -1)
    # Values that were stepped already were rounded with this noise: the same noise again would be a bias.
    own, other = (
        _noise(BLOCK_NUMEL, noise_seed(number, start - low, master.device)).view(1, -1)
        for number in (step, -1 - step * BLOCK_NUMEL - low)
    )
    noise = torch.where(mine, own, other)
    _merge(
        rows, new_avg, new_sq, mine, (noise & 0xFFFF).float() * 2.0**-16, ((noise >> 16) & 0xFFFF).float() * 2.0**-16
    )
    master.copy_(new_row[0, low:high])


STEPS: dict[MomentKind, Callable[..., None]] = {"float32": adam_, "bfloat16": adam_bfloat16_, "8bit": adam_8bit_}
"""The step function of each kind."""


def step_arguments(
    gradient: torch.Tensor,
    states: MasterStates,
    weight_out: torch.Tensor | None,
    scalars: torch.Tensor,
    step: int,
    part: slice,
    first: int = 0,
) -> list[torch.Tensor | None]:
    """Arguments of the step function of the moments' kind, for a part of all elements; with 8 bits, whole blocks.

    `first` is the position of element 0 in the tensor by whose positions moments are rounded.
    """
    moments = states.moments.cut(part.start, part.stop)
    weights = [None if tensor is None else tensor[part] for tensor in (gradient, states.master, weight_out)]
    if moments.kind == "8bit":
        rows = [None if tensor is None else tensor.view(-1, BLOCK_NUMEL) for tensor in weights]
        arguments: list[torch.Tensor | None] = [*rows, *_rows(moments, 0, moments.exp_avg.numel())]
    else:
        arguments = [*weights, *moments.tensors()]
    arguments.append(scalars)
    if moments.kind != "float32":
        arguments.append(noise_seed(step, first + part.start, states.master.device))
    return arguments


def _rows(moments: Moments, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the blocks that hold elements `start` to `stop`: codes as ``[blocks, BLOCK_NUMEL]``, and scales."""
    part = moments.cut(start, stop)
    codes, codes_sq = part.exp_avg.view(-1, BLOCK_NUMEL), part.exp_avg_sq.view(-1, BLOCK_NUMEL)
    scale, scale_sq = cast("tuple[torch.Tensor, torch.Tensor]", (part.exp_avg_scale, part.exp_avg_sq_scale))
    return codes, scale, codes_sq, scale_sq


def _merge(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    new_avg: torch.Tensor,
    new_sq: torch.Tensor,
    mine: torch.Tensor,
    noise: torch.Tensor,
    noise_sq: torch.Tensor,
) -> None:
    """New values where `mine`; what else is in the blocks stays, and keeps its codes where the scale stays."""
    codes, scale, codes_sq, scale_sq = rows
    avg = torch.where(mine, new_avg, decode_signed(codes, scale))
    square = torch.where(mine, new_sq, decode_unsigned(codes_sq, scale_sq))
    largest, largest_sq = avg.abs().amax(1), square.amax(1)
    changed, changed_sq = mine | (largest != scale)[:, None], mine | (largest_sq != scale_sq)[:, None]
    codes.copy_(torch.where(changed, _encode_signed(avg, largest, noise), codes.float()))
    codes_sq.copy_(torch.where(changed_sq, _encode_unsigned(square, largest_sq, noise_sq), codes_sq.float()))
    scale.copy_(largest)
    scale_sq.copy_(largest_sq)


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

    Needs no state and no generator, so it is the same on every device and compiles into the step's own loop.
    """
    bits = torch.arange(numel, dtype=torch.int32, device=seed.device) + seed[1]
    bits = bits * -0x61C8864F + seed[0]  # an odd number near 2^32 over the golden ratio spreads neighbours
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * -0x7A143595
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits * -0x3D4D51CB
    return bits ^ ((bits >> 16) & 0xFFFF)
