"""CUDA kernels for the passes of a cross-entropy over its logits: see cuda.py.

Their reference is PyTorch's own sequence of operations, which they must match bit for bit.
"""
