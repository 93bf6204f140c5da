"""A copy of package and tests from which a guard is taken out, and what the tests say there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from guards.guard import ROOT, Guard

_PATIENCE_S = 600
# A removal that only breaks the source proves nothing.
_BROKEN = re.compile(
    r"\b(NameError|UnboundLocalError|ImportError|ModuleNotFoundError|psycopg2\.errors\.(SyntaxError|IndeterminateDatatype"
    r"|Undefined(Column|Function|Parameter)|Ambiguous\w+|DatatypeMismatch|GroupingError))\b.*"
)


class Said(NamedTuple):
    """What a process said, and its exit code."""

    code: int
    text: str

    @property
    def last_line(self) -> str:
        """The last line that says something."""
        return next((line.strip("= ") for line in reversed(self.text.splitlines()) if line.strip()), "nothing was said")

    def tells_failure_of(self, test: str) -> bool:
        """Tell whether pytest said that the test failed, or one of its cases."""
        return re.search(rf"^FAILED tests/{re.escape(test)}(\[| |$)", self.text, re.MULTILINE) is not None


class Copy:
    """Package and tests in a folder of their own, with a Python that knows no other vkjobs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("vkjobs", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        environment = folder / "venv"
        venv.create(environment, symlinks=True)
        self._python = environment / "bin" / "python"
        # Folders that are named so are searched for modules alone: what makes a source tree an installed package there
        # has no effect here.
        installed = [path for path in sys.path if Path(path).name.endswith("-packages")]
        (site,) = environment.glob("lib/*/site-packages")
        (site / "copy.pth").write_text("\n".join([str(folder), *installed, ""]))
        imported = self._run("-P", "-c", "import vkjobs; print(vkjobs.__file__)")
        if Path(imported.text.strip()) != folder / "vkjobs" / "__init__.py":
            raise RuntimeError(f"the tests would not be of the copy: {imported.text}")

    def take_out(self, guard: Guard) -> None:
        """Take a guard out of the source."""
        path = self._folder / "vkjobs" / guard.file
        path.write_text(path.read_text().replace(guard.text, guard.without))

    def test(self, tests: Sequence[str], *options: str) -> Said:
        """Run tests; return what pytest says."""
        chosen = [f"tests/{test}" for test in tests]
        plugins = ["-p", "no:cacheprovider", "-p", "no:randomly"]
        return self._run("-P", "-m", "pytest", "-q", "--tb=short", *plugins, *options, *chosen)

    def _run(self, *command: str) -> Said:
        # What the tests that ask are run by is not for those that are asked.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTEST_"))
        }
        process = subprocess.Popen(
            [self._python, *command],
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said = process.communicate(timeout=_PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            return Said(-1, f"no end after {_PATIENCE_S} s")
        else:
            return Said(process.returncode, said)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


@contextmanager
def copy() -> Iterator[Copy]:
    """Give a copy for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="vkjobs-guards-") as folder:
        yield Copy(Path(folder).resolve())


def complaint(guards: Sequence[Guard]) -> str:
    """Return why the tests that are named prove nothing: one of them fails with all guards in place."""
    tests = sorted({test for guard in guards for test in guard.tests})
    with copy() as whole:
        said = whole.test(tests, *(("-n", "2", "--dist", "loadfile") if len(tests) > 1 else ()))
    if said.code == 0:
        return ""
    failed = [line for line in said.text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return "\n".join(["tests fail with all guards in place:", *failed, said.last_line])


def verdict(guard: Guard) -> str:
    """Return why the guard is not proven to be needed; nothing if it is."""
    if fault := guard.fault():
        return fault
    with copy() as patched:
        patched.take_out(guard)
        said = patched.test(guard.tests, "--timeout=60")
    if needless := [test for test in guard.tests if not said.tells_failure_of(test)]:
        return f"without it {', '.join(needless)} did not fail: {said.last_line}"
    if broken := _BROKEN.search(said.text):
        return f"what is left is broken: {broken[0]}"
    return ""
