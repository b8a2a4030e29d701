"""The configuration of a run: pydantic models, frozen, with unknown keys refused.

The docstring under a field is its help text, shown by ``digen train --fields``. Values come from a YAML file and
dotted overrides (``schedule.window=2``); :func:`load_config` merges and validates them. Everything that can be wrong
without starting a worker is found here or in :mod:`digen.plan`.
"""

from __future__ import annotations

import difflib
import itertools
import re
import typing
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import ByteSize, Field, ValidationError, field_validator, model_validator

from digen.errors import ConfigError
from digen.resources import WorkersSection
from digen.restarts import RestartsSection
from digen.schema import Section

Mode = Literal["colocated", "naive", "microbatch", "gap", "tag", "tcss"]

PRESETS: dict[str, dict[str, Any]] = {
    "colocated": {"axis": "generation", "barrier": True, "tag": "never", "window": 1, "stale_fraction": 0},
    "naive": {"axis": "generation", "barrier": True, "tag": "never", "window": 1, "stale_fraction": 0},
    "microbatch": {"axis": "batch", "barrier": False, "tag": "never", "window": 1, "stale_fraction": 0},
    "gap": {"axis": "generation", "barrier": False, "tag": "never", "window": 1, "stale_fraction": 0},
    "tag": {"axis": "generation", "barrier": False, "tag": "horizon", "window": 1, "stale_fraction": 0},
    "tcss": {"axis": "generation", "barrier": False, "tag": "horizon", "window": 2, "stale_fraction": Decimal("0.5")},
}
"""What each mode sets. A mode is a set of defaults of one scheduler: an explicit field wins over its mode."""


if TYPE_CHECKING:
    Share = Decimal | float
    Positive = Decimal | float
    NotNegative = Decimal | float
    Curve = tuple[tuple[int, Decimal], ...]
    Finite = float
else:
    # Floats are taken, as the decimal that they print; inside it is always a Decimal.
    Share = Annotated[Decimal, Field(ge=0, le=1)]
    Positive = Annotated[Decimal, Field(gt=0)]
    NotNegative = Annotated[Decimal, Field(ge=0)]
    Curve = tuple[tuple[Annotated[int, Field(ge=1)], Positive], ...]
    Finite = Annotated[float, Field(allow_inf_nan=False)]


class ScheduleConfig(Section):
    """How Algorithm 1 runs. ``mode`` chooses defaults; any field that is set explicitly wins over them."""

    mode: Mode = "gap"
    """Preset: colocated, naive, microbatch (batch axis), gap, tag, tcss (paper, Fig. 1, 5 and 8)."""
    axis: Literal["generation", "batch"] | None = None
    """Axis along which a step is cut into micro-batches (paper 3.2.1)."""
    barrier: bool | None = None
    """Whether a stage (generate, score, update) starts only when the one before is complete."""
    window: Annotated[int, Field(ge=1)] | None = None
    """W: staleness stays below it. 1 is on-policy, 2 the paper's one-step bound; more draws a warning."""
    stale_fraction: Share | None = None
    """Largest share of a step's micro-batches that may be stale; exact decimal arithmetic."""
    tag: str | None = None
    """TAG policy: never, static(k), greedy, threshold, search or search(moves) (the paper's), tag_first, horizon."""
    lazy_switch: bool = False
    """Keep the trainer switched between assists that follow each other, instead of switching back after each."""
    sync: Literal["hold", "pull"] = "pull"
    """Weight sync: hold (the paper: everybody stops, then loads) or pull (each generator loads on its own)."""
    update_order: Literal["index", "ready"] = "index"
    """Order in which updates are consumed. index makes on-policy runs bit-identical under every schedule."""
    max_generating: Annotated[int, Field(ge=1)] | None = None
    """C_gen: most generations in flight. Default: one per worker that can generate."""
    max_rollout_bytes: Annotated[ByteSize, Field(gt=0)] | None = None
    """Most bytes of rollouts (trajectories, pictures) that exist at a time, such as ``64GiB``: from their generation to
    the commit of their step. Later steps are generated for only while they fit, at the size of the largest so far; less
    than one step takes ends the run. Default: no limit but the window's, W steps. Weights, snapshots, and one or two
    steps' prompt encodings come on top."""
    max_dropped_groups: Share = Decimal(0)
    """Largest share of a step's groups that may be dropped because their reward failed. 0: the first ends the run."""

    @field_validator("stale_fraction", "max_dropped_groups", mode="before")
    @classmethod
    def _exact(cls, value: Any) -> Any:
        # A float's repr is the shortest decimal that names it: 0.29 becomes Decimal("0.29"), never 0.28999...
        return str(value) if isinstance(value, float) else value

    @field_validator("tag")
    @classmethod
    def _known_policy(cls, value: str | None) -> str | None:
        if value is not None:
            parse_tag(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.resolved_window == 1 and self.stale_fraction is not None and self.stale_fraction > 0:
            raise ValueError("stale_fraction > 0 needs window >= 2: with window 1 every micro-batch is fresh")
        return self

    def _resolved(self, field: str) -> Any:
        value = getattr(self, field)
        return PRESETS[self.mode][field] if value is None else value

    @property
    def resolved_axis(self) -> Literal["generation", "batch"]:
        """The axis after the mode's defaults."""
        axis: Literal["generation", "batch"] = self._resolved("axis")
        return axis

    @property
    def resolved_barrier(self) -> bool:
        """The barrier after the mode's defaults."""
        return bool(self._resolved("barrier"))

    @property
    def resolved_window(self) -> int:
        """The window after the mode's defaults."""
        return int(self._resolved("window"))

    @property
    def resolved_stale_fraction(self) -> Decimal:
        """The stale fraction after the mode's defaults; 0 on-policy, one half when only ``window`` was raised."""
        if self.resolved_window == 1:
            return Decimal(0)
        if self.stale_fraction is None and self.resolved_window > 1 and PRESETS[self.mode]["window"] == 1:
            return Decimal("0.5")
        return Decimal(self._resolved("stale_fraction"))

    @property
    def resolved_tag(self) -> str:
        """The TAG policy after the mode's defaults."""
        return str(self._resolved("tag"))


_POLICIES = "never, static(k) with k >= 0, greedy, threshold, search, search(moves), tag_first, horizon"


def parse_tag(text: str) -> tuple[str, int | None]:
    """Split a TAG policy such as ``"static(2)"`` into its name and argument.

    Raises:
        ValueError: it is none of them.
    """
    match = re.fullmatch(
        r"(never|greedy|threshold|search|tag_first|horizon)|(static|search)\((\d{1,9})\)", text.strip()
    )
    if match is None:
        raise ValueError(f"unknown TAG policy {text!r}; known: {_POLICIES}")
    if match[1]:
        return match[1], None
    if match[2] == "search" and not int(match[3]):
        raise ValueError("search(0) may simulate no move, so there is nothing to compare; give at least 1")
    return match[2], int(match[3])


class RunSection(Section):
    """What the run is called, where it lives, how long it is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "digits"
    """Name: letters, digits, dot, dash and underscore."""
    output: Path = Path("runs")
    """Folder that holds the run's folder, ``output/name``."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random stream of the run derives from it."""
    num_steps: Annotated[int, Field(ge=1)] = 50
    """Number of optimizer steps."""
    stop_above: dict[str, Finite] = {}
    """Ends the run, without saving the step, when a metric of a step is above this: ``{grad_norm: 100}``."""
    stop_below: dict[str, Finite] = {}
    """Or below this: ``{reward/mean: 0.1}``. Metrics are those of ``metrics.jsonl``."""


class LoraSection(Section):
    """A low-rank adapter (peft): only it is trained, published and saved."""

    rank: Annotated[int, Field(ge=1)] = 32
    """Rank r."""
    alpha: Annotated[float, Field(gt=0)] = 64.0
    """The adapter is scaled by alpha / r."""
    targets: tuple[str, ...] | None = None
    """Names of the modules that get an adapter, as peft matches them. Default: the family's attention projections."""
    init: Literal["gaussian", "kaiming"] = "gaussian"
    """How the first factor begins; the second begins at zero, so that nothing changes at first."""


class ModelSection(Section):
    """The policy."""

    family: str = "digits"
    """Model family; decides how a model is called."""
    path: Path | None = None
    """A folder in diffusers' layout, or hf:ORG/NAME on the hub. The digits family has an embedded one."""
    lora: LoraSection | None = None
    """Train a low-rank adapter. Default: full fine-tuning."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Precision of the weights and of the forward. Step maths is always float32 or better."""
    attention: str | None = None
    """Attention backend of diffusers, for example native or flash. Default: diffusers' own choice."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, one more forward."""
    device: str = "cpu"
    """Torch device of every worker, for example cpu or cuda."""
    forward_batch: Annotated[int, Field(ge=1)] | None = None
    """Samples in one forward, padded. Default: the micro-batch. Fixed, because a forward is not batch invariant."""


class PromptSection(Section):
    """Where prompts come from."""

    source: str | None = None
    """A .txt, .jsonl or .csv file, or hf:NAME for a Hugging Face data set. Default: the family's own prompts."""
    column: str = "prompt"
    """The column (csv, hf) or key (jsonl) that holds the text; the others become metadata."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""
    held_out: Annotated[int, Field(ge=0)] = 0
    """Number of prompts kept apart for evaluation, drawn by the run's seed; 0 evaluates on the training prompts."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first so many prompts of the source."""


class PlanSection(Section):
    """How a step is made of prompts, samples and micro-batches (paper 3.2.1)."""

    prompts_per_step: Annotated[int, Field(ge=1)] = 10
    """Groups in a step."""
    samples_per_prompt: Annotated[int, Field(ge=1)] = 24
    """Group size K."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Samples in a micro-batch. Default: one group (generation axis), or one group per generator rank (batch axis)."""


class SamplingSection(Section):
    """How trajectories are drawn."""

    num_inference_steps: Annotated[int, Field(ge=2)] = 8
    """Denoising steps T of a trajectory."""
    noise_level: Annotated[float, Field(ge=0)] | None = None
    """Noise of the kernel: a of flow_sde (default 0.7) and cps (0.8), eta of dance_sde (0.3) and ddim (1)."""
    kernel: Literal["flow_sde", "dance_sde", "cps", "ddim"] | None = None
    """How a noisy step is drawn. Default: the algorithm's."""
    solver: Literal["euler", "dpm++"] = "euler"
    """How a noiseless step is taken: in evaluation, where only samples are needed, and between noisy steps."""
    shift: Annotated[float, Field(gt=0)] | None = None
    """Static shift of the sigma schedule. Default: the scheduler config in the model's folder."""
    guidance_scale: Annotated[float, Field(ge=0)] | None = None
    """Guidance: classifier-free or distilled, as the family has it. Default: the family's."""
    negative_prompt: str = ""
    """What classifier-free guidance leads away from."""
    height: Annotated[int, Field(ge=1)] | None = None
    """Pixels of a sample from top to bottom. Default: the family's."""
    width: Annotated[int, Field(ge=1)] | None = None
    """Pixels from left to right. Default: the family's."""
    num_frames: Annotated[int, Field(ge=1)] | None = None
    """Frames of a video. Default: the family's; images have none."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens that the text encoder sees of a prompt. Default: the family's."""


class AdvantageSection(Section):
    """How rewards become advantages."""

    kind: Literal["per_prompt", "no_std", "global_std", "max_group_std", "global", "best_worst"] = "per_prompt"
    """What is subtracted from a reward and what divides the rest: the group's mean and standard deviation (per_prompt),
    its mean and nothing (no_std, Dr.GRPO), its mean and the standard deviation of the step (global_std) or the largest
    of its groups (max_group_std), mean and deviation of the step (global). best_worst: 1 for the best of a group, -1
    for the worst, the others are left out (DPO)."""
    heads: Literal["reward", "advantage"] = "reward"
    """How several rewards become one: a weighted sum of rewards, or of each head's own advantages."""
    ddof: Annotated[int, Field(ge=0, le=1)] = 0
    """0: population standard deviation, 1: sample standard deviation."""
    epsilon: Annotated[float, Field(ge=0)] = 1e-4
    """Added to the divisor."""
    best_of_n: Annotated[int, Field(ge=2)] | None = None
    """Keep the n/2 best and n/2 worst of each group. Default: keep all."""

    @field_validator("best_of_n")
    @classmethod
    def _even(cls, value: int | None) -> int | None:
        if value is not None and value % 2:
            raise ValueError(f"best_of_n must be even (half best, half worst), got {value}")
        return value


class AlgorithmSection(Section):
    """The algorithm. A default that is not set here is the algorithm's own."""

    name: str = "flow_grpo"
    """A built-in algorithm, another package's, or ``package.module:Class``."""
    options: dict[str, Any] = {}
    """What only this algorithm has."""
    advantage: AdvantageSection = AdvantageSection()
    """Advantages."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] | None = None
    """PPO clip range. Log-probabilities are means over dimensions, so it is far smaller than in language models."""
    advantage_clip: Annotated[float, Field(gt=0)] | Literal["none"] | None = None
    """Advantages are clamped to +- this before the loss; none: not at all."""
    timestep_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the denoising steps that is trained: int(fraction * T), at least one, never a noiseless one."""
    kl_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of the divergence from the model before training; above 0 it costs a second forward."""
    kl: Literal["gaussian", "flow_grpo"] = "gaussian"
    """The divergence of a transition: of the two Gaussians, or that times the step of sigma, as in Flow-GRPO's code."""
    tsp_chunk: Annotated[int, Field(ge=1)] | Literal["all", "auto"] = "auto"
    """Timestep parallelism (paper 3.2.2): timesteps in one forward. 1 is sequential; auto: as many as memory allows."""
    old_logprobs: Literal["auto", "behaviour", "recompute"] = "auto"
    """Where fresh samples' old log-probabilities come from; stale samples always use the behaviour policy's."""


class OptimizerSection(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """torch.optim class."""
    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Adam's betas; betas[0] is SGD's momentum."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """Weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the gradient's global norm."""
    max_skipped_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in a row that may be skipped where the gradient is not finite: weights and optimizer stay as they are, and
    the step counts (``skipped_steps``). 0: the first ends the run."""
    master_weights: bool = False
    """Train float32 weights and compute with them in model.dtype. Without it a model in half precision is trained in
    that, which rounds small steps away. An adapter (model.lora) always is float32."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay to zero over the run after the warm-up, or none."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights, min((1+k)/(10+k), decay). Default: none."""
    ema_interval: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps between EMA updates."""


class RewardHead(Section):
    """One of several rewards."""

    name: str
    """A built-in reward, another package's, or ``package.module:function``."""
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$")] | None = None
    """What its values are called in events and metrics. Default: its name. Two heads must not be called the same."""
    weight: float = 1.0
    """Its share in the reward. 0 computes and logs it only, a negative one is a penalty."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the reward."""

    @property
    def resolved_label(self) -> str:
        """The label, after its default."""
        return self.name if self.label is None else self.label


class RewardSection(Section):
    """What a sample is worth."""

    name: str | None = None
    """A built-in reward, another package's, or ``package.module:function``. Default: classifier, or what heads say."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the reward."""
    heads: tuple[RewardHead, ...] = ()
    """Several rewards at once, in place of name and kwargs: the reward of a sample is their weighted sum."""

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if self.heads and (self.name is not None or self.kwargs):
            raise ValueError("name and kwargs are those of a single reward; with heads leave them out")
        labels = [head.resolved_label for head in self.heads]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"two heads are called {label!r}; give one of them another label")
        if self.heads and not any(head.weight for head in self.heads):
            raise ValueError("every head has weight 0, so that no sample would be worth anything")
        return self

    @property
    def resolved_heads(self) -> tuple[RewardHead, ...]:
        """The heads; a single reward is one head of weight 1."""
        return self.heads or (RewardHead(name=self.name or "classifier", kwargs=self.kwargs),)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each head by its label."""
        return {head.resolved_label: head.weight for head in self.resolved_heads}


class CheckpointSection(Section):
    """When and how many checkpoints."""

    every: Annotated[int, Field(ge=1)] = 10
    """Steps between checkpoints; the last step always has one."""
    keep: Annotated[int, Field(ge=1)] = 3
    """Checkpoints that stay on disk, the newest."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Checkpoints that stay beside those: of the highest mean reward in the step that made their weights."""


class EvaluationSection(Section):
    """Held-out ODE samples."""

    at_start: bool = True
    """Evaluate the base weights."""
    at_end: bool = True
    """Evaluate the final weights."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations during the run, each by a generator that holds the weights; 0: none."""
    num_prompts: Annotated[int, Field(ge=1)] = 10
    """Held-out prompts; all of them if fewer."""
    samples_per_prompt: Annotated[int, Field(ge=1)] = 40
    """Samples of each."""
    num_inference_steps: Annotated[int, Field(ge=2)] | None = None
    """Denoising steps of a sample. Default: those of a trajectory in training."""
    video: Literal["gif", "mp4"] = "gif"
    """How videos are shown, in training's previews too. mp4 needs the extra video."""
    frames_per_second: Annotated[int, Field(ge=1)] = 16
    """Speed at which videos are shown."""


class ObserveSection(Section):
    """What is written beside the events."""

    preview_every: Annotated[int, Field(ge=0)] = 10
    """Steps between sample grids; 0 writes none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of digen's own log."""


def _points(text: str) -> tuple[tuple[int, Decimal], ...]:
    return tuple((int(gpus), Decimal(throughput)) for gpus, throughput in map(str.split, text.split(",")))


class GpuType(Section):
    """A type of GPU, beside the one that the durations in ``costs`` stand for."""

    generate: Positive = Decimal(1)
    """Speed of generations, scores and assists, in that GPU's."""
    update: Positive = Decimal(1)
    """Speed of updates and optimizer steps, in that GPU's."""
    memory_gib: Positive | None = None
    """Memory of one, in GiB. Needed with costs.memory."""


class ScalingSection(Section):
    """How the throughput of a group grows with its GPUs: points (GPUs, throughput), straight lines between them.

    The defaults are assumed, in the shape that the paper describes (2.2, Fig. 3, which prints no numbers): a trainer
    is bound by compute and scales, a generator goes through its denoising steps one by one and saturates.
    """

    generate: Curve = _points("1 1, 2 1.9, 4 3.4, 8 6, 16 9, 32 12")
    """Generations, scores and assists. Only ratios matter; groups beyond the last point are not considered."""
    update: Curve = _points("1 1, 2 1.95, 4 3.8, 8 7.4, 16 14, 32 26")
    """Updates and optimizer steps."""

    @field_validator("generate", "update")
    @classmethod
    def _rising(cls, value: tuple[tuple[int, Decimal], ...]) -> tuple[tuple[int, Decimal], ...]:
        if not value:
            raise ValueError("a curve needs at least one point [GPUs, throughput]")
        for (fewer, slower), (more, faster) in itertools.pairwise(value):
            if more <= fewer:
                raise ValueError(f"the points must be in the order of their GPUs, got {more} after {fewer}")
            if faster < slower:
                raise ValueError(f"{more} GPUs are slower ({faster}) than {fewer} ({slower}); leave that point out")
        return value


class MemorySection(Section):
    """What has to fit on a GPU: arithmetic, not a measurement. Without ``parameters_b`` nothing is checked."""

    parameters_b: Positive | None = None
    """Parameters of the policy, in billions."""
    trainable_share: Share = Decimal(1)
    """Share of them that is trained: 1 for all, less for LoRA."""
    weight_bytes: NotNegative = Decimal(2)
    """Bytes of a parameter."""
    gradient_bytes: NotNegative = Decimal(4)
    """Bytes of a trained parameter's gradient."""
    optimizer_bytes: NotNegative = Decimal(12)
    """Bytes that the optimizer keeps of a trained parameter: Adam with float32 master weights 12, with an EMA 16."""
    activation_gib: NotNegative | None = None
    """GiB that one sample at one timestep needs in an update's forward and backward."""
    generation_gib: NotNegative | None = None
    """GiB that one sample needs while it is generated and scored."""
    reserve_gib: NotNegative = Decimal(2)
    """GiB of every GPU for the runtime, communication buffers and fragmentation."""
    shard_generators: bool = False
    """Whether each GPU of a generator group holds a part of the weights, and not all of them. Trainers always do."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        missing = [name for name in ("activation_gib", "generation_gib") if getattr(self, name) is None]
        if self.parameters_b is not None and missing:
            raise ValueError(f"{' and '.join(missing)} must be given with parameters_b")
        return self


class CostsSection(Section):
    """Where durations come from before anything ran (``digen simulate``, ``digen plan``), and what GPUs can do.

    One of ``model``, ``durations`` and ``profile`` is the source. Training reads nothing here.
    """

    model: Literal["hunyuan_video", "wan2.1"] | None = None
    """A calibrated cost model: a fit to the paper's speed-ups, not a measurement. Its unit is one denoising step."""
    gpus: Literal[16, 32] | None = None
    """GPUs that the calibrated model stands for, half of them in the generator group. Default: 16."""
    durations: str | None = None
    """Seconds as ``digen simulate --durations`` takes them, without B, S, G and T, for example 'g=10 r=1 u=5 h=12'."""
    note: str | None = None
    """Where the given durations come from; shown beside what is computed from them."""
    profile: Path | None = None
    """Folder of a run of the same job, whose mean durations are taken."""
    generator_gpus: Annotated[int, Field(ge=1)] | None = None
    """GPUs of each generator group in the given or profiled durations. Default: 1."""
    trainer_gpus: Annotated[int, Field(ge=1)] | None = None
    """GPUs of the trainer in the given or profiled durations. Default: 1."""
    tsp_share: Share | None = None
    """Share of a sequential update's time that is left with all timesteps in one forward. Without it ``digen plan``
    keeps algorithm.tsp_chunk; a calibrated model has its own."""
    fixed_share: Share = Decimal("0.1")
    """Share of a generation's and an update's time that stays when the micro-batch gets smaller; assumed."""
    types: dict[str, GpuType] = {}
    """GPU types by name, for ``digen plan --gpus 'NAME=8,OTHER=8'``."""
    scaling: ScalingSection = ScalingSection()
    """Stage scaling."""
    memory: MemorySection = MemorySection()
    """What has to fit."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("model", "durations", "profile") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; durations come from one of them")
        allowed = {"gpus": "model", "note": "durations"}
        for name, source in allowed.items():
            if getattr(self, name) is not None and source not in given:
                raise ValueError(f"{name} says something only beside costs.{source}")
        for name in ("generator_gpus", "trainer_gpus", "tsp_share"):
            if getattr(self, name) is not None and given in ([], ["model"]):
                raise ValueError(f"{name} says something only beside costs.durations or costs.profile")
        if self.memory.parameters_b is not None:
            if not self.types:
                raise ValueError("types must describe the GPUs, with memory_gib, for memory.parameters_b")
            missing = [name for name, kind in self.types.items() if kind.memory_gib is None]
            if missing:
                raise ValueError(f"types.{missing[0]}.memory_gib must be given with memory.parameters_b")
        return self


class RunConfig(Section):
    """A whole run, as ``digen train`` takes it."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    prompts: PromptSection = PromptSection()
    plan: PlanSection = PlanSection()
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    reward: RewardSection = RewardSection()
    schedule: ScheduleConfig = ScheduleConfig()
    workers: WorkersSection = WorkersSection()
    restarts: RestartsSection = RestartsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    observe: ObserveSection = ObserveSection()
    costs: CostsSection = CostsSection()

    @model_validator(mode="after")
    def _workers_fit_mode(self) -> Self:
        colocated = self.schedule.mode == "colocated"
        if colocated and self.workers.generators:
            raise ValueError("workers.generators must be 0 in mode colocated: one worker does every stage, all cores")
        if not colocated and self.workers.generators == 0:
            raise ValueError(f"workers.generators must be at least 1 in mode {self.schedule.mode}")
        return self

    @model_validator(mode="after")
    def _master_weights_are_of_use(self) -> Self:
        if self.optimizer.master_weights and (self.model.lora is not None or "16" not in self.model.dtype):
            what = "model.lora" if self.model.lora is not None else f"model.dtype={self.model.dtype}"
            raise ValueError(f"optimizer.master_weights: with {what} none are trained in half precision; leave it out")
        return self

    @model_validator(mode="after")
    def _broadcast_reaches_everybody(self) -> Self:
        if self.workers.weights.channel == "broadcast":
            if self.schedule.sync != "hold":
                raise ValueError("workers.weights.channel=broadcast needs schedule.sync=hold, where all load at once")
            if self.workers.type == "ray":
                raise ValueError("workers.weights.channel=broadcast is for one machine; with workers.type=ray: memory")
            if self.restarts.budget:
                raise ValueError(
                    "workers.weights.channel=broadcast sends weights once: a worker that is started again could "
                    "not join; set restarts.budget=0, or take memory"
                )
        return self

    @property
    def num_generators(self) -> int:
        """Generator processes after the mode is taken into account."""
        return 0 if self.schedule.mode == "colocated" else self.workers.generators or 1

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.output / self.run.name


def load_config(
    path: Path | str | None = None, overrides: list[str] | tuple[str, ...] | dict[str, Any] = ()
) -> RunConfig:
    """Read a YAML file, apply dotted overrides, validate.

    Args:
        path: YAML file; ``None`` starts from the defaults (the embedded digits job).
        overrides: ``["schedule.window=2", ...]`` or ``{"schedule.window": 2}``; string values are read as YAML.

    Raises:
        ConfigError: the file is missing or not YAML, or a value is wrong; one line that names the field.
    """
    data: dict[str, Any] = {}
    if path is not None:
        data = _read_yaml(Path(path))
    items = overrides.items() if isinstance(overrides, dict) else (_split_override(text) for text in overrides)
    for key, value in items:
        set_dotted(data, key, value)
    return validate(data, source=str(path) if path is not None else "config")


def validate(data: dict[str, Any], source: str) -> RunConfig:
    """Validate plain data as a :class:`RunConfig`; ``source`` is named in the error."""
    if where := _find_key(data, "trust_remote_code"):
        raise ConfigError(f"{source}: {where}: code from a model's folder or from the hub is never run; leave it out")
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(_explain(item) for item in error.errors())) from None


def _find_key(data: Any, key: str) -> str | None:
    """The dotted path of a key, wherever it is."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list | tuple) else ()
    for name, value in items:
        if name == key:
            return key
        if found := _find_key(value, key):
            return f"{name}.{found}"
    return None


def dump_yaml(config: RunConfig) -> str:
    """The whole resolved config as YAML that :func:`load_config` reads back to an equal object."""
    schedule = config.schedule
    resolved = {
        "axis": schedule.resolved_axis,
        "barrier": str(schedule.resolved_barrier).lower(),
        "window": schedule.resolved_window,
        "stale_fraction": schedule.resolved_stale_fraction,
        "tag": schedule.resolved_tag,
    }
    facts = ", ".join(f"{name} {value}" for name, value in resolved.items())
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return f"{text}# schedule, resolved: {facts}\n"


class _Loader(yaml.SafeLoader):
    """Refuses what hides a value: a key that is given twice, and aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not supported", None)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    try:
        data = _parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path} must hold a mapping of sections, not {type(data).__name__}")
    return {name: {} if section is None else section for name, section in data.items()}


def _split_override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {text!r} is not of the form section.field=value")
    return key.strip(), value


def set_dotted(data: dict[str, Any], key: str, value: Any) -> None:
    """Set ``section.field`` in plain data; a string is read as YAML.

    Raises:
        ConfigError: it is not valid YAML, or a part of the key is no section.
    """
    shown = key if key.isprintable() else ascii(key)
    if isinstance(value, str):
        try:
            value = _parse_yaml(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"override {shown}: {' '.join(str(error).split())}") from None
    *parents, leaf = key.split(".")
    node = data
    for part in parents:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {shown}: {ascii(part)[1:-1]} is not a section")
        node = child
    node[leaf] = value


def _explain(item: Any) -> str:
    location = [str(part) for part in item["loc"]]
    if item["type"] == "extra_forbidden":
        known = _known_fields(location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        return f"unknown key {'.'.join(location)!r}; {hint}"
    field = ".".join(_field_path(location)) or "config"
    if item["type"].startswith("byte_size"):
        return f"{field}: must be a number of bytes above 0, such as 64GiB (got {item['input']!r})"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{field}: {message}"
    return f"{field}: {message} (got {item['input']!r})"


def _field_path(location: list[str]) -> list[str]:
    """The part of pydantic's location that names fields and items, without the branches of a union."""
    path: list[str] = []
    for part in location:
        if not (part.isidentifier() or part.isdigit()):
            break
        if path and not (part.isdigit() or part in _known_fields(path) or _is_mapping(_annotation(path))):
            break
        path.append(part)
    return path


def _known_fields(location: list[str]) -> list[str]:
    return list(getattr(_annotation(location), "model_fields", {}))


def _annotation(location: list[str]) -> Any:
    """What stands at a location: a model, or the type of a field, or of a mapping's values or a sequence's items."""
    found: Any = RunConfig
    for part in location:
        if _is_mapping(found):
            found = typing.get_args(found)[1]
        elif typing.get_origin(found) is tuple:
            found = typing.get_args(found)[0]
        else:
            field = getattr(found, "model_fields", {}).get(part)
            found = field.annotation if field is not None else None
            models = [kind for kind in typing.get_args(found) if hasattr(kind, "model_fields")]
            found = models[0] if models and not _is_mapping(found) and typing.get_origin(found) is not tuple else found
    return found


def _is_mapping(annotation: Any) -> bool:
    return typing.get_origin(annotation) is dict
