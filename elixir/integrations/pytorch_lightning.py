"""`ElixirStrategy` for the package `pytorch_lightning`; importing this registers it by name.

import elixir.integrations.pytorch_lightning

trainer = Trainer(strategy="elixir", precision="bf16-true", accumulate_grad_batches=4, gradient_clip_val=1.0)
trainer = Trainer(strategy=ElixirStrategy(device_memory="20GiB"), devices=4)
"""

from __future__ import annotations

from elixir.integrations.strategy_mixin import PrecisionMixin, StrategyMixin

try:
    from pytorch_lightning.plugins.precision import Precision
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError("this needs a package that is not here: pip install 'pytorch-lightning'") from error


class ElixirPrecision(PrecisionMixin, Precision):  # type: ignore[misc]
    """See `PrecisionMixin`."""


class ElixirStrategy(StrategyMixin, DDPStrategy):  # type: ignore[misc]
    """See `StrategyMixin`."""

    strategy_name = "elixir"
    precision_class = ElixirPrecision


StrategyRegistry.register("elixir", ElixirStrategy, description="runs a plan of Elixir", override=True)
