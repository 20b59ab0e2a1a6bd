"""A kernel from which a submission reaches nothing: no network, no files but Python's own, limits on all else.

It is the command of a kernel specification: `python jail.py CONNECTION_FILE` starts ipykernel inside
bubblewrap and watches it. What is shared with the outside is the folder of the connection file,
where the kernel's sockets are. A jail cannot stop code from meddling with checks that run in the
same kernel: book/teaching.md says what to look at.
"""

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

MEMORY = 4_000_000_000  # bytes, resident, of all processes in a jail
ADDRESS_SPACE = 16_000_000_000  # bytes a process may reserve: torch with CUDA maps a lot
SCRATCH = 500_000_000  # bytes in /tmp, and of one file
PROCESSES = 64
SECONDS = 1800  # of one notebook
ISOLATION = (
    "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL",
    "--die-with-parent", "--new-session",
)  # fmt: skip


def bubblewrap():
    """Its path; RuntimeError where it is missing, too old, or may not make its namespaces."""
    found = shutil.which("bwrap")
    if not found:
        raise RuntimeError(
            "bubblewrap is not installed (Debian, Ubuntu, Fedora: package 'bubblewrap')"
        )
    test = [found, *ISOLATION, "--size", "1", "--tmpfs", "/", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(test, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"bubblewrap (0.8 or newer) cannot start here: {done.stderr.strip()}")
    return found


def readable():
    """What Python needs to read: the system's libraries, its own prefixes, and the course's library."""
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "usr"):
        path = Path("/", name)
        if path.is_symlink():
            yield "--symlink", os.readlink(path), str(path)
        elif path.is_dir():
            yield "--ro-bind", str(path), str(path)
    for path in (
        "/etc/ld.so.cache",
        "/etc/alternatives",
        "/etc/fonts",
        "/etc/localtime",
        "/nix/store",
    ):
        yield "--ro-bind-try", path, path
    library = Path(importlib.util.find_spec("gpt2_to_k3").origin).parents[1]
    for path in {sys.prefix, sys.base_prefix, str(library)}:
        if not path.startswith("/usr/"):
            yield "--ro-bind", path, path


def command(connection_file):
    shared = str(Path(connection_file).resolve().parent)
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "IPYTHONDIR": "/tmp/ipython",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return [
        bubblewrap(), *ISOLATION, "--uid", "1000", "--gid", "1000", "--clearenv",
        *(x for pair in environment.items() for x in ("--setenv", *pair)),
        "--proc", "/proc", "--dev", "/dev",
        *(x for path in ("/tmp", "/dev/shm") for x in ("--size", str(SCRATCH), "--tmpfs", path)),
        *(x for mount in readable() for x in mount),  # after /tmp, where a clone may be
        "--bind", shared, shared, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp",
        sys.executable, "-m", "ipykernel_launcher", "-f", str(Path(connection_file).resolve()),
        "--HistoryManager.enabled=False",
    ]  # fmt: skip


def limit():
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_FSIZE, (SCRATCH, SCRATCH))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def too_much(jail, started, shared):
    """What a jail has taken too much of, or None."""
    if time.monotonic() - started > SECONDS:
        return f"more than {SECONDS} seconds"
    memory = processes = 0
    for process in jail.children(recursive=True):
        try:
            memory += process.memory_info().rss
            processes += 1
        except psutil.NoSuchProcess:
            continue
    if processes > PROCESSES:
        return f"more than {PROCESSES} processes"
    if memory > MEMORY:
        return f"more than {MEMORY:,} bytes of memory"
    if sum(f.stat().st_size for f in Path(shared).iterdir() if f.is_file()) > SCRATCH:
        return f"more than {SCRATCH:,} bytes of files"
    return None


def main(connection_file):
    # A limit is for what runs inside; set before bubblewrap, it holds for all of it.
    # What a kernel prints by itself, as its greeting, is of no use here.
    quiet = subprocess.DEVNULL
    kernel = subprocess.Popen(
        command(connection_file), preexec_fn=limit, stdout=quiet, stderr=quiet
    )
    jail, started = psutil.Process(kernel.pid), time.monotonic()
    shared = Path(connection_file).resolve().parent
    while kernel.poll() is None:
        try:
            reason = too_much(jail, started, shared)
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
        if reason:
            print(f"jail: ended, {reason}", file=sys.stderr)
            kernel.kill()  # the first process of the jail dies with it, and all others with that
            break
        time.sleep(0.1)
    sys.exit(kernel.wait())


if __name__ == "__main__":
    main(sys.argv[1])
