"""The instructions that the host's C compiler makes of a function."""

import os
import re
import subprocess


def instructions(source, *flags):
    """Compile C source as kernels.host_c does; return the mnemonics of each function."""
    command = [os.environ.get("CC", "cc"), "-O3", *flags, "-fPIC", "-S", "-x", "c", "-", "-o", "-"]
    text = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    functions, current = {}, None
    for line in text.splitlines():
        if label := re.match(r"([A-Za-z_]\w*):", line):
            current = functions.setdefault(label[1], [])
        elif current is not None and (mnemonic := re.match(r"\s+([a-z]\w*)", line)):
            current.append(mnemonic[1])
    return functions
