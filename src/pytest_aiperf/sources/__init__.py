"""Find the source code of a claim's arms, and hash it."""
