"""Where candidates come from, in the order in which they are tried."""
