"""`ElixirStrategy` for the package `lightning.pytorch`; importing this registers it by name.

import elixir.integrations.lightning

trainer = Trainer(strategy="elixir", precision="bf16-true", accumulate_grad_batches=4, gradient_clip_val=1.0)
trainer = Trainer(strategy=ElixirStrategy(device_memory="20GiB"), devices=4)
"""

from __future__ import annotations

from elixir.integrations.strategy_mixin import PrecisionMixin, StrategyMixin

try:
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError("this needs a package that is not here: pip install 'lightning>=2.4'") from error


class ElixirPrecision(PrecisionMixin, Precision):  # type: ignore[misc]
    """See `PrecisionMixin`."""


class ElixirStrategy(StrategyMixin, DDPStrategy):  # type: ignore[misc]
    """See `StrategyMixin`."""

    strategy_name = "elixir"
    precision_class = ElixirPrecision


StrategyRegistry.register("elixir", ElixirStrategy, description="runs a plan of Elixir", override=True)
