"""Where a family's model comes from, what is refused before weights are read, and a family of another package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler
from transformers import UMT5Config, UMT5EncoderModel

from digen.config import ModelSection, load_config
from digen.diffusion.families import FAMILIES, lookup, source
from digen.diffusion.roles import GeneratorTarget, TrainerTarget
from digen.diffusion.tiny import TINY, image_vae, t5_config, t5_tokenizer
from digen.errors import ConfigError
from digen.types import GroupSlice, MicroBatch, Prompt
from tests.diffusion.family_checks import TEXTS, draw_with_diffusers, draw_with_digen, initial_noise, load

Folder = Callable[[str], Path]
PLUGINS = Path(__file__).parent / "plugins"


def tiny(name: str, where: Path | str, **options: Any) -> Any:
    """The family ``name`` of ``where``, at its tiny size."""
    return load(name, where, TINY[name].sampling, **options)


def predict(family: Any, conditioning: Any) -> torch.Tensor:
    prediction: torch.Tensor = family.predict(initial_noise(family), torch.tensor([0.8, 0.3]), conditioning)
    return prediction


def _with_class(folder: Path, into: Path, kind: str) -> Path:
    shutil.copytree(folder, into, dirs_exist_ok=True)
    index = into / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": kind}))
    return into


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_is_known_of_a_family_before_it_is_imported_is_true(name: str) -> None:
    info = FAMILIES[name]
    module, _, kind = info.target.partition(":")
    assert getattr(import_module(module), kind).pipeline == info.pipeline


def test_a_folder_of_another_family_is_named(tiny_model: Folder) -> None:
    message = r"sd3 is a StableDiffusion3Pipeline, but model\.family needs a FluxPipeline; set model\.family to sd3"
    with pytest.raises(ConfigError, match=message):
        source(ModelSection(family="flux", path=tiny_model("sd3")))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("flux", "FluxKontextPipeline"),
        ("flux", "FluxFillPipeline"),
        ("qwen_image", "QwenImageEditPipeline"),
        ("sd3", "StableDiffusion3Img2ImgPipeline"),
        ("wan", "WanImageToVideoPipeline"),
        ("hunyuan_video", "HunyuanVideoImageToVideoPipeline"),
    ],
)
def test_pipelines_with_conditions_other_than_text_are_refused(
    name: str, kind: str, tiny_model: Folder, tmp_path: Path
) -> None:
    other = _with_class(tiny_model(name), tmp_path, kind)
    with pytest.raises(ConfigError, match=rf"is a {kind}, but .* \(image to image, image to video, editing"):
        source(ModelSection(family=name, path=other))


def test_a_config_that_lacks_what_the_family_reads_is_named(tiny_model: Folder, tmp_path: Path) -> None:
    shutil.copytree(tiny_model("flux"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderTiny"}')
    with pytest.raises(ConfigError, match="as family flux: a component's config lacks 'block_out_channels'"):
        tiny("flux", tmp_path)


@pytest.mark.parametrize("name", ["flux", "qwen_image", "sd3"])
def test_a_trainer_reads_no_weights_but_the_denoisers(name: str, tiny_model: Folder, tmp_path: Path) -> None:
    whole = tiny(name, tiny_model(name))
    shutil.copytree(tiny_model(name), tmp_path, dirs_exist_ok=True)
    for weights in tmp_path.rglob("*.safetensors"):
        if weights.parent.name != "transformer":
            weights.unlink()
    with pytest.raises(ConfigError, match=f"cannot be loaded as family {name}"):
        tiny(name, tmp_path)
    trainer = tiny(name, tmp_path, parts=frozenset({"denoise"}))
    with torch.no_grad():
        rows = whole.encode([Prompt(text) for text in TEXTS])
        assert torch.equal(predict(trainer, rows), predict(whole, rows))


@pytest.mark.parametrize("name", sorted(TINY))
def test_who_decodes_has_no_encoder(name: str, tiny_model: Folder) -> None:
    family = tiny(name, tiny_model(name), parts=frozenset({"decode"}))
    held = {component for component, loaded in family.pipe.components.items() if loaded is not None}
    assert held - {family.denoiser} == {"vae", "scheduler"}


@pytest.mark.parametrize("name", sorted(TINY))
def test_gradient_checkpointing_gives_the_same_gradient(name: str, tiny_model: Folder) -> None:
    plain, checkpointed = (tiny(name, tiny_model(name), gradient_checkpointing=on) for on in (False, True))
    assert checkpointed.network.is_gradient_checkpointing
    assert not plain.network.is_gradient_checkpointing
    rows = plain.encode([Prompt(text) for text in TEXTS])
    for family in (plain, checkpointed):
        torch.autograd.backward(predict(family, rows).square().mean())
    gradients = {key: tensor.grad for key, tensor in plain.parameters().items()}
    assert sum(gradient is not None for gradient in gradients.values()) > 10
    for key, parameter in checkpointed.parameters().items():
        expected = gradients[key]
        assert (parameter.grad is None) == (expected is None), key
        if expected is not None and parameter.grad is not None:
            assert torch.equal(parameter.grad, expected), key


@pytest.mark.parametrize("name", sorted(TINY))
def test_everything_follows_the_model_to_its_device(name: str, tiny_model: Folder) -> None:
    family = tiny(name, tiny_model(name))
    rows = family.encode([Prompt(text) for text in TEXTS])  # on the host, as they come to a trainer
    family.network.to("meta")
    family._device = torch.device("meta")  # as a config says it, and as it stays where weights rest on the host
    devices: set[str] = set()
    family.network.register_forward_pre_hook(
        lambda _, positional, named: devices.update(
            value.device.type for value in (*positional, *named.values()) if isinstance(value, torch.Tensor)
        ),
        with_kwargs=True,
    )
    prediction = family.predict(initial_noise(family).to("meta"), torch.tensor([0.8, 0.3], device="meta"), rows)
    assert family.device.type == prediction.device.type == "meta"
    assert devices == {"meta"}
    assert prediction.shape == (len(TEXTS), *family.latent_shape)


def test_attention_backends_are_diffusers_own(tiny_model: Folder) -> None:
    default, native = tiny("flux", tiny_model("flux")), tiny("flux", tiny_model("flux"), attention="native")
    rows = default.encode([Prompt(text) for text in TEXTS])
    with torch.no_grad():
        assert torch.equal(predict(default, rows), predict(native, rows))
    with pytest.raises(ConfigError, match=r"model\.attention 'unheard' cannot be used"):
        tiny("flux", tiny_model("flux"), attention="unheard")


@pytest.fixture
def hub(tiny_model: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model that is in the hub's cache, with no way to the hub."""
    revision = "0" * 40
    repository = tmp_path / "models--someone--tiny-sd3"
    shutil.copytree(tiny_model("sd3"), repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return "hf:someone/tiny-sd3"


@pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument:UserWarning")  # diffusers' own
def test_a_model_may_come_from_the_hub(hub: str, tiny_model: Folder) -> None:
    local, cached = tiny("sd3", tiny_model("sd3")), tiny("sd3", hub)
    rows = local.encode([Prompt(text) for text in TEXTS])
    with torch.no_grad():
        assert torch.equal(predict(local, rows), predict(cached, cached.encode([Prompt(text) for text in TEXTS])))
    with pytest.raises(ConfigError, match=r"someone/tiny-sd3 is a StableDiffusion3Pipeline.* set model\.family to sd3"):
        tiny("flux", hub)
    with pytest.raises(ConfigError, match=r"model folder someone/nothing: model_index\.json cannot be read"):
        tiny("sd3", "hf:someone/nothing")


# A family of another package


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the family is on the path, with its entry point."""
    metadata = tmp_path / "aura_flow_digen-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: aura-flow-digen\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[digen.families]\naura_flow = aura_flow_digen:AuraFlow\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(PLUGINS)


@pytest.fixture
def aura_flow(tmp_path: Path) -> Path:
    t5 = t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = AuraFlowPipeline(
            tokenizer=t5,
            text_encoder=UMT5EncoderModel(t5_config(t5, 32, UMT5Config)).eval(),
            vae=image_vae(4),
            transformer=AuraFlowTransformer2DModel(
                sample_size=16,
                num_mmdit_layers=1,
                num_single_dit_layers=1,
                attention_head_dim=8,
                num_attention_heads=4,
                joint_attention_dim=32,
                caption_projection_dim=32,
                pos_embed_max_size=256,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["aura_flow", "aura_flow_digen:AuraFlow"])
def test_another_packages_family_draws_and_learns(name: str, aura_flow: Path) -> None:
    assert len((PLUGINS / "aura_flow_digen.py").read_text().splitlines()) <= 60
    info = lookup(name)
    assert info.target == "aura_flow_digen:AuraFlow"
    size: dict[str, Any] = {"height": 16, "width": 24}
    guided: dict[str, Any] = {"guidance_scale": 3.0, "negative_prompt": "ugly"}
    family = load(name, aura_flow, size | guided | {"max_prompt_tokens": 20})
    pipe = AuraFlowPipeline.from_pretrained(aura_flow)
    pipe.set_progress_bar_config(disable=True)
    drawn = draw_with_diffusers(pipe, initial_noise(family), 4, max_sequence_length=20, **size, **guided)
    draw_with_digen(family, 4).assert_close(drawn)
    data = load_config(
        None,
        {
            "model.family": name,
            "model.path": str(aura_flow),
            "model.lora": {"rank": 2},
            "reward.name": "tests.diffusion.plugins.brightness:brightness",
            "sampling.num_inference_steps": 3,
            "sampling.height": 16,
            "sampling.width": 24,
            "sampling.max_prompt_tokens": 20,
        },
    ).model_dump(mode="json")
    generator, trainer = GeneratorTarget(data), TrainerTarget(data)
    prompt = Prompt(TEXTS[0])
    batch = MicroBatch(0, 0, 0, (GroupSlice("s0p0", prompt, 0, 2, 2),))
    rollout = generator.generate(batch, generator.encode([prompt]))
    assert trainer.update(rollout, (1.0, -1.0)).metrics["ratio/floor"] <= 1e-5
    assert trainer.commit(0, (0,)).metrics["grad_norm"] > 0


@pytest.mark.usefixtures("installed")
def test_another_packages_family_checks_its_folder_too(tiny_model: Folder) -> None:
    with pytest.raises(ConfigError, match=r"needs a AuraFlowPipeline; set model\.family to flux"):
        load("aura_flow", tiny_model("flux"), {})
