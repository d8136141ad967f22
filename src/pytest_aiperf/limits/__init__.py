"""Measured limits of a GPU: bandwidths, arithmetic rates, launch costs, links."""
