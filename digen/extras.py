"""The optional dependencies: which extra of ``digen-rl`` brings which modules. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

from digen.errors import MissingExtra

EXTRAS: dict[str, tuple[str, ...]] = {
    "diffusion": ("torch", "diffusers", "transformers", "safetensors", "numpy", "PIL"),
    "demo": ("sklearn", "matplotlib"),
    "rewards": ("rapidocr", "onnxruntime"),
    "data": ("datasets",),
    "ray": ("ray",),
    "video": ("av",),
}
"""The modules that each extra must provide."""


def require(extra: str) -> None:
    """Check that an extra is installed.

    Raises:
        MissingExtra: names the first module that is absent and how to install it.
    """
    for module in EXTRAS[extra]:
        if find_spec(module) is None:
            raise MissingExtra(module, extra)


def explain(error: ImportError, extra: str) -> None:
    """Say how to install what an import did not find. For the ``except`` of an import, before its ``raise``.

    An import can fail though everything is installed, for example where memory ends: nothing is said then.

    Raises:
        MissingExtra: a module of the extra is absent.
    """
    module = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and module in EXTRAS[extra]:
        raise MissingExtra(module, extra) from error
