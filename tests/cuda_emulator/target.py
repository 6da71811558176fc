"""`Seen`: the rules for CUDA as far as the pretended device's allocator sees what they count."""

from __future__ import annotations

from typing import Any

import torch

from elixir.tracer.device.cuda_target import CudaTarget

aten = torch.ops.aten


class Seen(CudaTarget):
    """The rules for CUDA without what kernels hold inside.

    Left out: workspaces of matrix products and copies of operands that they cannot read (`mm`, `addmm`), sorted ids
    (`embedding_dense_backward`). Counted: the math form's softmax, composed of others everywhere, and attention's
    backward.
    """

    _COUNTED = frozenset(
        {
            aten._safe_softmax.default,
            aten._scaled_dot_product_flash_attention_backward.default,
            aten._scaled_dot_product_cudnn_attention_backward.default,
            aten._scaled_dot_product_efficient_attention_backward.default,
        }
    )

    def matmul_workspace_bytes(self, func: Any, args: Any) -> tuple[int, ...]:
        """None."""
        return ()

    def transient_bytes(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> int:
        """Bytes of operators that are composed of others."""
        return super().transient_bytes(func, args, kwargs, outputs) if func in self._COUNTED else 0
