"""Judge a kernel that somebody else wrote: the command `judge`."""
