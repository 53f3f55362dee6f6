"""Tensor functions, one folder each: a literal reference, a blocked form in plain PyTorch, kernels, a derivation."""
