"""The ANCF activation codec on NumPy, C and CUDA."""
