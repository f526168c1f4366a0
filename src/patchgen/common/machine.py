"""This machine: its cores, how many threads torch may use, and whether its CPU computes in bfloat16.

More threads than cores are allowed, because results depend on their number in the last digits and a run may come from a
larger machine. A thread that cannot be started ends the process inside the OpenMP library, without a message, as does
AMX, the unit for bfloat16 products, on some virtual machines that announce it; so a child process tries it first.
"""

import os
import subprocess
import threading
from functools import cache
from pathlib import Path

from patchgen.common.child_process import child_environment, python

PER_CORE = 32


def use_threads(count: int | None) -> None:
    """Set the number of threads of torch; ValueError: more than `PER_CORE` per core, or than may be started."""
    if not count:
        return
    cores = available_cores()
    fix = f"give --threads {cores}, or none: the number affects only the last digits of results"
    if count > PER_CORE * cores:
        raise ValueError(
            f"threads must be at most {PER_CORE * cores} on this machine ({PER_CORE} for each of its {cores} cores), "
            f"not {count}; {fix}"
        )
    if count > cores and (started := _startable(count)) < count:
        raise ValueError(f"{count} threads requested, but limits on memory or processes allow {started}; {fix}")
    import torch

    torch.set_num_threads(count)


def available_cores() -> int:
    """Cores that this process may run on: a container or a scheduler may give fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _startable(count: int) -> int:
    """How many of `count` threads can be started at once, with stacks as large as OpenMP's."""
    end, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except (RuntimeError, MemoryError):  # "can't start new thread"
        pass
    finally:
        end.set()
        for thread in threads:
            thread.join()
    return len(threads)


CPU = Path("/proc/cpuinfo")
SECONDS = 120  # timeout of the child, on a busy machine
NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}  # Linux names of such instructions on x86 and ARM
PRODUCT = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); raise SystemExit(float((a @ a)[0, 0]) != 256)"


@cache
def bf16_works() -> bool:
    """False if a bfloat16 product kills its process; tried once per process, and only on CPUs that announce AMX."""
    if "amx_bf16" not in _instructions():
        return True
    try:
        command = python("-c", PRODUCT)
        done = subprocess.run(command, env=child_environment(), capture_output=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def native_bf16() -> bool:
    """Whether the CPU has working instructions for bfloat16 products; without them, float32 is faster."""
    return bool(_instructions() & NATIVE) and bf16_works()


def _instructions() -> set[str]:
    """What the CPU announces; empty if the system does not report it."""
    try:
        return set(CPU.read_text().split())
    except OSError:
        return set()


def require_bf16() -> None:
    """ValueError with the fix if bfloat16 products do not work."""
    if not bf16_works():
        raise ValueError(
            "--precision bf16-mixed crashes on this machine: its CPU announces AMX, but using it kills the process; "
            "use --precision 32-true, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, without AMX"
        )


def computes_bf16(accelerator: str) -> bool:
    """Whether the device of `--accelerator` computes bfloat16 products natively."""
    import torch

    if accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has_mps = accelerator == "auto" and torch.backends.mps.is_available()
    return accelerator in ("auto", "cpu") and not has_mps and native_bf16()


def computes_half(device: str, precision: str) -> bool:
    """Whether a precision means bfloat16 on a device; ValueError if it was named and kills processes here."""
    if precision == "auto":
        return computes_bf16(device)
    if precision != "32-true" and device == "cpu":
        require_bf16()
    return precision != "32-true"
