"""Whether products in bfloat16 work on this machine's CPU, and whether it has instructions for them.

Some virtual machines announce AMX, the unit for such products, and stop a process that uses it: without a word, and in
the middle of a training. A child process tries it first.

    if not bf16_works(): ...        # take --precision 32-true
    if native_bf16(): ...           # they are faster than float32
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from patchgen.common.children import child_environment, python

CPU = Path("/proc/cpuinfo")
SECONDS = 120  # for the child, on a busy machine
NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}  # what x86 and ARM processors call such instructions in Linux
PRODUCT = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); raise SystemExit(float((a @ a)[0, 0]) != 256)"
ADVICE = (
    "--precision bf16-mixed ends a process on this machine: its CPU announces AMX and does not let it be used; take "
    "--precision 32-true, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, which leaves AMX aside"
)


@cache
def bf16_works() -> bool:
    """False where a product in bfloat16 kills its process; tried once a process, and only on CPUs that announce AMX."""
    try:
        if "amx_bf16" not in CPU.read_text():
            return True
    except OSError:  # another system, where this is not known to happen
        return True
    try:
        command = python("-c", PRODUCT)
        done = subprocess.run(command, env=child_environment(), capture_output=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def native_bf16() -> bool:
    """Whether the CPU computes products in bfloat16 by instructions of its own, and they work.

    Without them such a product is slower than in float32. False where the system does not tell.
    """
    try:
        words = set(CPU.read_text().split())
    except OSError:
        return False
    return bool(words & NATIVE) and bf16_works()


def require_bf16() -> None:
    """ValueError with the fix where products in bfloat16 do not work."""
    if not bf16_works():
        raise ValueError(ADVICE)
