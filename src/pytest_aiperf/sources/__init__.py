"""Where the code of a claim is, and its hash."""
