"""The engine's side of an optimizer: steps the chunks, each where its states live."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import zlib
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.disk import StoredStates
from elixir.errors import InputError
from elixir.plan import Plan
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.wrapper.engine import Engine
from elixir.wrapper.run_errors import Call, ErrorKind, changed_in_part
from elixir.wrapper.step.chunk_optimizer import ChunkOptimizer
from elixir.wrapper.step.clipping import KnownNorms, clip_factor, each_norm, norm_of_norms
from elixir.wrapper.step.elementwise import same_options
from elixir.wrapper.step.fused_states import check_moments
from elixir.wrapper.step.host_threads import set_host_threads
from elixir.wrapper.step.segments import Segment
from elixir.wrapper.step.speculation import Speculation
from elixir.wrapper.step.states import MovedStates, States
from elixir.wrapper.step.updates import publish, update
from elixir.wrapper.step.user_class import UserOptimizer, refuse_differing

logger = logging.getLogger(__name__)

_SLOW_NUMEL = 10**7
"""Weights whose steps by torch's Adams without ``fused=True`` are worth a word: some 30 ms on one core."""


class Stepper:
    """Steps the chunks of one engine by the rule of one optimizer; an `elixir.wrapper.engine.AnyStepper`.

    Args:
        engine: whose chunks are stepped.
        given: the user's optimizer.
        groups: its parameter groups, as of now.
        max_norm: the norm of all gradients is clipped to this; 0 for no clipping.
        host_threads: see `ElixirOptimizer`.
        moving: of `check_optimizer`.
    """

    def __init__(
        self,
        engine: Engine,
        given: torch.optim.Optimizer,
        groups: Callable[[], list[dict[str, Any]]],
        *,
        max_norm: float,
        host_threads: int | None,
        moving: frozenset[str],
    ) -> None:
        self._engine = engine
        self.user = UserOptimizer(given, groups, engine, moving)
        self.max_norm = max_norm
        self.check_plan(engine.plan)
        self._refuse_parameters()
        self._clip_once: float | None = None  # the least limit that was asked for since gradients were cleared
        self.asked_for_norm = False
        """Whether somebody has asked for the norm, so that it is summed while gradients arrive: other bits than later.
        """
        self._grad_norm: torch.Tensor | None = None
        self._known = KnownNorms()
        self._told = False
        self._left: list[tuple[StoredStates, ChunkOptimizer]] = []  # until others have taken over their states
        self._moving: dict[str, tuple[States, Segment]] = {}  # states that were given up, by parameter
        self._made_by: float | None = None  # the loss scale that the gradients there are were multiplied by
        self._mixed = False  # whether they are sums over backwards of several scales
        self._used: set[str] = set()  # parameters that got a gradient on any rank
        self._position = {parameter: index for index, parameter in enumerate(engine.model.parameters())}
        self.parts: dict[int, ChunkOptimizer] = {}
        """The optimizer of each chunk, in the order in which the next forward asks for them."""
        self.speculation = Speculation(engine, self.user, self.parts)
        self.host_threads = set_host_threads(engine, host_threads)
        """Threads of CPU Adam."""
        try:
            with (
                engine.group.together("make its optimizer states"),
                engine.window.file.attempting("no optimizer was made, and weights are as they were"),
            ):
                self._make_parts()
                for part in self.parts.values():
                    self._make_states(part)
                self._make_spares()
        except BaseException:
            for part in self.parts.values():
                if part.chunk.stored is not None:
                    part.chunk.stored.forget(part)
            self.parts.clear()
            raise
        self._say_if_slow()

    def _say_if_slow(self) -> None:
        """torch's Adams take one pass over memory after the other on the host, unless they are told not to."""
        numel = sum(part.chunk.plan.numel for part in self.parts.values() if part.chunk.plan.update_home == "host")
        kind = type(self.user.given)
        plain = kind in (torch.optim.Adam, torch.optim.AdamW) and not self.user.fuses
        slow = plain and numel >= _SLOW_NUMEL and not all(group.get("fused") for group in self.user.given.param_groups)
        if slow and self._engine.group.rank == 0:
            logger.warning(
                "the host steps %.0f M weights with %s, which takes some 3 times as long as with fused=True, or as "
                "elixir.HybridAdam",
                numel / 1e6,
                kind.__name__,
            )

    @property
    def parameters(self) -> set[torch.nn.Parameter]:
        """The parameters that this steps."""
        return set(self.user.group_of)

    @property
    def has_states(self) -> bool:
        """Whether a step has made states that this rank has, for what the optimizer shows of them."""
        return not self._engine.phase.closed and any(part.has_stepped for part in self.parts.values())

    @property
    def clip_limit(self) -> float | None:
        """The limit to which the next `step` clips the norm of the gradients; None for no clipping.

        As where torch clips one time after the other, the least of all limits holds: who asks for the norm with an
        infinite one takes no other back.
        """
        limits = [self.max_norm] if self.max_norm else []
        return min(limits if self._clip_once is None else [*limits, self._clip_once], default=None)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """See `ElixirOptimizer.grad_norm`."""
        return self._grad_norm

    @property
    def wants_norm(self) -> bool:
        """Whether the next step needs the norm of the gradients, as far as can be known during backward."""
        return self.clip_limit is not None or self._engine.loss_scale.used or self.asked_for_norm

    def make_states(self) -> None:
        """Have all optimizer states before the first step, wherever they live; a class that cannot is logged."""
        made = [part.make_states() for part in self.parts.values() if part.chunk.plan.state_home == "device"]
        made += [self._make_states(part) for part in self.parts.values()]
        if not all(made):
            logger.info(
                "init_step=True has no effect: %s makes its states in its first step", type(self.user.given).__name__
            )

    def follow_writes(self) -> None:
        """Copies to the masters what was written to resident weights since the last step, as the next step would."""
        for part in self.parts.values():
            part.follow_writes()

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that this cannot step by; `InputError` says what to do."""
        check_moments(self.user.given, self.user.fusible, plan.moments)

    def give_up_states(self) -> None:
        """Take the states of this rank's part of each parameter off the chunks; none is stepped until `take_states`."""
        self.speculation.forget()
        for part in self.parts.values():
            # States that a part was to take over, and could not, are still where they were.
            self._moving = part.give_up_states() | self._moving
            if part.chunk.stored is not None:
                self._left.append((part.chunk.stored, part))
        self.parts.clear()

    def take_states(self) -> None:
        """Go on from the states that were given up, under the engine's plan of now; each is let go of when its chunk
        has taken it."""
        self._make_parts()
        passes = {slot.name for _, part in self._left for slot in part.chunk.slots}
        for part in self.parts.values():
            leaving = self._engine.leaving.get(part.chunk.index)
            with contextlib.nullcontext() if leaving is None else leaving.at_hand(), part.chunk.at_hand(write=True):
                self._make_states(part)
                mine = {s.name: self._moving[s.name] for s in part.segments if s.name in self._moving}
                part.load(MovedStates(mine, passes))
            for segment in part.segments:  # only now: they may have gone to a disk that fails
                self._moving.pop(segment.name, None)
        for stored, part in self._left:
            stored.forget(part)
        self._left.clear()
        self._make_spares()

    def speculate(self, chunk: Chunk) -> None:
        """Makes new states of a chunk in backward next to the old ones; its gradients are on their way home."""
        if len(self._engine.steppers) == 1:  # several share the chunk's memory
            with torch.no_grad():
                self.speculation.begin(chunk, self._gradient_scale())

    def gradients_scaled(self, by: float) -> None:
        """The gradients that come now are multiplied by a loss scale, and are added to those there are."""
        if self._mixed or self._made_by not in (None, by):
            # Another optimizer's overflow has changed it since. What nobody holds was cleared one by one.
            self._mixed = self._holds_gradients()
        self._made_by = by

    def gradients_cleared(self, scale: float | None) -> None:
        """No gradients are there, nor a limit for them; or, of this loss scale, zeros."""
        self._made_by, self._clip_once, self._mixed = scale, None, False

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
        """See `ElixirOptimizer.clip_grad_norm_`."""
        engine = self._engine
        self._refuse_unreduced("clip_grad_norm_()")
        engine.forget_failed_backward()
        engine.errors.report(Call.GRADIENTS)
        engine.gradients.send_late()
        limit = float(max_norm)  # ranks compare it, and a tensor would say on which device it is
        self._clip_once = limit if self._clip_once is None else min(limit, self._clip_once)
        self.asked_for_norm = True  # who asks once asks again
        self._agree_on_used()
        norm = self.norm() / self._gradient_scale()
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
        self._grad_norm = norm.to(engine.device)
        return self._grad_norm

    def step(self) -> bool:
        """One step everywhere; whether it was made, rather than left out after an overflow.

        Raises:
            InputError, StepError: see `ElixirOptimizer.step`.
        """
        engine = self._engine
        engine.refuse_step()
        self.user.refuse_other_parameters()
        self._refuse_unreduced("step()")
        self._refuse_unseen()
        self.speculation.stepping()
        engine.gradients.send_late()  # each update waits for the arrival of its gradients, and nothing else does
        self._agree_on_used(unscaled=self._unscaled(), stepping=True)
        loss_scale, made_by = engine.loss_scale, self._gradient_scale()
        if self._mixed:
            logger.info("a step is left out, since the loss scale has changed while its gradients were added up")
            self._grad_norm = None
            return self._left_out(made_by)
        factor: float | torch.Tensor = 1.0 / made_by
        clipped = False
        limit = self.clip_limit
        self._clip_once = None
        self._grad_norm = None
        if limit is not None or loss_scale.used:
            norm = self.norm()
            self._known.clear()
            self._grad_norm = norm if made_by == 1.0 else norm / made_by
            waits = loss_scale.used or not all(part.follows_torch for part in self.parts.values())
            if waits:
                norm = norm.cpu()  # the one number that a step waits for: the host's updates multiply by it
            if loss_scale.used and not math.isfinite(norm):
                loss_scale.overflowed(made_by)
                return self._left_out(made_by)
            if limit is not None:
                clip = clip_factor(norm / made_by, limit)
                factor *= float(clip) if waits else clip
                clipped = made_by == 1.0  # what is scaled stays so: another step would not scale it back again
        hyperparameters = self.user.hyperparameters()
        moved = self.user.moved(self._stepped_groups)
        engine.cache.invalidate()  # before weights count as changed, which inside a block they must not
        self.user.move(moved)
        updates = []
        engine.take_back((part.chunk, part.copied) for part in self.parts.values())
        for part in self.parts.values():
            part.follow_writes()
            arrived = part.gradients(self._used)  # now: when it runs, other parameters may have gradients
            if not self.speculation.keep(part, arrived, factor, hyperparameters):
                update(engine, part, arrived, factor, hyperparameters, in_place=clipped)
            if clipped:
                part.forget_norms()
            part.mark_changed(arrived, self._used)
            updates += [ticket for ticket in [publish(engine, part.chunk)] if ticket is not None]
        engine.window.flush()
        scales = not isinstance(factor, torch.Tensor) and factor != 1.0 / made_by
        self.speculation.stepped(other_factor=scales, scale=made_by)
        engine.weights_changed(updates)
        engine.stepped(False)
        loss_scale.stepped(made_by)
        return True

    def rewrite(self, method: str) -> None:
        """Rewrites all weights by a method of the user's class, such as schedule-free's ``train`` and ``eval``.

        All ranks call this. Nothing happens where the method changes no option: then the weights are as it wants them.

        Raises:
            InputError: weights are in use.
        """
        engine, options = self._engine, self.user.hyperparameters()
        moved = self.user.moved(set, method)
        if all(
            same_options(change, {key: group.get(key) for key in change})
            for change, group in zip(moved, options, strict=True)
        ):
            return
        engine.uses.refuse_inside(f"{method}() of an optimizer")
        if engine.uses.gathered:
            raise InputError(f"{method}() of an optimizer is for outside of gathered(); leave it first")
        engine.settle_together(f"{method}() of an optimizer")
        engine.errors.report(Call.ONE_STEP)
        self.user.refuse_other_parameters()
        try:
            with engine.group.together(f"call {method}() of its optimizer"):
                for part in self.parts.values():
                    part.rewrite(method, options)
        except BaseException:  # called again, it would rewrite some weights twice
            engine.errors.record(ErrorKind.CHANGE, changed_in_part(f"{method}() of an optimizer has failed"))
            raise
        updates = [ticket for part in self.parts.values() if (ticket := publish(engine, part.chunk)) is not None]
        self.user.move(moved)
        engine.window.flush()
        engine.weights_changed(updates)

    def _stepped_groups(self) -> set[int]:
        """The groups with a gradient on any rank."""
        with DisableTorchFunctionSubclass():
            return {
                self.user.group_of[slot.parameter]
                for part in self.parts.values()
                for slot in part.chunk.slots
                if slot.parameter in self.user.group_of and (slot.name in self._used or slot.parameter.grad is not None)
            }

    def _left_out(self, made_by: float) -> bool:
        """No step is made of the gradients that a loss scale of `made_by` has made; False, as `step` says it."""
        self._clip_once = None
        self.speculation.give_up()
        self.speculation.forecast.stepped(other_factor=True, scale=made_by, made=0, kept=0)
        self._engine.stepped(True)
        return False

    def _holds_gradients(self) -> bool:
        """Whether this rank has gradients of parameters that this steps."""
        mine = [(part.chunk, slot) for part in self.parts.values() for slot in part.chunk.slots]
        with DisableTorchFunctionSubclass():
            return any(
                self._engine.gradients.holds(chunk, slot.name) or slot.parameter.grad is not None
                for chunk, slot in mine
                if slot.parameter in self.user.group_of
            )

    def norm(self) -> torch.Tensor:
        """Norm of all gradients over all ranks, loss scale included; float32."""
        found = [
            (segment.source, gradient, norm, None if part.passes_gradients else segment.source.grad)
            for part in self.parts.values()
            for (segment, gradient), norm in part.with_norms(part.gradients(self._used))
        ]
        known = [self._known.of(source, held) if norm is None else norm for source, _, norm, held in found]
        norms = each_norm([gradient for _, gradient, _, _ in found], self.host_threads, known)
        for (source, _, _, held), norm in zip(found, norms, strict=True):
            self._known.add(source, held, norm)
        summed = [(source, norm) for (source, _, _, _), norm in zip(found, norms, strict=True)]
        if norms:
            # torch sums the zeros of empty gradients, too: others are added in other groups than without them.
            zero = torch.zeros_like(norms[0])
            summed += [(it, zero) for part in self.parts.values() for it in part.empty_with_gradient(self._used)]
        # In the order of the model, so that one rank sums the norms as PyTorch would.
        summed.sort(key=lambda pair: self._position[pair[0]])
        norm = norm_of_norms([norm for _, norm in summed])
        if self._engine.group.size == 1:
            return norm
        # Added in order of rank, so that all ranks have the same bits. Python's own sum compensates in some versions.
        square = reduce(operator.add, self._engine.exchange("norm", float(norm.cpu().double() ** 2)))
        return torch.tensor(math.sqrt(square), dtype=norm.dtype, device="cpu")

    def _make_spares(self) -> None:
        """By the threads that fill them, as `_make_states`."""
        if self._engine.plan.speculates:
            # As for the states: if they have no room, wrapping must raise.
            self._engine.lanes.host_adam.submit(self.speculation.make_spares).synchronize()

    def _make_parts(self) -> None:
        for chunk in self._in_order():
            if chunk.plan.trainable:
                with chunk.at_hand(alone=self.user.begins_with_states):
                    self.parts[chunk.index] = ChunkOptimizer(self._engine, self.user, chunk)

    def _make_states(self, part: ChunkOptimizer) -> bool:
        """Made by the threads that step them, so that they lie next to these; see `ChunkOptimizer.make_states`."""
        made = [True]
        if part.chunk.stored is not None:
            with part.chunk.at_hand():
                made.append(part.make_states())
                part.stow()
        elif part.chunk.plan.state_home == "host":
            # This thread may read or move the states next; and if they have no room, wrapping must raise.
            self._engine.lanes.host_adam.submit(lambda: made.append(part.make_states())).synchronize()
        return made[-1]

    def _refuse_parameters(self) -> None:
        own = {slot.parameter for chunk in self._engine.chunks for slot in chunk.slots}
        mine = self.parameters
        foreign = len(mine - own)
        if foreign:
            raise InputError(f"{foreign} parameters of the optimizer are not parameters of the module")
        taken = sum(len(mine & other.parameters) for other in self._engine.steppers)
        if taken:
            raise InputError(
                f"{taken} parameters of the optimizer have an ElixirOptimizer already, and would be stepped twice; "
                "give each "
                "parameter to one, or close the module and wrap the model again"
            )

    def _gradient_scale(self) -> float:
        """By which the gradients there are were multiplied."""
        return self._engine.loss_scale.value if self._made_by is None else self._made_by

    def _unscaled(self) -> bool:
        """Whether this rank has gradients without the loss scale by which they would be divided."""
        if self._engine.holds_gradients():
            return self._engine.loss_scale.used and self._made_by is None
        if not self._told:
            self._told = True
            logger.warning("step() found no gradients on this rank: call optimizer.backward(loss) before it")
        return False

    def _refuse_unreduced(self, what: str) -> None:
        if not self._engine.gradients.reducing and self._engine.plan.world_size > 1:
            raise InputError(f"{what} inside no_sync() would use this rank's gradients alone; call it outside")

    def _refuse_unseen(self) -> None:
        """Refuse gradients that plain PyTorch would step with, and that would be left out here without a word."""
        with DisableTorchFunctionSubclass():
            for chunk in self._engine.chunks:
                if self._engine.is_ordinary(chunk) and chunk.plan.trainable:
                    continue
                for slot in chunk.slots:
                    if slot.parameter.requires_grad and not chunk.plan.trainable:
                        raise InputError(
                            f"{slot.name} was frozen when the model was planned, and is not now; plan again"
                        )
                    if slot.parameter.grad is not None and chunk.plan.trainable:
                        raise InputError(
                            f"the gradient of {slot.name} was set by hand, but gradients are taken as backward makes "
                            "them; change them in a hook (parameter.register_hook), or change the loss"
                        )

    def _agree_on_used(self, *, unscaled: bool = False, stepping: bool = False) -> None:
        """Find the parameters that got a gradient on any rank, the same on all ranks.

        Args:
            unscaled: this rank has gradients without the loss scale.
            stepping: a step comes next, which all ranks must make alike.

        Raises:
            InputError: `unscaled` is true on any rank, or ranks would step by different options; then on all.
            DiskError, RankError: states on a disk of this rank, or of another, are lost.
        """
        names = [slot.name for part in self.parts.values() for slot in part.chunk.slots]
        used: set[str] = set()
        for gradient in self._engine.gradients.by_chunk.values():
            used |= gradient.arrived
        if self._engine.group.size > 1:
            mine = bytes([*(name in used for name in names), unscaled, self._mixed])
            said = self.user.said_to_ranks(self.clip_limit) if stepping else {}
            if stepping:
                data_writes = sum(part.chunk.data_writes for part in self.parts.values())
                said |= {"the number of writes through .data of weights": str(data_writes)}
            digest = zlib.crc32(repr(said).encode())
            answers = self._engine.exchange("gradients used", (mine, self._engine.errors.of_disk, digest))
            self._engine.errors.agree([lost for _, lost, _ in answers])
            if len({theirs for *_, theirs in answers}) > 1:
                refuse_differing(self._engine.exchange("options", said))
            *found, unscaled, self._mixed = (
                any(flags) for flags in zip(*(flags for flags, *_ in answers), strict=True)
            )
            used = {name for name, flag in zip(names, found, strict=True) if flag}
            self._engine.gradients.hold(used)
        if unscaled:
            raise InputError(
                f"step() divides float16 gradients by the loss scale, {self._engine.loss_scale.value:g}, but these "
                "were made "
                "by loss.backward(); call optimizer.backward(loss), which multiplies by it"
            )
        self._used = used

    def _in_order(self) -> list[Chunk]:
        """Chunks in the order in which the next forward asks for them."""
        first: dict[int, int] = {}
        for position, use in enumerate(self._engine.plan.order):
            for index in use.chunks:
                first.setdefault(index, position)
        return sorted(self._engine.chunks, key=lambda chunk: (first.get(chunk.index, len(first)), chunk.index))
