"""Workers held against the rest of the config and against machines that are made up."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from digen import placement
from digen.cli import main
from digen.config import RunConfig, load_config
from digen.errors import ConfigError
from digen.machine import Gpu, Machine, look, visible
from digen.runner import prepare

H200 = Gpu("H200", 143771, 512)
TWO_GPUS = Machine((H200, H200), "nvidia-smi", 16, 2**37, 2**36, 2**34, 2**34, 1024)
NO_GPU = replace(TWO_GPUS, gpus=(), gpus_from="there is no driver: neither nvidia-smi nor /dev/kfd")
CUDA = {"model.device": "cuda", "workers.gpus": {"gen0": [0], "trainer": [1]}}
OMNI = {
    "workers.engines": {"gen0": "vllm_omni"},
    "workers.scorers": 1,
    "model.family": "flux",
    "evaluation.at_start": False,
    "evaluation.at_end": False,
}


def config(values: dict[str, Any]) -> RunConfig:
    return load_config(None, values)


@pytest.mark.parametrize("field", ["gpus", "ranks", "python", "ray.resources"])
def test_a_name_that_is_no_worker(field: str) -> None:
    value: Any = {"gpus": [0], "ranks": 2, "python": "/x", "ray.resources": {"a": 1}}[field]
    with pytest.raises(ConfigError, match=rf"^workers\.{field} names 'trainr'.*did you mean 'trainer'\? the workers"):
        placement.check(config({f"workers.{field}": {"trainr": value}}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"workers.gpus": {"gen1": [0]}}, ["'gen1'", "did you mean 'gen0'?", "gen0, trainer"]),
        ({"workers.engines": {"gen3": "vllm_omni"}}, ["workers.engines", "gen3"]),
        ({"workers.engines": {"trainer": "vllm_omni"}}, ["workers.engines", "trainer", "the generators are gen0"]),
        ({"model.device": "cuda", "workers.gpus": {"gen0": [0]}}, ["model.device is cuda", "gives trainer no GPU"]),
        (
            {"workers.ranks": {"trainer": 4}, "workers.fsdp": {"replicas": 3}},
            ["fsdp.replicas=3", "4 ranks of trainer", "1, 2, 4"],
        ),
        ({"workers.fsdp": {"cpu_offload": True}}, ["workers.fsdp.cpu_offload", "one rank", "workers.ranks"]),
        (
            {"workers.fsdp": {"assist": "replica", "generators": True}, "workers.ranks": {"gen0": 2}},
            ["workers.fsdp.assist", "the trainer has one rank"],
        ),
        (
            {"workers.fsdp": {"generators": True}, "workers.ranks": {"trainer": 2}},
            ["workers.fsdp.generators", "every generator has one rank"],
        ),
        ({"workers.weights": {"channel": "broadcast"}}, ["broadcast", "schedule.sync=hold"]),
        ({"workers.ray": {"cpus_per_rank": 2}}, ["workers.ray.cpus_per_rank", "workers.type=ray"]),
        ({"workers.engine_args": {"a": 1}}, ["workers.engine_args"]),
        ({**OMNI, "model.family": "digits"}, ["vllm_omni", "'digits'", "flux, qwen_image, sd3, wan"]),
        ({**OMNI, "workers.scorers": 0}, ["vllm_omni", "workers.scorers"]),
        ({"reward.name": "judge", "reward.kwargs": {"server": "x"}}, ["'x'", "workers.judges"]),
    ],
)
def test_what_contradicts_itself(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        placement.check(config(values))
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        CUDA,
        OMNI,
        {
            "workers.ranks": {"trainer": 4, "gen0": 2},
            "workers.fsdp": {"replicas": 2, "generators": True},
            "model.forward_batch": 12,
        },
        {"workers.ranks": {"trainer": 2}, "workers.fsdp": {"assist": "replica", "cpu_offload": True}},
        {"workers.fsdp": {"replicas": 1, "assist": "sharded"}},
        {"workers.weights": {"channel": "files", "folder": "/x"}},
        {"workers.weights": {"channel": "broadcast"}, "schedule.sync": "hold", "restarts.budget": 0},
        {"workers.ray": {"cpus_per_rank": 1}},
        {"workers.type": "ray", "workers.ray": {"cpus_per_rank": 2}},
    ],
)
def test_what_fits_together(values: dict[str, Any]) -> None:
    placement.check(config(values))


def test_gpus_that_a_machine_has_or_not() -> None:
    assert placement.missing(config(CUDA), TWO_GPUS) == []
    far = config({**CUDA, "workers.gpus": {"gen0": [0], "trainer": [1, 2, 7]}})
    (line,) = placement.missing(far, TWO_GPUS)
    assert "trainer 7; it shows 2, numbered from 0 (nvidia-smi): change workers.gpus" in line
    (line,) = placement.missing(far, NO_GPU)
    assert "gen0 0, trainer 7; it shows none (there is no driver" in line
    assert placement.missing(config({**CUDA, "workers.type": "ray"}), NO_GPU) == [], "its nodes have them"
    with pytest.raises(ConfigError, match="GPUs that this machine has not"):
        placement.require(far, NO_GPU, prepare(config({})).plan)


def test_devices_that_cuda_shows() -> None:
    gpus = {str(number): Gpu(f"gpu{number}", 1, 0) for number in range(4)}
    uuids = {"GPU-aa1": "0", "GPU-aa2": "1", "GPU-b": "2"}
    names = {
        "2,0": ["gpu2", "gpu0"],
        "": [],
        "-1": [],
        "1,9,0": ["gpu1"],  # CUDA stops at the first that is none
        "GPU-b, GPU-aa1": ["gpu2", "gpu0"],
        "GPU-a": [],  # two begin so
    }
    for devices, wanted in names.items():
        assert [gpu.name for gpu in visible(gpus, uuids, devices)] == wanted, devices


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "0, GPU-a, NVIDIA H200, 143771, 100"\necho "1, GPU-b, NVIDIA L4, [N/A], [N/A]"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert look().gpus == (Gpu("NVIDIA H200", 143771, 100), Gpu("NVIDIA L4", 0, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = look()
    assert ([gpu.name for gpu in found.gpus], found.gpus_from) == (
        ["NVIDIA L4"],
        "nvidia-smi, of whose 2 CUDA_VISIBLE_DEVICES=1 shows 1",
    )
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert (look().gpus, look().gpus_from) == ((), "nvidia-smi failed: the NVIDIA driver does not work")


def test_an_engine_that_this_interpreter_lacks() -> None:
    (line,) = placement.missing(config(OMNI), NO_GPU)
    assert "gen0 runs on vllm_omni" in line
    assert "workers.python.gen0" in line
    assert placement.missing(config({**OMNI, "workers.python": {"gen0": sys.executable}}), NO_GPU) == []


def test_memory_for_weights_and_descriptors(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    with (tmp_path / "transformer" / "model.safetensors").open("wb") as file:
        file.truncate(5 * 2**30)  # a hole: nothing is written
    values = {"model.family": "flux", "model.path": str(tmp_path)}
    small = replace(NO_GPU, memory=8 * 2**30, available=2**30)
    assert placement.weight_bytes(config(values)) == 5 * 2**30
    (line,) = placement.missing(config(values), small)
    assert "published weights take 10.0 GiB of shared memory (2 copies), and this machine has 8.0 GiB" in line
    assert placement.missing(config({**values, "model.lora": {"rank": 4}}), small) == []
    assert placement.weight_bytes(config({**values, "schedule.mode": "colocated"})) == 0, "nothing is published"
    enough = replace(small, memory=2**34)
    assert placement.missing(config(values), enough) == []
    assert "come to roughly 10.0 GiB, more than the 1.0 GiB" in placement.remarks(config(values), enough)[0]

    plan = prepare(config({})).plan
    wide = config({"schedule.mode": "tcss"})
    assert placement.num_segments(wide, plan) == 2 * plan.num_micro_batches
    (line,) = placement.missing(wide, replace(NO_GPU, num_files=80), plan)
    assert line.endswith("raise it: ulimit -n 4096")
    need = placement.num_segments(wide, plan) + 64 + 2 * 3  # the trainer and a generator
    assert placement.missing(wide, replace(NO_GPU, num_files=need), plan) == []
    many = config({"schedule.mode": "tcss", "workers.generators": 2, "workers.ranks": {"trainer": 8}})
    (line,) = placement.missing(many, replace(NO_GPU, num_files=need), plan)
    assert "10 ranks have 3 each" in line
    sized = config({"sampling.height": 1024, "sampling.width": 1024, "plan.samples_per_prompt": 1})
    assert placement.rollout_bytes(sized, plan) == 10 * 9 * 128 * 128 * 16 * 4


def test_what_is_worth_knowing() -> None:
    shared = config({**CUDA, "workers.gpus": {"gen0": [0], "trainer": [0]}})
    assert placement.remarks(shared) == ["GPU 0 is shared by gen0, trainer: what they hold must fit into it together"]
    assert placement.remarks(config({**CUDA, "model.device": "cpu"})) == [
        "model.device is cpu, so that the GPUs of gen0, trainer are not used"
    ]
    busy = config({"workers.threads": 9})
    assert placement.crowding(config({}), NO_GPU) == []
    assert placement.crowding(busy, NO_GPU) == ["the ranks have 18 threads in all, and this machine 16 cores"]


def test_check_says_what_train_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--model.device", "cuda", "--workers.gpus", "{gen0: [98], trainer: [99]}"]
    arguments += ["--run.output", str(tmp_path / "runs")]
    assert main(["check", *arguments]) == 0
    said = "GPUs that this machine has not: gen0 98, trainer 99; it shows "
    assert any(line.startswith(f"# not here yet: {said}") for line in capsys.readouterr().out.splitlines())
    assert main(["train", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"digen: {said}")
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_the_driver_stays_without_torch_and_ray() -> None:
    code = "import sys, digen.runner, digen.doctor; print(sorted({'torch', 'ray', 'numpy', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_folders_that_cannot_be_written_are_missing(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    found = placement.missing(
        config({"run.output": str(taken / "runs"), "workers.weights": {"channel": "files", "folder": str(taken)}}),
        NO_GPU,
    )
    assert [line.split(":")[0] for line in found] == ["run.output", "workers.weights.folder"]
    assert all(f"because {taken} is not a folder" in line for line in found)
