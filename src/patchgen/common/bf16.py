"""Whether bfloat16 matrix products work on this machine's CPU, and whether it has instructions for them.

Some virtual machines announce AMX, the unit for such products, but kill a process that uses it, without a message and
in the middle of training. So a child process tries it first.

    if not bf16_works(): ...        # use --precision 32-true
    if native_bf16(): ...           # they are faster than float32
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from patchgen.common.children import child_environment, python

CPU = Path("/proc/cpuinfo")
SECONDS = 120  # timeout of the child, on a busy machine
NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}  # Linux names of such instructions on x86 and ARM
PRODUCT = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); raise SystemExit(float((a @ a)[0, 0]) != 256)"
ADVICE = (
    "--precision bf16-mixed crashes on this machine: its CPU announces AMX, but using it kills the process; use "
    "--precision 32-true, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, which disables AMX"
)


@cache
def bf16_works() -> bool:
    """False if a bfloat16 product kills its process; tried once per process, and only on CPUs that announce AMX."""
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
    """Whether the CPU has working instructions for bfloat16 products.

    Without them such a product is slower than in float32. False if the system does not report it.
    """
    try:
        words = set(CPU.read_text().split())
    except OSError:
        return False
    return bool(words & NATIVE) and bf16_works()


def require_bf16() -> None:
    """ValueError with the fix if bfloat16 products do not work."""
    if not bf16_works():
        raise ValueError(ADVICE)
