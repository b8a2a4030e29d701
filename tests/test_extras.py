"""What an import that fails is taken for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from digen.errors import MissingExtra
from digen.extras import EXTRAS, explain

FAILING = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "diffusers":
            raise {error}
sys.meta_path.insert(0, Finder())
try:
    import digen.diffusion.roles
except ImportError as error:
    print(type(error).__name__, error)
except Exception as error:
    print("another:", type(error).__name__, error)
"""


@pytest.mark.parametrize(("extra", "module"), [(extra, module) for extra in EXTRAS for module in EXTRAS[extra]])
def test_a_module_of_the_extra_that_is_absent_is_named(extra: str, module: str) -> None:
    for name in (module, f"{module}.part"):
        with pytest.raises(MissingExtra, match=rf"{module} is not installed.*digen-rl\[{extra}\]"):
            explain(ModuleNotFoundError(f"No module named {name!r}", name=name), extra)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch_cpu.so: failed to map segment from shared object", name="_C"),
        ImportError("cannot import name 'x' from 'torch'", name="torch"),
        ModuleNotFoundError("No module named 'my_reward'", name="my_reward"),
        ImportError("without a name"),
    ],
)
def test_another_failure_says_itself_what_it_is(error: ImportError) -> None:
    explain(error, "diffusion")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "ImportError('libtorch_cpu.so: failed to map segment', name='_C')",
            "ImportError libtorch_cpu.so: failed to map segment\n",
        ),
        (
            "ModuleNotFoundError('No module', name='diffusers')",
            "another: MissingExtra diffusers is not installed; install it with: pip install 'digen-rl[diffusion]'\n",
        ),
    ],
)
def test_a_worker_that_cannot_import_says_why(error: str, said: str) -> None:
    script = FAILING.format(error=error)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == said, done.stderr
