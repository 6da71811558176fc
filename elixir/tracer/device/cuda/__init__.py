"""Rules of CUDA devices, from the sources of PyTorch and its libraries."""
