"""How long calls take, on a GPU, on the host or in virtual time; and the limits of a GPU."""
