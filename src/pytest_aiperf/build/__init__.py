"""CUDA and Triton sources to kernels that can be called, and what their machine code holds."""
