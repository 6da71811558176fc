"""`SharedWeights`: attributes of modules that lie in the memory of a trained weight stay views of it under a plan."""

from __future__ import annotations

import weakref
from functools import partial

from torch import nn

from elixir.access.placeholders import unmarked
from elixir.chunk.chunk import Attribute
from elixir.models.shared_memory import find_shared_memory, plain_tensors
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.wrapper.engine import Engine


class SharedWeights:
    """The attributes of a model that share memory with weights.

    Args:
        model: the model inside of the wrapper, before it is wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = dict(model.named_parameters())
        found = {shared.name: shared for shared in find_shared_memory(model)}
        tensors = plain_tensors(model) if found else ()
        # Weakly: `torch.nn.utils.spectral_norm` replaces its attribute in each forward.
        self._found = [(found[name], weakref.ref(tensor)) for name, tensor in tensors if name in found]

    def attach(self, engine: Engine) -> None:
        """Makes them views of where the engine's present plan has the weights."""
        engine.read_unannounced.clear()
        for chunk in engine.chunks:
            chunk.attributes.clear()
        for shared, attribute in self._found:
            tensor = attribute()
            if tensor is not None:
                chunk, slot = engine.places[self._weights[shared.weight]]
                of = partial(shared.of, offset=slot.offset)
                with DisableTorchFunctionSubclass(), unmarked(), engine.cache.memory_of(chunk) as memory:
                    chunk.attributes.append(Attribute(attribute, of, of(memory)))
                chunk.show_attributes(None)
                if chunk.plan.resident:
                    engine.read_unannounced.append(chunk)

    def give_back(self) -> None:
        """Puts them back into the memory of their weights, unless that is on meta."""
        with DisableTorchFunctionSubclass():
            for shared, attribute in self._found:
                tensor, weight = attribute(), self._weights[shared.weight]
                if tensor is not None and not weight.is_meta:
                    tensor.data = shared.of(weight.data, 0)
