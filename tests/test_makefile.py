from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vkjobs

ROOT = Path(__file__).resolve().parent.parent
MAKE = shutil.which("make")

pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed")


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make as a person would, without what a make that runs these tests has put into the environment."""
    assert MAKE is not None
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        [MAKE, *arguments],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def complaints(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What a failed make says, without make's own line about the target that failed."""
    assert result.returncode != 0
    return [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]


def fake_python(folder: Path, version: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {version}\nexit 1\n")
    path.chmod(0o755)
    return str(path)


def test_help_is_the_default_and_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    result = make()
    assert result.returncode == 0
    assert re.findall(r"^  make ([a-z-]+) +\S", result.stdout, re.MULTILINE) == phony.split()
    assert {"install", "demo", "test"} <= set(phony.split())


@pytest.mark.parametrize("target", ["install", "demo", "test", "test-oldest", "lint", "types", "wheel"])
def test_a_python_that_is_too_old_is_named_in_one_line(target: str, tmp_path: Path) -> None:
    python = fake_python(tmp_path, "3.10.13")
    (line,) = complaints(make(target, f"PYTHON={python}"))
    assert line == (f"vkjobs needs Python 3.11 or newer; {python} is 3.10.13. Pass PYTHON=<path of another>.")


def test_a_python_that_does_not_run_is_named_in_one_line(tmp_path: Path) -> None:
    (line,) = complaints(make("demo", f"PYTHON={tmp_path}/missing"))
    assert line.startswith(f"vkjobs needs Python 3.11 or newer; {tmp_path}/missing does not run.")


def test_no_python_at_all_is_one_line(tmp_path: Path) -> None:
    (line,) = complaints(make("demo", PATH=str(tmp_path)))
    assert line.startswith("vkjobs needs Python 3.11 or newer; none of python3.13 ")


def test_a_name_without_a_python_behind_it_is_passed_over(tmp_path: Path) -> None:
    shim = tmp_path / "python3.13"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    found = subprocess.run(
        [ROOT / "scripts" / "find-python"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "python3\n"


def test_a_package_that_cannot_be_had_is_named_in_one_line(tmp_path: Path) -> None:
    result = make(
        "demo",
        f"PYTHON={sys.executable}",
        f"VENV={tmp_path}/venv",
        PIP_NO_INDEX="1",
        PIP_CONFIG_FILE=os.devnull,
    )
    (line,) = complaints(result)
    assert re.match(r"vkjobs cannot be installed: hatchling\S* has no wheel for Python 3\.\d+\.\d+ on ", line)
    assert result.stdout.startswith(f"Making {tmp_path}/venv with Python 3.")


@pytest.mark.skipif(Path(sys.prefix).name != ".venv-wheel", reason="not run by make test WHEEL=1")
def test_it_is_the_wheel_that_is_tested() -> None:
    assert Path(vkjobs.__file__).is_relative_to(sys.prefix)
