"""The sources of candidates, in the order in which they are tried."""
