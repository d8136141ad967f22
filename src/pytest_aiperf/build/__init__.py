"""Compile CUDA and Triton kernels, call them, and read their machine code."""
