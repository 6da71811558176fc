"""One chunk of a plan: its parameters, where they live, and where it is used; and checks of what a plan may say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from elixir.artifact import NOT_NEGATIVE, Bound, check_bounds
from elixir.errors import InputError
from elixir.optimizer_states import BLOCK_NUMEL, MASTER_BYTES, MomentKind, StateSize, master_bytes
from elixir.units import dtype_bytes, format_bytes

Count = Annotated[int, NOT_NEGATIVE]
Amount = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[int, Bound("1 or larger", 1)]
MemoryHome = Literal["device", "host"]
WeightHome = Literal["device", "host", "files"]
StateHome = Literal["device", "host", "disk", "files"]
FrozenHome = Literal["host", "files"]
"""The home of frozen weights that do not fit the device."""
Phase = Literal["forward", "recompute", "backward"]
Update = Literal["after_norm", "early"]
"""The moment at which a chunk's states are updated: see `Home`."""
UPDATES: dict[Update, str] = {"early": "updated early"}
"""How the text of a plan counts chunks that are not updated after the norm."""

PARAM_ALIGNMENT_BYTES = 512
"""Parameters start at multiples of this inside a chunk: other offsets change the bits some kernels give."""
PACKED_DTYPES = ("uint8", "int8")
"""The dtypes of packed numbers: an element of theirs is not one parameter, or not without its scale."""


def alignment_bytes(moments: MomentKind, trained: Iterable[str]) -> int:
    """Bytes at whose multiples the parameters and shards of a plan begin.

    Moments of 8 bits are kept in blocks of `BLOCK_NUMEL` elements. No block is shared by two parameters or by two
    ranks, so its codes and scale mean the same on any ranks and in chunks of any size.

    Args:
        moments: how the plan keeps Adam's moments.
        trained: dtypes of the parameters that are trained.
    """
    widest = max(map(itemsize_of, trained), default=1)
    return max(PARAM_ALIGNMENT_BYTES, BLOCK_NUMEL * widest) if moments == "8bit" else PARAM_ALIGNMENT_BYTES


class Home(Enum):
    """The places in which a chunk may live and be updated: all combinations that a plan can have, and no others.

    Weights are *resident* (gathered on the device for the whole step), or streamed through rCache blocks from their
    shards on the device or the host. The shard of gradients, master weights and states is updated on the device only
    next to weights that live there. With states on the disk the host updates them, and gradients wait on the host. A
    frozen chunk has no states; it counts as if they were where its weights are. Only its weights may stay in the files
    that they came in (safetensors): each load reads them from there.

    The host may update the states that it has *early*: it makes new ones during backward, and
    `ElixirOptimizer.step` keeps those that are right. All others are updated after the norm of the gradients is known.
    """

    RESIDENT = ("resident", "device")
    RESIDENT_HOST = ("resident", "host")
    DEVICE = ("device", "device")
    DEVICE_HOST = ("device", "host")
    HOST = ("host", "host")
    RESIDENT_DISK = ("resident", "disk")
    DEVICE_DISK = ("device", "disk")
    HOST_DISK = ("host", "disk")
    RESIDENT_EARLY = ("resident", "host", "early")
    DEVICE_EARLY = ("device", "host", "early")
    HOST_EARLY = ("host", "host", "early")
    FILES = ("files", "files")

    def __init__(
        self,
        weights: Literal["resident", "device", "host", "files"],
        states: StateHome,
        update: Update = "after_norm",
    ) -> None:
        self.weights, self.states, self.update = weights, states, update
        self.number = len(type(self).__members__)
        self.resident = weights == "resident"
        self.weight_home: WeightHome = "device" if weights == "resident" else weights
        """The memory of the shard of weights, or its files."""
        self.weights_on_device = self.weight_home == "device"
        self.states_on_device = states == "device"
        self.states_on_disk = states == "disk"
        self.early = update == "early"
        """Whether new states are made during backward next to the old ones: a second set."""
        self.without_states = update == "after_norm" and states == self.weight_home
        """Whether a frozen chunk may be there."""
        self.returns = self.weights_on_device and not self.states_on_device
        """Whether the host updates weights that live on the device, to which new ones return."""

    def having(self, states: str | None = None, update: Update = "after_norm") -> Home:
        """The home with these states (None: its own) and this update; `InputError` if there is none."""
        return Home.find(self.resident, self.weight_home, states or self.states, update)

    @classmethod
    def find(cls, resident: bool, weight_home: str, state_home: str, update: Update = "after_norm") -> Home:
        """The home that the fields of a `ChunkPlan` say.

        Raises:
            InputError: there is none; names the field that is wrong.
        """
        found = _BY_FIELDS.get((resident, weight_home, state_home, update))
        if found is not None:
            return found
        if (resident, weight_home, state_home, "after_norm") in _BY_FIELDS:
            raise InputError(
                f"field 'update' may be {update!r} for states on the host, found state_home {state_home!r}"
            )
        if "files" in (weight_home, state_home):
            raise InputError(
                "field 'weight_home' may be 'files' for a streamed frozen chunk with state_home 'files'; found "
                f"weight_home {weight_home!r}, state_home {state_home!r}, resident {resident}"
            )
        why = "for a chunk that is resident there" if resident else "where the states are updated there"
        raise InputError(f"field 'weight_home' must be 'device' {why}, found {weight_home!r}")


_BY_FIELDS: dict[tuple[bool, str, str, str], Home] = {
    (home.resident, home.weight_home, home.states, home.update): home for home in Home
}


@dataclass(frozen=True)
class ParamSlot:
    """The part of a chunk that holds one parameter."""

    name: str
    offset: Count
    """In elements from the start of the chunk."""
    numel: Count

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class ChunkPlan:
    """Parameters that travel together in one flat buffer, sharded evenly over the ranks."""

    dtype: str
    """Torch name of the dtype of its weights and gradients, such as ``bfloat16``."""
    trainable: bool
    """False for a chunk of frozen parameters, which has no gradients and no states."""
    numel: Positive
    """Elements of the buffer, padding included; a multiple of the world size."""
    parameters: tuple[ParamSlot, ...]
    """Its parameters with their places in the buffer."""
    weight_home: WeightHome
    """The memory of the rank's shard of the weights; with ``files``, the safetensors in which they came."""
    state_home: StateHome
    """The memory of the shard of gradients, master weights and optimizer states; for a frozen chunk, its weight home.
    With ``disk``, master weights and states are read from there for their update and written back; gradients wait on
    the host.
    """
    resident: bool
    """True: gathered on the device for the whole step, in a separate buffer. False: gathered into rCache blocks."""
    reduce_order: int | None = None
    """Its place among the chunks in the order in which their gradients are complete; None where it gets none. Ranks
    reduce gradients in this order, whatever their data does."""
    grad_entry: int | None = None
    """Index of the entry of `Plan.order` during which its last gradient arrives; None where it gets none. Between the
    gathers of this entry and those of the next is the place of its reduction, the same on all ranks."""
    update: Update = "after_norm"
    """The moment at which its states are updated. With ``early``, the host makes new states once its gradients are
    there, next to the old ones; `ElixirOptimizer.step` keeps the right ones. That takes the host memory of its states
    twice."""
    matrices: tuple[tuple[int, int], ...] = ()
    """Rows and columns of its parameters, if an optimizer steps them as whole matrices; otherwise empty."""

    def __post_init__(self) -> None:
        check_bounds(self)
        itemsize_of(self.dtype)
        end = 0
        for index, slot in enumerate(self.parameters):
            if not end <= slot.offset <= self.numel - slot.numel:
                wrong = f"starts at {slot.offset}, inside what ends at {end}"
                if slot.offset >= end:
                    wrong = f"ends at element {slot.offset + slot.numel} of a chunk that has {self.numel}"
                raise InputError(f"field 'parameters[{index}].offset': {slot.name!r} {wrong}")
            end = slot.offset + slot.numel
        self._check_homes()

    def _check_homes(self) -> None:
        home, what = self.home, f"trainable {self.trainable}"
        if self.matrices:
            late = self.trainable and not home.early
            after = "is for trainable chunks that are updated after the norm"
            must(late, "matrices", after, f"the home {home.name}, {what}")
            shaped = [rows * columns for rows, columns in self.matrices] == [slot.numel for slot in self.parameters]
            must(shaped, "matrices", "must have rows and columns of each parameter")
        in_files = self.trainable and home is Home.FILES
        must(not in_files, "weight_home", "may be 'files' for frozen chunks only, found it for a trainable one")
        updated = self.update == "after_norm" or (self.trainable and self.grad_entry is not None)
        may = f"may be {self.update!r} for trainable chunks with gradients"
        must(updated, "update", may, f"{what}, grad_entry {self.grad_entry}")
        same = f"must be the weight home {self.weight_home!r} for a frozen chunk, which has no states"
        must(self.trainable or home.without_states, "state_home", same, repr(self.state_home))

    def weights(self) -> tuple[Weight, ...]:
        """Its parameters, with what the chunk says of them all."""
        return tuple(Weight(slot.name, self.dtype, slot.numel, self.trainable) for slot in self.parameters)

    @cached_property
    def home(self) -> Home:
        """The home that its fields describe; `InputError` if no plan can have it."""
        return Home.find(self.resident, self.weight_home, self.state_home, self.update)

    @property
    def update_home(self) -> MemoryHome:
        """The memory in which its gradients wait and its shard is updated: `state_home`; for the disk, the host."""
        return "device" if self.home.states_on_device else "host"

    @property
    def returns_rounded(self) -> bool:
        """Whether the host steps float32 masters of weights that live on the device in fewer bits."""
        low_precision = dtype_bytes(self.dtype) < MASTER_BYTES
        return self.trainable and low_precision and self.home.returns

    @property
    def weight_bytes(self) -> int:
        """Bytes of the gathered weights."""
        return self.numel * dtype_bytes(self.dtype)

    def saved_bytes(self, world_size: int, states: StateSize) -> int:
        """Bytes of one rank's part in a checkpoint: its masters and states; of a frozen chunk, its weights."""
        numel, itemsize = self.numel // world_size, dtype_bytes(self.dtype)
        return numel * master_bytes(itemsize) + states.nbytes(numel, itemsize) if self.trainable else numel * itemsize

    def has_parameters_on(self, rank: int, world_size: int) -> bool:
        """Whether the shard of `rank` holds a part of any parameter; the last ranks' may be padding alone."""
        return self.held_numel(rank, world_size) > 0

    def held_numel(self, rank: int, world_size: int) -> int:
        """Elements of parameters in the shard of `rank`, padding and gaps not counted."""
        start, end = rank * self.numel // world_size, (rank + 1) * self.numel // world_size
        parts = (min(slot.offset + slot.numel, end) - max(slot.offset, start) for slot in self.parameters)
        return sum(part for part in parts if part > 0)

    def file_bytes(self, rank: int, world_size: int) -> int:
        """Bytes that a load reads from files on `rank`."""
        return self.held_numel(rank, world_size) * dtype_bytes(self.dtype) if self.home is Home.FILES else 0


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file in which a plan leaves frozen weights, as it was then, so that a run can see whether it
    changed."""

    name: str
    """Its name without the folder, which may be another one where the plan runs."""
    nbytes: Count
    """Its size."""
    digest: str
    """Digest of its size, its header and a sample of each tensor (`elixir.chunk.weight_files`)."""
    modified_us: int | None = field(default=None, compare=False)
    """Time of its last change, in microseconds; a copy on another machine may have another. None if not known."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class ChunkUse:
    """One entry of the recorded order: consecutive accesses to the same chunks."""

    phase: Phase
    chunks: tuple[int, ...]
    """Indices into `Plan.chunks`, resident ones included."""
    pin_until: int
    """Index of the last entry during which these may not be evicted."""


def must(holds: object, field: str, what: str, *found: object) -> None:
    """Raises `InputError` unless something holds that a field has to be; its text says what was found, if given."""
    if not holds:
        raise InputError(f"field '{field}' {what}" + "".join(f", found {each}" for each in found))


def check_replicas(replicas: int, world_size: int, name: str = "replicas") -> None:
    """Raises `InputError` unless so many ranks form so many replicas of two ranks or more each."""
    if replicas == 1:
        return
    most = max((r for r in range(1, world_size // 2 + 1) if world_size % r == 0), default=1)
    if not 1 <= replicas <= most or world_size % replicas:
        raise InputError(
            f"{name} must divide the {world_size} ranks into replicas of two ranks or more, found {replicas}; give a "
            f"divisor of {world_size} from 1 to {most}"
        )


def divisions(world_size: int, ranks_per_host: int) -> tuple[int, ...]:
    """Numbers of replicas that fit the machines, rising from 1: a replica takes a part of a machine or whole ones.

    >>> divisions(16, 8)
    (1, 2, 4, 8)

    Args:
        world_size: ranks of all replicas.
        ranks_per_host: how many of them share a machine.
    """
    shards = (world_size // replicas for replicas in range(1, world_size // 2 + 1) if world_size % replicas == 0)
    fitting = [each for each in shards if each % ranks_per_host == 0 or ranks_per_host % each == 0]
    return tuple(dict.fromkeys((1, *(world_size // each for each in fitting))))


def itemsize_of(dtype: str) -> int:
    try:
        return dtype_bytes(dtype)
    except InputError as error:
        raise InputError(f"field 'dtype': {error}") from None


class Weight(NamedTuple):
    """A parameter, as traces and plans know it."""

    name: str
    dtype: str
    numel: int
    trainable: bool

    @property
    def bytes(self) -> int:
        """Bytes, without what shares a chunk or a page with them."""
        return self.numel * dtype_bytes(self.dtype)


def numel_text(weights: Iterable[Weight]) -> str:
    """The number of parameters, and the bytes of those that are packed, whose elements are not parameters."""
    numel = packed_bytes = 0
    for weight in weights:
        packed = weight.dtype in PACKED_DTYPES
        numel, packed_bytes = numel + weight.numel * (not packed), packed_bytes + weight.bytes * packed
    return f"{numel:,}" + (f" and {format_bytes(packed_bytes)} packed" if packed_bytes else "")


def packed_text(weights: Sequence[Weight], form: str | None) -> str:
    """The bytes of frozen weights by how they are held; empty if none is packed and nobody asked for it.

    Args:
        weights: all parameters.
        form: as `StepShape.quantised` has it, in 4 bits; None: the dtypes say what is packed.
    """
    frozen = [weight for weight in weights if not weight.trainable]
    packed, others = Counter[str](), Counter[str]()
    for weight in frozen:
        (packed if weight.dtype in PACKED_DTYPES else others)[weight.dtype] += weight.bytes
    if not packed and form is None:
        return ""
    parts = [f"{format_bytes(size)} in {dtype}" for dtype, size in packed.most_common()]
    if form is not None:
        parts = [f"{format_bytes(packed.total())} in 4 bits ({form})"]
    parts += [f"{format_bytes(size)} in {dtype}" for dtype, size in others.most_common()]
    experts = sum(weight.bytes for weight in frozen if "expert" in weight.name and weight.dtype not in PACKED_DTYPES)
    why = "; expert weights are 3-D parameters, which bitsandbytes does not quantise"
    return f"frozen: {', '.join(parts)}{why * (form is not None and 2 * experts > others.total())}"
