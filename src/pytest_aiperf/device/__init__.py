"""Devices that time calls: a CUDA GPU or the host."""
