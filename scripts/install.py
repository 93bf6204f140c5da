"""Makes a virtual environment for the Makefile, and installs into it only if something has changed.

Runs under the Python that the environment is to have, with nothing but its standard library. May run twice at
once; if interrupted, the next run starts the environment anew.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
PROJECT = tomllib.loads(PYPROJECT.read_text())["project"]
VERSION = "{}.{}.{}".format(*sys.version_info)


def main() -> None:
    """Bring the environment to what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--extras", nargs="*", default=[], help="extras of vkjobs to install")
    parser.add_argument("--wheel", action="store_true", help="install the built wheel, not the source tree")
    parser.add_argument("--oldest", action="store_true", help="with the oldest dependencies that are allowed")
    args = parser.parse_args()

    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Waiting for another make to finish its installation", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    state_path = args.venv / "vkjobs.json"
    state = json.loads(state_path.read_text()) if state_path.exists() else {}
    python = [os.path.realpath(sys.executable), VERSION]
    if state.get("python") != python:
        state = {}
        make(args.venv)
    # What another target has installed stays.
    extras = sorted(with_contained({*args.extras, *state.get("extras", [])}))
    sources = fingerprint([PYPROJECT, *(sorted(ROOT.glob("vkjobs/**/*")) if args.wheel else [])])
    wanted = {"python": python, "extras": extras, "sources": sources}
    if state != wanted:
        state_path.unlink(missing_ok=True)
        install(args.venv, extras, wheel=args.wheel, oldest=args.oldest)
        state_path.write_text(json.dumps(wanted))


def with_contained(extras: set[str]) -> set[str]:
    """Return the extras and those that they name as parts of theirs."""
    lines = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    parts = {part for line in lines if line.startswith("vkjobs[") for part in line[7:-1].split(",")}
    return extras if parts <= extras else with_contained(extras | parts)


def fingerprint(paths: Iterable[Path]) -> str:
    """Return a hash of the files' names and contents."""
    files = [path for path in paths if path.is_file() and path.suffix != ".pyc"]
    return hashlib.sha256(b"\0".join(bytes(path) + path.read_bytes() for path in files)).hexdigest()


def make(folder: Path) -> None:
    """Make an empty environment, removing the one that is there."""
    if importlib.util.find_spec("ensurepip") is None:
        # Debian and Ubuntu split it off.
        package = f"python3.{sys.version_info.minor}-venv"
        fail(f"{sys.executable} has no venv: apt install {package}, or pass PYTHON=<path of another>")
    print(f"Making {folder} with Python {VERSION} ({sys.executable})", flush=True)
    venv.create(folder, clear=True, symlinks=True, with_pip=True)


def install(folder: Path, extras: list[str], *, wheel: bool, oldest: bool) -> None:
    """Install vkjobs with its extras."""
    listed = f"[{','.join(extras)}]" if extras else ""
    print(f"Installing vkjobs{listed} into {folder}", flush=True)
    options = []
    if oldest:
        constraints = folder / "oldest.txt"
        constraints.write_text("\n".join(oldest_allowed()))
        options = ["--constraint", str(constraints)]
    if not wheel:
        pip(folder, "install", *options, "--editable", f".{listed}")
        return
    for old in ROOT.glob("dist/*.whl"):
        old.unlink()
    pip(folder, "wheel", "--no-deps", "--wheel-dir", "dist", ".")
    (built,) = ROOT.glob("dist/*.whl")
    pip(folder, "install", *options, f"{built}{listed}")
    # The command before leaves alone an older build of the same version.
    pip(folder, "install", "--force-reinstall", "--no-deps", str(built))


def oldest_allowed() -> list[str]:
    """Return the lower bounds of pyproject.toml, those of the test tools aside, as pip's constraints."""
    optional = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *optional["local"], *optional["flower"]]
    return [line.replace(">=", "==") for line in lines]


def pip(folder: Path, *arguments: str) -> None:
    """Run pip and show its progress in one line; if it fails, say why in another."""
    python = str(folder / "bin" / "python")
    lines = []
    with subprocess.Popen(
        [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments],
        cwd=ROOT,
        # What has no wheel for this platform is named at once, not compiled for minutes in vain.
        env={"PIP_ONLY_BINARY": ":all:", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if step := progress(lines[-1]):
                print("", step, end="", flush=True)
    print()
    if process.returncode:
        log = folder / "pip.log"
        log.write_text("\n".join(lines))
        fail(f"{complaint(lines)} (pip's whole output: {log})")


def progress(line: str) -> str | None:
    """Return what a person wants to know of a line of pip's output."""
    match line.split():
        case ["Collecting", requirement, *_]:
            return re.split(r"[^\w.-]", requirement)[0]
        case ["Downloading", file, size, "MB)"]:
            return f"{'-'.join(Path(file).name.split('-')[:2])} {size} MB)"
        case ["Installing", "collected", "packages:", *packages]:
            return f"- installing {len(packages)} packages"
        case _:
            return None


def complaint(lines: list[str]) -> str:
    """Return why pip failed, from its output."""
    for line in lines:
        if missing := re.search("No matching distribution found for ([^ ]+)", line):
            if any("Retrying" in line for line in lines):
                return "the package index cannot be reached"
            return (
                f"{missing[1]} has no wheel for Python {VERSION} on {sysconfig.get_platform()}: "
                "pass PYTHON=<path of another>, or PIP_ONLY_BINARY=:none: to compile it"
            )
    return next((line for line in reversed(lines) if line.startswith("ERROR")), "pip failed")


def fail(line: str) -> None:
    """End with this line."""
    sys.exit(f"vkjobs cannot be installed: {line}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
