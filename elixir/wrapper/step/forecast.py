"""Whether new states that are made before the norm is known are likely to be kept."""

from __future__ import annotations

REFUSALS = 2
"""So many steps in a row whose new states were, or would have been, the wrong ones: then none are made."""
LONGEST_PAUSE_STEPS = 64


class Forecast:
    """Looks at how the last steps went.

    Whether gradients were clipped or overflowed is seen in every step, with or without new states that were made early,
    so a run that ceases to clip is noticed in the next step. Other reasons to make states again, such as options that
    change between backward and `step`, are seen only if there were such states. After those it pauses, twice as long
    each time, before it tries again.
    """

    def __init__(self) -> None:
        self._factors: list[bool] = []  # of the last steps: whether gradients were multiplied by another factor
        self._refused = 0  # steps in a row in which new states were wrong for other reasons
        self._pause = 0
        self._scale = 0.0  # of the loss, in the last step

    def expects_to_keep(self, scale: float) -> bool:
        """Whether to make new states in this step.

        Args:
            scale: of the loss. Where it has grown since the last step, gradients may overflow.
        """
        grown = 0.0 < self._scale < scale
        clips = len(self._factors) == REFUSALS and all(self._factors)
        return not (grown or clips or self._pause)

    def stepped(self, *, other_factor: bool, scale: float, made: int, kept: int) -> None:
        """A step is over.

        Args:
            other_factor: gradients were clipped, or overflowed.
            scale: of the loss, by which they were made.
            made: chunks that had new states.
            kept: those whose new states were right.
        """
        self._factors = [*self._factors, other_factor][-REFUSALS:]
        self._scale = scale
        self._pause = max(0, self._pause - 1)
        if other_factor or not made:
            return
        self._refused = 0 if kept else self._refused + 1
        if self._refused >= REFUSALS:
            self._pause = min(2 ** (self._refused - REFUSALS + 1), LONGEST_PAUSE_STEPS)
