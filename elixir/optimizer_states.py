"""Bytes of optimizer states and master weights, by family of optimizer and kind of moments.

Adam's two moments are kept as float32, bfloat16, or 8 bits in blocks. This file has their names, their sizes and what
codes mean; `elixir.kernels` steps with them. An average of the weights (EMA) is one more state of any family. Plans,
the search, the runtime and checkpoints count by this file alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from elixir.artifact import NOT_NEGATIVE, POSITIVE, check_bounds
from elixir.errors import InputError, InputTypeError, unknown_name

if TYPE_CHECKING:
    import torch

MomentKind = Literal["float32", "bfloat16", "8bit"]

FP32_BYTES = 4
MASTER_BYTES = 4
"""Bytes of one element of a master weight, kept if the weight has fewer bits or lies elsewhere than its states:
float32, or as wide as the weight if that is wider (`master_bytes`)."""

BLOCK_NUMEL = 256
"""Elements that share a scale. Dettmers et al. use 2048; 256 costs 1/64 byte per element and keeps outliers more to
themselves."""

SIGNED_MAX, UNSIGNED_MAX = 127.0, 255.0
"""Largest codes of the first and of the second moment."""

LARGEST_PIECE_NUMEL = 2**23
"""A step that is not compiled works on so many elements at once, or fewer. 32 MiB of float32: fits the second-level
cache of an A100 or H100, and hides the launches."""
LARGEST_HOST_PIECE_NUMEL = 2**19
"""The same on the host. Plans do not count the temporaries of such a step with moments in fewer bits: at most 15 or 30
MB, for any number of threads. A thread's part stays in its core's cache."""
STEP_TEMPORARY_BYTES: dict[MomentKind, int] = {"bfloat16": 28, "8bit": 58}
"""Bytes per element of a piece that such a step holds at most, next to its arguments. Counted on the CPU, storage by
storage."""


@dataclass(frozen=True)
class StateSize:
    """Bytes of optimizer states by number of elements: a whole block's for every block that is begun.

    Of weights up to float32. Those of wider weights are as much wider, as `torch.optim` makes them.

    Raises:
        InputError: a negative size, or blocks without elements.
    """

    block_bytes: Annotated[int, NOT_NEGATIVE]
    """States of one block, master weights not included."""
    block_numel: Annotated[int, POSITIVE] = 1

    def __post_init__(self) -> None:
        check_bounds(self)

    def nbytes(self, numel: int, weight_bytes: int = FP32_BYTES) -> int:
        """Exact bytes of a flat tensor's states.

        Args:
            numel: its elements.
            weight_bytes: of one of them.
        """
        return -(-numel // self.block_numel) * self.block_bytes * max(1, weight_bytes // FP32_BYTES)

    def least_per_numel(self, weight_bytes: int = FP32_BYTES) -> float:
        """Bytes per element of whole blocks; no number of elements takes less."""
        return self.block_bytes / self.block_numel * max(1, weight_bytes // FP32_BYTES)

    @property
    def averaged(self) -> StateSize:
        """The same with an average of the weights. Shards with blocks are whole blocks, so that this is exact."""
        return StateSize(self.block_bytes + MASTER_BYTES * self.block_numel, self.block_numel)


ADAM_FAMILIES = ("Adam", "AdamW")
"""Optimizers whose states are the two moments that are known in several kinds."""
NO_OPTIMIZER = "none"
"""The optimizer of a step that only evaluates or generates: it has no states."""
LOOPS = ("foreach", "for-loop")
"""How `torch.optim` steps Adam without ``fused=True``: ``AdamW (for-loop)`` is the family AdamW, stepped so. No kernel
of this project has those bits."""

_SIZES: dict[MomentKind, StateSize] = {
    "float32": StateSize(2 * FP32_BYTES),
    "bfloat16": StateSize(2 * 2),
    "8bit": StateSize(2 * (BLOCK_NUMEL + FP32_BYTES), BLOCK_NUMEL),  # a byte per element, a float32 scale per block
}


_STATE_BYTES = {
    # Of weights up to float32; `StateSize` knows wider ones.
    # Two fp32 moments (Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101).
    "Adam": 2 * FP32_BYTES,
    "AdamW": 2 * FP32_BYTES,
    # Adam's two, and the largest second moment so far (Reddi et al., ICLR 2018): ``amsgrad=True``.
    "AMSGrad": 3 * FP32_BYTES,
    # One fp32 momentum buffer.
    "SGD": FP32_BYTES,
    # One fp32 sum of squares (Duchi et al., JMLR 12, 2011).
    "Adagrad": FP32_BYTES,
    # One fp32 average of squares, without momentum and centering.
    "RMSprop": FP32_BYTES,
    # One fp32 moment (Chen et al., arXiv:2302.06675).
    "Lion": FP32_BYTES,
}
"""Bytes of states per element, by family."""

MATRIX_FAMILIES = ("Muon",)
"""Optimizers that step whole matrices. ``Muon + AdamW`` names two: one for matrices, one for all other parameters."""
MATRIX_STATES = StateSize(FP32_BYTES)
"""States of chunks that are stepped whole: one fp32 momentum (Jordan et al., https://kellerjordan.github.io/posts/muon,
2024)."""
DIRECTION_BYTES = 2
"""Bytes of an element of a matrix that is made orthogonal, in bfloat16 whatever the dtype of the weights."""
_NEWTON_SCHULZ_STEPS = 5
_AND = " + "
AVERAGE = "ema_weights"
"""The kind of state that is an exponential average of the master weights, in their dtype."""
WITH_AVERAGE = " + EMA"
"""The end of the name of an optimizer next to which an average is kept."""


def check_kind(kind: str) -> MomentKind:
    """`kind` itself; `InputError` where it is none."""
    for known in get_args(MomentKind):
        if kind == known:
            return known  # type: ignore[no-any-return]
    raise unknown_name("kind of moments", str(kind), get_args(MomentKind))


def moments_size(moments: str = "float32") -> StateSize:
    """Bytes of both moments, exactly as `make_moments` allocates them; `InputError` if the kind is unknown."""
    return _SIZES[check_kind(moments)]


def master_bytes(weight_bytes: int) -> int:
    """Bytes of one element of a master weight, by those of the weight."""
    return max(weight_bytes, MASTER_BYTES)


EXTENT_BYTES = 4096
"""Bytes of a chunk on a disk are a multiple of this: direct transfers move whole blocks of a drive."""


def extent_bytes(numel: int, weight_bytes: int, states: StateSize) -> int:
    """Bytes on a disk of a shard's masters and states, whose weights never live there.

    Args:
        numel: elements of the shard.
        weight_bytes: of one weight.
        states: of the optimizer.
    """
    kept = numel * master_bytes(weight_bytes) + states.nbytes(numel, weight_bytes)
    return -(-kept // EXTENT_BYTES) * EXTENT_BYTES


def second_set_bytes(numel: int, weight_bytes: int, size: StateSize) -> int:
    """Bytes of new states that are made next to the old ones: masters, states, and the weights that they round to.

    Args:
        numel: elements of the shard.
        weight_bytes: of one of its weights.
        size: of its states.
    """
    rounded = weight_bytes if weight_bytes < MASTER_BYTES else 0
    return numel * (master_bytes(weight_bytes) + rounded) + size.nbytes(numel, weight_bytes)


def check_adam(optimizer: str, moments: MomentKind) -> None:
    """Refuses moments in fewer bits for an optimizer that is no Adam.

    Raises:
        InputError: it is none.
    """
    if moments != "float32" and not is_adam(optimizer):
        raise InputError(
            f"moments in {moments} exist only for {' and '.join(ADAM_FAMILIES)}, found the optimizer {optimizer}; "
            "leave moments at 'float32', or train with Adam"
        )


def matrix_room_bytes(rows: int, columns: int) -> int:
    """Bytes in which a matrix is made orthogonal: two iterates, and two square matrices of its smaller side."""
    least = min(rows, columns)
    return DIRECTION_BYTES * 2 * (rows * columns + least * least)


def matrix_flops(rows: int, columns: int) -> int:
    """FLOPs of the matrix products that make a matrix orthogonal, with torch.optim.Muon's default number of steps."""
    least, most = min(rows, columns), max(rows, columns)
    return _NEWTON_SCHULZ_STEPS * (4 * least * least * most + 2 * least**3)


def state_size(optimizer_type: str | None, moments: str = "float32") -> StateSize:
    """Bytes of optimizer states of a shard, master weights not included. Those of matrices are `MATRIX_STATES`.

    Raises:
        InputError, InputTypeError: the family or the kind of moments is unknown, or no name; the family is no Adam and
            its states are wanted in fewer bits.
    """
    family = _family(optimizer_name(optimizer_type))
    if not isinstance(moments, str):
        raise InputTypeError(f"moments is 'float32', 'bfloat16' or '8bit', got {moments!r}")
    kind = check_kind(moments)
    check_adam(family, kind)
    size = moments_size(kind) if family in ADAM_FAMILIES else StateSize(_STATE_BYTES.get(family, 0))
    return size.averaged if averages(optimizer_name(optimizer_type)) else size


def matrix_states(optimizer: str) -> StateSize:
    """Bytes of states of chunks that are stepped whole, by the `optimizer_name`."""
    return MATRIX_STATES.averaged if averages(optimizer) else MATRIX_STATES


def optimizer_name(optimizer_type: str | None) -> str:
    """The family's name in its usual spelling; after that of an Adam which of `LOOPS` steps it, if that was said.
    `NO_OPTIMIZER` for None.

    Before it may stand one of `MATRIX_FAMILIES`, such as in ``Muon + AdamW``, which ``Muon`` alone means. At the end,
    `` + EMA`` says that an average of the weights is kept.

    Raises:
        InputError, InputTypeError: the family is unknown, or no name.
    """
    if optimizer_type is None or optimizer_type == NO_OPTIMIZER:
        return NO_OPTIMIZER
    if not isinstance(optimizer_type, str):
        raise InputTypeError(f"optimizer_type is a name such as 'Adam', or None, got {optimizer_type!r}")
    given = optimizer_type.lower()
    average = WITH_AVERAGE if WITH_AVERAGE.lower() in given else ""
    given = given.replace(WITH_AVERAGE.lower(), "")
    loop = next((f" ({loop})" for loop in LOOPS if given.endswith(f" ({loop})")), "")
    of_matrices, _, rest = given.removesuffix(loop).rpartition(_AND)
    families = {name.lower(): name for name in MATRIX_FAMILIES}
    if rest in families and not of_matrices:
        of_matrices, rest = rest, "adamw"  # as those who train with Muon have it
    found = {name.lower(): name for name in _STATE_BYTES}.get(rest)
    if found is None or (of_matrices and of_matrices not in families):
        raise unknown_name("optimizer type", optimizer_type, (*_STATE_BYTES, *MATRIX_FAMILIES))
    first = families[of_matrices] + _AND if of_matrices else ""
    return first + (found + loop if found in ADAM_FAMILIES else found) + average


def averages(optimizer: str) -> bool:
    """Whether an average of the weights is kept, by the `optimizer_name`."""
    return optimizer.endswith(WITH_AVERAGE)


def without_average(optimizer: str) -> str:
    """The `optimizer_name` of the same without an average of the weights."""
    return optimizer.removesuffix(WITH_AVERAGE)


def with_average(optimizer: str) -> str:
    """The `optimizer_name` of the same with an average of the weights."""
    return without_average(optimizer) + WITH_AVERAGE


def check_decay(decay: object) -> float | None:
    """The share of the old average that each step keeps; None without an average, as for ``ema=None``.

    Raises:
        InputError: it is not between 0 and 1.
        InputTypeError: it is no number.
    """
    if decay is None:
        return None
    if isinstance(decay, bool) or not isinstance(decay, int | float):
        raise InputTypeError(f"ema is the share of the average that each step keeps, such as 0.999, got {decay!r}")
    if not 0 < decay < 1:
        raise InputError(f"ema must be above 0 and below 1, such as 0.999, got {decay!r}")
    return float(decay)


def matrix_family(optimizer: str) -> str | None:
    """The first of two optimizers, by their `optimizer_name`, which steps whole matrices; None if there is one."""
    return without_average(optimizer).rpartition(_AND)[0] or None


def is_adam(optimizer: str) -> bool:
    """Whether an optimizer, by its `optimizer_name`, is of `ADAM_FAMILIES`."""
    return _family(optimizer) in ADAM_FAMILIES


def is_copied(optimizer: str, moments: MomentKind) -> bool:
    """Whether the host copies states before it makes new ones of them, since no kernel has the bits of the optimizer.

    Args:
        optimizer: by its `optimizer_name`.
        moments: if they have fewer bits than float32, this project steps them, whatever the optimizer.
    """
    return moments == "float32" and without_average(optimizer).rpartition(_AND)[2] not in ADAM_FAMILIES


def _family(optimizer: str) -> str:
    return without_average(optimizer).partition(" (")[0].rpartition(_AND)[2]


def moments_of(optimizer: torch.optim.Optimizer, moments: str | None = None) -> str:
    """The kind of moments: the argument, otherwise that of a `HybridAdam`'s groups, otherwise float32.

    Raises:
        InputError: the groups differ, or contradict the argument.
    """
    said = {str(group["moments"]): None for group in optimizer.param_groups if "moments" in group}
    own = list(said) if any(base.__name__ == "HybridAdam" for base in type(optimizer).__mro__) else []
    if len(own) > 1:
        raise InputError(
            f"a plan keeps all moments alike, but the groups of this HybridAdam have {' and '.join(own)}; give them one"
        )
    if own and moments is not None and own[0] != moments:
        raise InputError(
            f"moments={moments!r} was asked for, but this HybridAdam has {own[0]!r}; make it with moments={moments!r}, "
            "or leave the argument out"
        )
    return own[0] if own else moments or "float32"


def family_of(optimizer: torch.optim.Optimizer) -> str:
    """The family whose states take as much as those of `optimizer`, found by trying a step with its options.

    Options decide, not only the class: RMSprop with momentum keeps as much as Adam.

    Raises:
        InputError: it keeps more state per element than any family that is known.
    """
    names = [base.__name__ for base in type(optimizer).__mro__]
    if "HybridAdam" in names:  # `moments_of` gives their kind
        return "AdamW" if optimizer.param_groups[0].get("adamw_mode", True) else "Adam"
    import copy
    import inspect

    import torch

    trial = torch.nn.Parameter(torch.zeros(256, device="cpu"))
    trial.grad = torch.ones_like(trial)
    own = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    options = copy.deepcopy(own)  # a step may write into them
    accepted = inspect.signature(type(optimizer)).parameters
    made = type(optimizer)(
        [{**options, "params": [trial]}], **{k: v for k, v in optimizer.defaults.items() if k in accepted}
    )
    try:
        made.step()
    except Exception as error:
        named = [name for name in names if name in _STATE_BYTES]
        if named:
            return named[0]
        raise InputError(
            f"{names[0]} cannot step one weight by itself ({error}), so it is not elementwise; use an elementwise "
            "optimizer such as AdamW, SGD, RMSprop or Adagrad"
        ) from error
    kept = sum(v.nbytes for v in made.state[trial].values() if isinstance(v, torch.Tensor) and v.numel() > 1)
    per_numel = kept / trial.numel()
    fitting = [name for name, size in _STATE_BYTES.items() if size >= per_numel]
    if not fitting:
        raise InputError(
            f"{names[0]} keeps {per_numel:.0f} bytes of state per element, more than any family that plans are made "
            f"for ({', '.join(_STATE_BYTES)}); use one of these"
        )
    # Of families with as much, its own: plain SGD keeps nothing, and is still SGD.
    return min(fitting, key=lambda name: (_STATE_BYTES[name], names.index(name) if name in names else len(names)))


def decode_signed(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """First moments of whole blocks, as float32: the fourth power of ``codes[blocks, BLOCK_NUMEL]``, with its sign,
    times `scale`."""
    share = codes.float() * (1.0 / SIGNED_MAX)
    square = share * share
    return square * (share * share.abs()) * scale[:, None]


def decode_unsigned(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Second moments of whole blocks, as float32: the eighth power of ``codes[blocks, BLOCK_NUMEL]`` times `scale`."""
    fourth = fourth_power(codes.float() * (1.0 / UNSIGNED_MAX))
    return fourth * fourth * scale[:, None]


def fourth_power(share: torch.Tensor) -> torch.Tensor:
    """Multiplies twice, which every device rounds alike."""
    square = share * share
    return square * square
