"""One pass over the weights: several micro-batches go through a layer before the next layer's weights are fetched."""
