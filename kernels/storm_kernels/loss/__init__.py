"""A cross-entropy's passes over logits as CUDA kernels: see cuda.py.

Their reference is PyTorch's own sequence of operations, whose bits they are to have.
"""
