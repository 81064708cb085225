"""Linux seccomp filter: a filtered process can only compute, use its open pipes, and exit.

The program is classic BPF over `struct seccomp_data` (linux/seccomp.h): system call number at byte 0,
architecture at 4, arguments from 16. Every system call outside the list fails with EPERM. So if a harmless
call is missing from the list, Python raises an error instead of losing the worker.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# linux/bpf_common.h
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
# linux/seccomp.h
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
# Byte offsets. THIRD_ARGUMENT is the offset of the low half of the third argument, on little-endian machines.
NUMBER, ARCHITECTURE, THIRD_ARGUMENT = 0, 4, 32
PROT_EXEC = 4
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2


class Instruction(NamedTuple):
    """One `struct sock_filter`: operation, steps to skip if true, steps to skip if false, operand."""

    code: int
    if_true: int
    if_false: int
    operand: int


class Machine(NamedTuple):
    """An architecture's audit number and system call numbers (asm/unistd.h)."""

    architecture: int
    calls: Mapping[str, int]
    # Calls that are allowed unless they ask for executable memory. Their third argument is the protection.
    memory: Mapping[str, int]


MACHINES: Mapping[str, Machine] = {
    "x86_64": Machine(
        0xC000003E,
        {
            "read": 0,
            "write": 1,
            "munmap": 11,
            "brk": 12,
            "rt_sigaction": 13,
            "rt_sigprocmask": 14,
            "rt_sigreturn": 15,
            "sched_yield": 24,
            "mremap": 25,
            "madvise": 28,
            "nanosleep": 35,
            "getpid": 39,
            "exit": 60,
            "gettimeofday": 96,
            "sigaltstack": 131,
            "time": 201,
            "futex": 202,
            "restart_syscall": 219,
            "clock_gettime": 228,
            "clock_nanosleep": 230,
            "exit_group": 231,
            "getrandom": 318,
        },
        {"mmap": 9, "mprotect": 10},
    ),
    "aarch64": Machine(
        0xC00000B7,
        {
            "read": 63,
            "write": 64,
            "exit": 93,
            "exit_group": 94,
            "futex": 98,
            "nanosleep": 101,
            "clock_gettime": 113,
            "clock_nanosleep": 115,
            "sched_yield": 124,
            "restart_syscall": 128,
            "sigaltstack": 132,
            "rt_sigaction": 134,
            "rt_sigprocmask": 135,
            "rt_sigreturn": 139,
            "gettimeofday": 169,
            "getpid": 172,
            "brk": 214,
            "munmap": 215,
            "mremap": 216,
            "madvise": 233,
            "getrandom": 278,
        },
        {"mmap": 222, "mprotect": 226},
    ),
}


def program(machine: Machine) -> Sequence[Instruction]:
    """Build the filter program for one architecture."""
    refuse = ERRNO | errno.EPERM
    steps = [
        Instruction(LOAD, 0, 0, ARCHITECTURE),
        Instruction(EQUAL, 1, 0, machine.architecture),
        Instruction(RETURN, 0, 0, KILL_PROCESS),  # call numbers differ between architectures
        Instruction(LOAD, 0, 0, NUMBER),
    ]
    for number in machine.calls.values():
        steps += [Instruction(EQUAL, 0, 1, number), Instruction(RETURN, 0, 0, ALLOW)]
    for number in machine.memory.values():
        steps += [
            Instruction(EQUAL, 0, 4, number),
            Instruction(LOAD, 0, 0, THIRD_ARGUMENT),
            Instruction(ANY_BIT, 0, 1, PROT_EXEC),
            Instruction(RETURN, 0, 0, refuse),
            Instruction(RETURN, 0, 0, ALLOW),
        ]
    return [*steps, Instruction(RETURN, 0, 0, refuse)]


def install() -> bool:
    """Install the filter in this process, permanently.

    Returns False if there is no filter for this system or architecture, or the kernel rejects it.
    """
    machine = MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None or sys.maxsize < 2**32:
        return False
    packed = b"".join(struct.pack("=HBBI", *step) for step in program(machine))
    instructions = ctypes.create_string_buffer(packed, len(packed))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(packed) // 8, ctypes.addressof(instructions))
    )
    return _prctl(PR_SET_NO_NEW_PRIVS, 1) and _prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header)
    )


def die_with_parent(parent: int) -> bool:
    """Make the kernel kill this process when its parent ends; kill it now if the parent has already ended.

    parent: the parent's process id. Returns False if the kernel cannot do this.
    """
    held = sys.platform == "linux" and _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent ended before the request, so the kernel will send no signal.
        signal.raise_signal(signal.SIGKILL)
    return held


def _prctl(option: int, *arguments: int) -> bool:
    words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
    return bool(ctypes.CDLL(None).prctl(ctypes.c_int(option), *words) == 0)
