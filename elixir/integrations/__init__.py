"""Elixir inside of other frameworks: `transformers.Trainer`, Accelerate and Lightning.

Each is a module that is imported by its name, such as ``elixir.integrations.accelerate``, and needs that framework.
"""

from __future__ import annotations

PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    "transformers": (
        "_has_mixed_mesh_grads",  # since 5.17 it reads every parameter's gradient
        "_load_from_checkpoint",  # a model on meta cannot take weights before it is wrapped
        "_load_optimizer_and_scheduler",
        "_move_model_to_device",
        "_n_gpu",  # more than one would mean nn.DataParallel
        "_save",
        "_save_optimizer_and_scheduler",
        "_wrap_model",
    ),
    "accelerate": ("_is_accelerate_prepared",),
    "lightning": (
        "_device",  # what training_step makes on self.device belongs on meta while it is traced
        "_layer_sync",  # sync_batchnorm, which is refused
        "_precision_plugin",  # the Trainer reads it of a strategy that it is given
    ),
}
"""Every name of a framework that begins with an underscore and on which an integration leans.

A test looks for each in the version that is installed, and for others in the sources here.
"""
