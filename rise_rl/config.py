"""The typed configuration of a run: a YAML file, maybe on top of a `base`, plus overrides; unknown keys refused.

Every key is described here once; docs/config.md is generated from it (`python -m rise_rl.config_docs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from yaml import YAMLError

from rise_engine.config import EngineConfig
from rise_engine.rollout.vllm_config import VllmConfig
from rise_kernels.token_losses import GuideKind, KlEstimator

from .config_errors import explain
from .errors import RiseError
from .graders.judge_config import JudgeConfig
from .guidance import TEMPLATES
from .plateau import PlateauRule
from .weights import Aggregation


class ConfigError(RiseError, ValueError):
    """The configuration cannot be used; the message names the file, the key, what was found and what was expected."""


Model = TypeVar("Model", bound=BaseModel)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class DataConfig(Section):
    train: str = Field(description="Training prompts: a file (.jsonl, .json, .parquet, .csv) or a hub id.")
    heldout: str | None = Field(None, description="Held-out prompts for evaluation; none may be in data.train.")
    max_prompt_tokens: Positive = Field(4096, description="Longest prompt, in tokens, chat template included.")
    overlong_prompt: Literal["error", "drop"] = Field(
        "error", description="What to do with a longer prompt: stop with a message, or drop and count it."
    )
    shuffle: bool = Field(True, description="Shuffle every epoch (a pure function of the seed and the epoch).")
    chat_template: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the chat template, e.g. {enable_thinking: false}; used for every prompt alike.",
    )


class GrpoConfig(Section):
    prompts_per_step: Positive = Field(64, description="Prompts of one step, that is of one rollout batch.")
    mini_batch_prompts: Positive | None = Field(
        None,
        description="Prompts of one optimizer update, a divisor of prompts_per_step; every mini-batch has its own "
        "normalisers. null: one update a step, on the whole batch.",
    )
    group_size: int = Field(8, ge=2, description="Natural rollouts per prompt (G).")
    clip_low: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="Lower clip: ratios below 1 - clip_low stop pushing. With one update per batch every ratio is 1.",
    )
    clip_high: float = Field(0.28, gt=0, description="Upper clip: ratios above 1 + clip_high stop pushing.")
    dual_clip: float | None = Field(None, gt=1, description="Dual clip for negative advantages; off when null.")
    kl_coef: float = Field(
        0.0, ge=0, description="Weight of the KL term to the initial model, kept frozen beside the policy; 0: none."
    )
    kl_estimator: KlEstimator = Field("k3", description="How the KL is estimated from one token (docs/math.md).")
    importance_correction: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Factor pi_trainer / pi_engine on the policy loss, of each token or of the whole response.",
    )
    importance_cap: float = Field(2.0, gt=0, description="The factor is truncated at this value.")
    aggregation: Aggregation = Field("token-mean", description="How token losses are averaged over the step.")
    overlong_buffer: int = Field(0, ge=0, description="Tokens before the maximum over which the penalty grows (B).")
    overlong_factor: float = Field(0.5, ge=0, description="Penalty at the maximum length (f); rewards only.")
    mask_truncated: bool = Field(
        False, description="Leave truncated natural samples out of the loss and its denominators."
    )

    @model_validator(mode="after")
    def _whole_mini_batches(self) -> GrpoConfig:
        if self.prompts_per_step % (self.mini_batch_prompts or self.prompts_per_step):
            raise ValueError(
                f"mini_batch_prompts: expected a divisor of prompts_per_step ({self.prompts_per_step}), found "
                f"{self.mini_batch_prompts}"
            )
        return self

    def cap_of(self, correction: Literal["token", "sequence"]) -> float | None:
        return self.importance_cap if self.importance_correction == correction else None

    @property
    def updates_per_step(self) -> int:
        return self.prompts_per_step // (self.mini_batch_prompts or self.prompts_per_step)


class GuidanceConfig(Section):
    enabled: bool = Field(True, description="Guided rollouts; false is plain rubric GRPO (Rubric-RL).")
    rollouts: Positive = Field(8, description="Guided rollouts per prompt with something to improve.")
    criteria: Positive | Literal["all"] = Field(5, description="Criteria shown in a hint (M); all: every missed one.")
    budget_tokens: Positive = Field(1024, description="Tokens a hint may add to a prompt; lowest priorities go first.")
    coefficient: float = Field(0.05, ge=0, description="Weight of the guide loss (lambda).")
    gamma: float = Field(0.1, gt=0, description="Support factor p / (p + gamma).")
    loss: GuideKind = Field(
        "log_support",
        description="Guide loss of a token. log_support: -log(p / (p + gamma)), RISE's; support: -p / (p + gamma), "
        "LUFFY's shaping; logprob: -log p, every token alike.",
    )
    coupled: bool = Field(
        False,
        description="Put guided answers into their prompt's group instead: one mean and deviation for all, learnt with "
        "the policy loss; coefficient, gain and guide loss are then not used.",
    )
    gain_max: float = Field(1.0, gt=0, description="Upper clip of a kept sample's gain (A_max).")
    remove_at: Literal["never", "plateau"] | Annotated[int, Field(ge=0)] = Field(
        "plateau", description="When guidance ends: a number of steps, at the gap's plateau, or never."
    )
    plateau: PlateauRule = Field(default_factory=PlateauRule, description="The plateau rule (docs/math.md).")
    templates: tuple[str, ...] = Field(TEMPLATES, description="Hint templates; each contains {hint} once.")
    secrecy_wish: bool = Field(False, description="Also ask that the answer does not mention the criteria.")
    drop_truncated: bool = Field(False, description="Never keep a guided answer that was cut at the maximum length.")

    @field_validator("templates")
    @classmethod
    def _one_slot(cls, templates: tuple[str, ...]) -> tuple[str, ...]:
        for template in templates:
            if template.count("{hint}") != 1:
                raise ValueError(f"each template must contain {{hint}} exactly once, found {template!r}")
        if not templates:
            raise ValueError("expected at least one template")
        return templates

    @model_validator(mode="after")
    def _one_filter(self) -> GuidanceConfig:
        if self.coupled and self.drop_truncated:
            raise ValueError(
                "drop_truncated is part of the filter, and coupled guided answers pass no filter; "
                "grpo.mask_truncated leaves truncated answers out of the loss, guided ones too"
            )
        return self


class ScaffoldConfig(Section):
    """RuscaRL: natural rollouts see some of their rubric in a system message (docs/baselines.md)."""

    enabled: bool = Field(False, description="Scaffold the natural rollouts; needs guidance.enabled: false.")
    steepness: float = Field(
        125.0, gt=0, description="How fast the scaffold goes: 1 / (1 + exp(steepness (x - midpoint)))."
    )
    midpoint: float = Field(0.2, ge=0, le=1, description="Share of the steps after which half of it is left.")
    budget_tokens: Positive = Field(
        1024, description="Tokens the criteria may add to a prompt; those drawn last go first."
    )


class RolloutConfig(Section):
    engine: Literal["auto", "vllm", "transformers"] = Field(
        "auto",
        description="Who samples. auto: vLLM where it is installed and serves the model, else transformers; the run "
        "says which and why.",
    )
    schedule: Literal["lockstep", "overlapped"] = Field(
        "lockstep",
        description="lockstep: all natural answers, all grades, all guided answers; repeatable. overlapped: groups are "
        "graded and their guided answers begun while others are still being sampled; seeds are the same, but other "
        "company in a batch rounds otherwise, so tokens may differ from run to run. A grader of your own is then "
        "called from several threads at once.",
    )
    vllm: VllmConfig = Field(default_factory=VllmConfig, description="How vLLM shares the machine with the trainer.")
    max_new_tokens: Positive = Field(8192, description="Longest response, in tokens.")
    temperature: float = Field(1.0, ge=0.01, description="Sampling temperature; log-probs in training use the same.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; below 1 needs subset_sampling.")
    top_k: int = Field(0, ge=0, description="Top-k sampling; above 0 needs subset_sampling.")
    subset_sampling: bool = Field(
        False,
        description="Allow top_p < 1 and top_k > 0 (RuscaRL's recipe): answers then come from a part of the "
        "distribution, while the log-probs in training stay those of the whole one. Held-out answers always come from "
        "the whole one, so that runs compare.",
    )
    max_rows: Positive = Field(64, description="Answers decoded together, on each rank.")
    parity_tolerance: float | None = Field(
        None,
        gt=0,
        description="Log-prob difference in nats allowed between rollout engine and trainer, on average over the "
        "probe's tokens; ten times that for a single token. null: 1e-4 in float32, 0.1 in bfloat16.",
    )

    @model_validator(mode="after")
    def _one_rank_an_engine(self) -> RolloutConfig:
        if self.schedule == "overlapped" and self.vllm.tensor_parallel_size > 1:
            raise ValueError(
                "schedule: overlapped needs vllm.tensor_parallel_size 1, because ranks that hold one model together "
                "must begin the same requests at the same time"
            )
        return self

    @model_validator(mode="after")
    def _full_distribution(self) -> RolloutConfig:
        if (self.top_p < 1 or self.top_k > 0) and not self.subset_sampling:
            raise ValueError(
                "top_p < 1 or top_k > 0 samples from a renormalised subset of the vocabulary, so behaviour log-probs "
                "would not be the policy's: training needs top_p 1 and top_k 0, or subset_sampling: true to have it so"
            )
        return self


class EvaluationConfig(Section):
    every: int = Field(10, ge=0, description="Evaluate on the held-out prompts every so many steps; 0: never.")
    prompts: Positive | None = Field(None, description="Size of the fixed cohort: the first so many; null: all.")
    samples: Positive = Field(8, description="Answers per held-out prompt, without guidance.")
    temperature: float = Field(
        1.0,
        ge=0.01,
        description="Temperature of held-out answers, whatever the training's: runs compare where it is the same.",
    )


class CheckpointConfig(Section):
    every: int = Field(20, ge=0, description="Steps between checkpoints; 0: only at the end and on interruption.")
    keep: Positive = Field(2, description="Latest checkpoints kept; the best by held-out reward is kept besides.")


class RunConfig(Section):
    """What every kind of run has."""

    name: str = Field(description="Name of the run.", pattern=r"^\w[\w.-]*$")
    model: str = Field(description="A fetched name (smollm2-135m), a local folder, or a hub id.")
    seed: int = Field(0, description="Every random choice derives from it.")
    output: str = Field("runs", description="Folder that run folders are made in.")
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        ("tensorboard",), description="Where curves go, besides metrics.jsonl and evals.jsonl."
    )
    data: DataConfig
    engine: EngineConfig = Field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)


class Config(RunConfig):
    """A run of `rise-rl train`."""

    steps: Positive = Field(description="Steps: rollout batches sampled and trained on.")
    grader: str | None = Field(None, description="A grader of your own as module:object; it judges every criterion.")
    grpo: GrpoConfig = Field(default_factory=GrpoConfig)
    guidance: GuidanceConfig = Field(default_factory=GuidanceConfig)
    scaffold: ScaffoldConfig = Field(default_factory=ScaffoldConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    judge: JudgeConfig | None = Field(None, description="The LLM judge of criteria that no program can check.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    @property
    def hints(self) -> bool:
        """Whether some training prompts show criteria."""
        return self.guidance.enabled or self.scaffold.enabled

    @property
    def hint_tokens(self) -> int:
        """Tokens by which the criteria shown may lengthen a training prompt."""
        shown = self.scaffold if self.scaffold.enabled else self.guidance
        return shown.budget_tokens if self.hints else 0

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.grpo.overlong_buffer > self.rollout.max_new_tokens:
            raise ValueError(
                f"grpo.overlong_buffer ({self.grpo.overlong_buffer}) is longer than rollout.max_new_tokens "
                f"({self.rollout.max_new_tokens})"
            )
        corrected = self.grpo.importance_correction != "none"
        if corrected and self.rollout.subset_sampling:
            raise ValueError(
                "grpo.importance_correction: with rollout.subset_sampling the answers come from another distribution "
                "than their log-probs; use none"
            )
        if corrected and (self.scaffold.enabled or self.guidance.coupled):
            raise ValueError(
                "grpo.importance_correction: scaffolded and coupled answers were sampled under another prompt than "
                "they are learnt under; use none"
            )
        if self.scaffold.enabled and self.guidance.enabled:
            raise ValueError(
                "scaffold.enabled: scaffolding is an alternative to guidance; set guidance.enabled to false"
            )
        if self.scaffold.enabled and self.steps < 2:
            raise ValueError("scaffold.enabled: the schedule over the run needs at least 2 steps")
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies `key.subkey=value` overrides and validates. Raises ConfigError.

    A key `base: other.yaml` at the top, relative to the file, names one whose values hold where this file has none.
    """
    return load_as(Config, Path(path), overrides)


def load_judge(path: str | Path | None, overrides: Sequence[str] = ()) -> JudgeConfig:
    """The judge alone, from a YAML file with the keys of the `judge` section, overrides, or both."""
    return load_as(JudgeConfig, None if path is None else Path(path), overrides)


def load_as(model: type[Model], path: Path | None, overrides: Sequence[str]) -> Model:
    """What `load_config` does, for any model of keys."""
    try:
        layers = _layers(path) if path else []
        raw = OmegaConf.to_container(
            OmegaConf.merge(*reversed(layers), OmegaConf.from_dotlist(_as_dotlist(overrides))), resolve=True
        )
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable configuration: {error}") from error
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join([f"{path or 'overrides'}:", *explain(model, error)])) from error


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; loading it gives the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def _layers(path: Path) -> list[Any]:
    """The file's values, then its base's, and so on."""
    layers: list[Any] = []
    seen: list[Path] = []
    following: Path | None = path
    while following is not None:
        if not following.is_file():
            named = f"{seen[-1]}: base: " if seen else ""
            raise ConfigError(f"{named}{following}: no such configuration file")
        if following.resolve() in seen:
            raise ConfigError(f"{seen[-1]}: base: {following} is among the files that lead to it")
        seen.append(following.resolve())
        values = OmegaConf.to_container(OmegaConf.load(following))
        if not isinstance(values, dict):
            raise ConfigError(f"{following}: not a readable configuration: expected keys and values at the top")
        base = values.pop("base", None)
        layers.append(values)
        following = following.parent / str(base) if base is not None else None
    return layers


def _as_dotlist(overrides: Sequence[str]) -> list[str]:
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"override {item!r}: expected key=value")
    return list(overrides)
