"""What a guard is: a few words of the source that keep an invariant, and the tests that fail without them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Guard(NamedTuple):
    """Where the source keeps an invariant."""

    name: str
    serves: int
    """The number of the invariant in docs/invariants.md."""
    file: str
    """Below vkjobs/."""
    text: str
    """The guard: words that stand in the file exactly once."""
    without: str
    """What stands there when the guard is gone."""
    tests: tuple[str, ...]
    """The tests that must fail then, each as ``test_x.py::test_y`` below tests/."""

    @property
    def path(self) -> Path:
        """The file."""
        return ROOT / "vkjobs" / self.file

    def fault(self) -> str:
        """Return what is wrong with the entry itself, if anything."""
        source = self.path.read_text()
        if (found := source.count(self.text)) != 1:
            return f"its text stands {found} times in vkjobs/{self.file}"
        try:
            compile(source.replace(self.text, self.without), self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            return f"without it vkjobs/{self.file} is no Python: {error}"
        for test in self.tests:
            file, _, name = test.partition("::")
            path = ROOT / "tests" / file
            if not path.is_file() or f"def {name.partition('[')[0]}(" not in path.read_text():
                return f"there is no test {test}"
        return "" if self.tests else "it names no test"


def guard(name: str, serves: int, file: str, text: str, without: str, *tests: str) -> Guard:
    """Return a guard; see `Guard`."""
    return Guard(name, serves, file, text, without, tests)
