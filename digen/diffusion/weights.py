"""The two halves of weight sync inside a worker: parameters to arrays, and arrays into parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from digen.errors import ConfigError
from digen.types import LoadReport, Payload, Publication


def publication(version: int, parameters: Mapping[str, Tensor]) -> Publication:
    """A copy of the parameters, by name; half-precision ones travel as 16-bit integers, bit for bit."""
    arrays = {name: array.copy() for name, array in _views(parameters).items()}
    return Publication(
        version=version,
        payload=Payload(arrays),
        checksum=checksum(arrays),
        num_tensors=len(arrays),
        nbytes=sum(array.nbytes for array in arrays.values()),
    )


@torch.no_grad()
def load_publication(published: Publication, parameters: Mapping[str, Tensor]) -> LoadReport:
    """Copy a publication into the parameters, in place, and report what they hold *afterwards*.

    Raises:
        ConfigError: names, shapes or sizes do not match the parameters one to one; nothing was copied then.
    """
    arrays = {name: np.asarray(published.payload[name]) for name in published.payload}
    unknown, missing = sorted(set(arrays) - set(parameters)), sorted(set(parameters) - set(arrays))
    if not arrays or unknown or missing:
        raise ConfigError(
            f"weights of version {published.version} do not fit the model: {len(arrays)} tensors, "
            f"{len(unknown)} unknown {unknown[:3]}, {len(missing)} missing {missing[:3]}; "
            "trainer and generator must be built from the same model"
        )
    for name, parameter in parameters.items():
        array = arrays[name]
        if array.shape != tuple(parameter.shape) or array.itemsize != parameter.element_size():
            raise ConfigError(
                f"weights of version {published.version}: {name} is {array.shape} of {array.itemsize}-byte elements, "
                f"the model has {tuple(parameter.shape)} of {parameter.element_size()}-byte ones; "
                "trainer and generator must be built from the same model with the same dtype"
            )
    for name, parameter in parameters.items():
        parameter.copy_(torch.from_numpy(arrays[name].copy()).view(parameter.dtype))
    return LoadReport(version=published.version, checksum=checksum(_views(parameters)), num_tensors=len(parameters))


def checksum(arrays: Mapping[str, NDArray[Any]]) -> int:
    """xxh3-64 over the names and bytes of C-contiguous arrays, in the order of their names."""
    digest = xxhash.xxh3_64()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].data)
    return digest.intdigest()


def _views(parameters: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Arrays on the host, which share memory with parameters that are there."""
    host = {name: parameter.detach().cpu().contiguous() for name, parameter in parameters.items()}
    return {
        name: (tensor.view(torch.int16) if tensor.dtype.itemsize == 2 else tensor).numpy()
        for name, tensor in host.items()
    }
