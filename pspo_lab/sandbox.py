"""Run a program and its tests with hardly any rights: ``python -I sandbox.py < specification``, for `CodeReward`.

Before the program begins, this process gives up all system calls but those listed here (seccomp): it can open no file
for writing, make no socket and no process, and send no signal. It imports nothing of pspo.
"""

import builtins
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import types

# Allowed system calls, as numbers on x86_64 and aarch64 (None where there is none), from the kernel's unistd headers.
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "close": (3, 57),
    "lseek": (8, 62), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291), "stat": (4, None),
    "lstat": (6, None), "access": (21, None), "faccessat": (269, 48), "readlink": (89, None), "readlinkat": (267, 78),
    "getdents64": (217, 61), "getcwd": (79, 17), "dup": (32, 23), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214), "futex": (202, 98),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "set_robust_list": (273, 99), "rseq": (334, 293), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165),
    "times": (100, 153), "time": (201, None), "gettimeofday": (96, 169), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "getrandom": (318, 278),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "exit": (60, 93),
    "exit_group": (231, 94), "restart_syscall": (219, 128),
}  # fmt: skip
# Allowed if an argument, masked, has a value (argument, mask, value): files are opened to read, clone makes threads,
# fcntl goes up to F_GETFL, limits are read but not set, signals go to this process itself (`abort`).
WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CLONE_THREAD = 0x00010000
CONDITIONAL = {
    "open": ((2, None), (1, WRITING, 0)), "openat": ((257, 56), (2, WRITING, 0)),
    "clone": ((56, 220), (0, CLONE_THREAD, CLONE_THREAD)), "fcntl": ((72, 25), (1, 0xFFFFFFFC, 0)),
    "prlimit64": ((302, 261), (2, ~0, 0)), "tgkill": ((234, 131), (0, 0xFFFFFFFF, os.getpid())),
}  # fmt: skip
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*
LOAD, EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06  # BPF: load a word; jump if equal; mask; return
KILL, ALLOW, ERRNO, EPERM, ENOSYS = 0x80000000, 0x7FFF0000, 0x00050000, 1, 38


def filter_program(machine: str) -> list[tuple[int, int, int, int]]:
    """BPF instructions (code, jump if true, if false, operand) over struct seccomp_data {nr, arch, ip, args[6]}."""
    column, architecture = MACHINES[machine]
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for numbers in ALLOWED.values():
        if numbers[column] is not None:
            program += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, ALLOW)]
    for numbers, (argument, mask, value) in CONDITIONAL.values():
        if numbers[column] is None:
            continue
        checks = []  # the low word of the argument, then the high one
        for half in (0, 1):
            bits = mask >> 32 * half & 0xFFFFFFFF
            wanted = value >> 32 * half & 0xFFFFFFFF
            checks += [(LOAD, 0, 0, 16 + 8 * argument + 4 * half), (AND, 0, 0, bits), (EQUAL, 1, 0, wanted)]
            checks += [(RETURN, 0, 0, ERRNO | EPERM)]
        program += [(EQUAL, 0, len(checks) + 1, numbers[column]), *checks, (RETURN, 0, 0, ALLOW)]
    return [*program, (RETURN, 0, 0, ERRNO | ENOSYS)]  # as on a kernel that does not know the call


def confine(seconds: int, memory: int) -> None:
    """Give up nearly all rights of this process for good; OSError if the kernel refuses."""
    for name, limit in {"CPU": seconds, "AS": memory, "FSIZE": 0, "NOFILE": 64, "CORE": 0}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if (machine := os.uname().machine) not in MACHINES:
        raise OSError(f"the list of system calls is known for {' and '.join(MACHINES)}, not for {machine}")
    program = filter_program(machine)
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *part) for part in program))  # sock_filter
    sock_fprog = struct.pack("HP", len(program), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    for option in (
        (1, signal.SIGKILL, 0, 0, 0),  # PR_SET_PDEATHSIG: die with the trainer
        (38, 1, 0, 0, 0),  # PR_SET_NO_NEW_PRIVS
        (22, 2, sock_fprog, 0, 0),  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    ):
        if libc.prctl(*option):
            raise OSError(ctypes.get_errno(), f"prctl({option[0]}): {os.strerror(ctypes.get_errno())}")
    try:
        os.close(os.open(os.devnull, os.O_WRONLY))
    except PermissionError:
        return
    raise OSError("seccomp has no effect on this kernel")


def run_tests(code: str, tests: list[str]) -> int:
    """Run the program, then the tests; return how many tests raise nothing, 0 if the program raises.

    Names that run the tests are bound before the program runs, as the program may replace what it reaches by name.
    """
    module = types.ModuleType("solution")  # not __main__: the program's own main part stays unused
    namespace = module.__dict__
    main = {"__builtins__": builtins, "__name__": "__main__"}  # so that a test's main part runs
    builtin_names = vars(builtins)
    originals = dict(builtin_names)
    modules = sys.modules
    modules["solution"] = module
    hooks = (sys.settrace, sys.setprofile)
    build = compile
    execute = exec
    count = 0
    try:
        exec(compile(code, "solution.py", "exec"), namespace)
    except BaseException:  # SystemExit and MemoryError, too
        return 0
    modules["__main__"] = module
    for test in tests:
        for set_hook in hooks:
            set_hook(None)
        builtin_names.update(originals)
        namespace.update(main)
        try:
            execute(build(test, "test.py", "exec"), namespace)
            count += 1
        except BaseException:
            continue
    return count


def main() -> None:
    specification = json.load(sys.stdin)
    channel = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    secret = {"secret": specification["secret"]}
    passed = json.dumps(secret | {"passed": -1}).encode() + b"\n"
    write = os.write
    leave = os._exit
    try:
        confine(specification["seconds"], specification["memory"])
    except (OSError, ValueError) as error:
        write(channel, json.dumps(secret | {"refused": str(error)}).encode() + b"\n")
        return
    write(channel, json.dumps(secret | {"ready": True}).encode() + b"\n")
    count = run_tests(specification["code"], specification["tests"])
    write(channel, passed.replace(b"-1", b"%d" % count))
    leave(0)  # whatever threads are left


if __name__ == "__main__":
    main()
