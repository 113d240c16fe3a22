"""Every YAML key, typed and documented.

Sections are standard dataclasses, so that stages and benchmarks can build them without further
packages; `load_config` parses YAML with OmegaConf (``${run.dir}`` interpolation, ``key.path=value``
overrides) and validates with pydantic. Unknown keys are refused with the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from calibadv_jax.errors import UserError

STRICT = {"extra": "forbid"}


def _require(section: Any, check: str, names: str) -> None:
    """Raises ValueError naming the first field of `names` that fails `check`."""
    tests = {
        ">= 0": lambda value: value >= 0,
        ">= 1": lambda value: value >= 1,
        "> 0": lambda value: value > 0,
        "in [0, 1]": lambda value: 0 <= value <= 1,
        "in (0, 1]": lambda value: 0 < value <= 1,
    }
    for name in names.split():
        value = getattr(section, name)
        if not tests[check](value):
            raise ValueError(f"{name} is {value}, but must be {check}")


@dataclass
class RunConfig:
    __pydantic_config__ = STRICT
    dir: str = "runs/default"
    """Folder of everything the run writes."""
    seed: int = 0
    """Seed of parameters, data order and sampling."""


@dataclass
class PolicyConfig:
    __pydantic_config__ = STRICT
    path: str = ""
    """HuggingFace folder (config.json, safetensors, tokenizer) to start from."""
    tokenizer: str = ""
    """Tokenizer folder; empty: the policy's own folder."""
    init: dict[str, Any] = field(default_factory=dict)
    """Fields of a HuggingFace config.json for a randomly initialised policy; used when `path` is empty."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of matrix products and activations."""
    param_dtype: Literal["bfloat16", "float32"] = "float32"
    """Precision of the trained parameters and of the optimizer state."""
    remat: Literal["none", "dots", "full"] = "full"
    """Recomputed in the backward pass: nothing, all but matrix products, every layer."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel. auto: cuDNN on GPU in bfloat16, else XLA."""
    attention_chunk: int = 1024
    """Queries handled at once by the XLA kernel; bounds its memory at [B, N, chunk, T]."""
    logprob_chunk: int = 1024
    """Tokens per row whose logits exist at once; [B, T, V] is never materialised."""

    def __post_init__(self) -> None:
        _require(self, ">= 1", "attention_chunk logprob_chunk")


@dataclass
class MeshConfig:
    __pydantic_config__ = STRICT
    data: int = 1
    """Replicas of the parameters."""
    fsdp: int = -1
    """Shards of parameters, optimizer state and batch; -1: all remaining devices."""
    tensor: int = 1
    """Shards of heads, MLP width and vocabulary."""


@dataclass
class DataConfig:
    __pydantic_config__ = STRICT
    train: str = ""
    """JSONL of questions: id, question, golden_answers, data_source."""
    eval: str = ""
    """JSONL of held-out questions."""
    eval_limit: int = 0
    """Evaluate on this many questions, evenly spread over data sources; 0: all."""
    shuffle: bool = True
    """Shuffle training questions anew in every epoch."""


@dataclass
class PromptConfig:
    __pydantic_config__ = STRICT
    template: str = "paper"
    """Name of a built-in template (paper, short) or a text that contains {question}."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Wrap the prompt in the tokenizer's chat template; auto: where it has one."""
    prepend_think: bool = False
    """The environment opens every turn with <think>."""


@dataclass
class RolloutConfig:
    __pydantic_config__ = STRICT
    questions_per_step: int = 512
    """Questions drawn per training step."""
    group_size: int = 5
    """Trajectories per question."""
    max_searches: int = 4
    """Search turns; after the last one comes one final turn without retrieval."""
    max_prompt_length: int = 2048
    """Tokens; a longer prompt is an error."""
    max_turn_length: int = 1024
    """Tokens sampled in one turn."""
    max_observation_length: int = 2048
    """Tokens of one observation; longer ones are cut before the closing tag."""
    max_length: int = 16384
    """Tokens of prompt and response together."""
    on_invalid: Literal["end", "retry"] = "end"
    """A turn that is neither search nor answer ends the trajectory (CalibAdv) or is told so (Search-R1)."""
    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; 1: off."""
    top_k: int = 0
    """0: off."""
    max_concurrency: int = 512
    """Trajectories in flight."""
    max_staleness: int = 0
    """Steps by which the policy that begins a trajectory may be older than the one it trains; 0: wait for
    every rollout before an update. Above 0 rollouts go on while the learner updates (sampler.name=vllm);
    set loss.importance_cap too."""

    def __post_init__(self) -> None:
        _require(
            self,
            ">= 1",
            "questions_per_step group_size max_searches max_prompt_length max_turn_length"
            " max_observation_length max_length max_concurrency",
        )
        _require(self, ">= 0", "temperature top_k max_staleness")
        _require(self, "in (0, 1]", "top_p")
        if self.max_prompt_length >= self.max_length:
            raise ValueError(
                f"max_prompt_length is {self.max_prompt_length},"
                f" but must be below max_length ({self.max_length})"
            )


@dataclass
class SamplerConfig:
    __pydantic_config__ = STRICT
    name: Literal["jax", "vllm"] = "jax"
    """jax: in process, on the trainer's mesh; vllm: servers that take their weights from snapshots."""
    slots: int = 64
    """Trajectories decoded together (jax: rows of the KV cache; vllm: of one worker)."""
    decode_chunk: int = 32
    """jax: tokens decoded before finished rows are handed back and waiting ones admitted."""
    prefill_chunk: int = 256
    """jax: tokens of one row that enter the cache in one call."""
    urls: list[str] = field(default_factory=list)
    """vllm: running workers (scripts/launch_vllm_worker.sh); empty: start `workers` child processes."""
    workers: int = 1
    """vllm: child processes where `urls` is empty."""
    flavour: Literal["gpu", "cpu", "tpu"] = "gpu"
    """vllm: which build of vLLM the child processes run."""
    worker_devices: list[str] = field(default_factory=list)
    """vllm: CUDA_VISIBLE_DEVICES of each child process, such as ["4,5", "6,7"]; empty: as the trainer's."""
    worker_args: list[str] = field(default_factory=list)
    """vllm: further arguments of the child processes' launcher."""
    start_timeout: float = 1800.0
    """vllm: seconds a child process may take to become ready."""
    request_timeout: float = 1800.0
    """vllm: seconds one completion may take; then its worker counts as lost."""
    patience: float = 600.0
    """vllm: seconds without any usable worker after which the run stops, its state saved."""

    def __post_init__(self) -> None:
        _require(self, ">= 1", "slots decode_chunk prefill_chunk workers")
        _require(self, "> 0", "start_timeout request_timeout patience")
        if self.worker_devices and len(self.worker_devices) != self.workers:
            raise ValueError(
                f"worker_devices names {len(self.worker_devices)} workers, but workers is {self.workers}"
            )


@dataclass
class RetrieverConfig:
    __pydantic_config__ = STRICT
    url: str = ""
    """Base URL of a running service; empty: start one as a child process from `corpus` and `index`.
    The environment variable RETRIEVER_TOKEN is the token of a service that asks for one."""
    corpus: str = ""
    """JSONL (or .jsonl.gz) of {"id", "contents"} rows, for the child service."""
    index: str = ""
    """Folder of the index for the child service; built when missing."""
    encoder: str = "hashed"
    """Encoder of a newly built index; hashed needs no weights."""
    topk: int = 3
    """Documents per query."""
    timeout: float = 30.0
    """Seconds one request may take."""
    retries: int = 5
    """Further attempts after a failed request; then the run stops with its state saved."""
    start_timeout: float = 600.0
    """Seconds a child service may take to become ready."""
    threads: int = 1
    """Threads of one search of a child service, which shares the machine with the trainer; 0: all cores."""

    def __post_init__(self) -> None:
        _require(self, ">= 1", "topk")
        _require(self, "> 0", "timeout start_timeout")
        _require(self, ">= 0", "retries threads")


@dataclass
class RewardConfig:
    __pydantic_config__ = STRICT
    answer: Literal["f1", "em", "cover_em"] = "f1"
    """Score of the answer against the golden answers; the best match counts."""
    format: bool = True
    """Multiply the answer reward by format validity (0 or 1)."""
    shuffle: bool = False
    """Control experiment: permute the rewards of the step's trajectories, so that they carry no signal."""


@dataclass
class AdvantageConfig:
    __pydantic_config__ = STRICT
    name: Literal["grpo", "calibadv"] = "calibadv"
    """grpo: one advantage a trajectory; calibadv: calibrated by turn (arXiv 2604.18235)."""
    normalize_std: bool = True
    """Divide by the group's standard deviation (GRPO); false: centre only (Dr. GRPO)."""
    soft_penalty: bool = True
    """calibadv: scale a negative advantage of a search turn by 1 - correctness."""
    silver_threshold: float = 0.7
    """calibadv: least answer score of a trajectory whose documents are silver."""
    correctness: Literal["fraction", "max", "mean"] = "fraction"
    """calibadv: how the silver documents of a search turn make its correctness."""
    rebalance: bool = True
    """calibadv: balance positive and negative advantage of the answer turns within each group."""
    target_ratio: float = 1.0
    """calibadv: the paper's lambda: |negative sum| / positive sum over answer-turn tokens, rebalanced."""
    adjust: Literal["positive", "negative"] = "positive"
    """calibadv: the side that is rescaled."""
    order: Literal["penalty_first", "rebalance_first"] = "penalty_first"
    """calibadv: which acts first; they act on different turns, so the result is the same."""

    def __post_init__(self) -> None:
        _require(self, "in [0, 1]", "silver_threshold")
        _require(self, "> 0", "target_ratio")


@dataclass
class LossConfig:
    __pydantic_config__ = STRICT
    clip_low: float = 0.2
    """PPO clip: lower bound 1 - clip_low of the probability ratio."""
    clip_high: float = 0.2
    """PPO clip: upper bound 1 + clip_high."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over the trained tokens of the mini-batch, or over its trajectories of each one's token mean."""
    kl_coef: float = 0.0
    """Weight of the KL term to the initial policy; 0: no reference policy is kept."""
    kl_estimator: Literal["low_var_kl", "kl", "abs", "mse"] = "low_var_kl"
    """Estimator of the KL divergence per token."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0: off."""
    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Denominator of the ratio: recomputed by the learner before the first update, or as sampled."""
    importance_cap: float = 0.0
    """Truncated importance sampling between sampler and learner; 0: off."""

    def __post_init__(self) -> None:
        _require(self, ">= 0", "clip_low clip_high kl_coef entropy_coef importance_cap")


@dataclass
class OptimizerConfig:
    __pydantic_config__ = STRICT
    name: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised momentum on matrices, AdamW on the rest."""
    lr: float = 5e-7
    """Peak learning rate."""
    adam_lr: float = 0.0
    """muon: peak rate of the parameters that are not layer matrices; 0: the same."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Learning rate after the warm-up."""
    warmup_steps: int = 0
    """Optimizer updates of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""

    def __post_init__(self) -> None:
        _require(self, "> 0", "lr max_grad_norm")
        _require(self, ">= 0", "adam_lr warmup_steps weight_decay")


@dataclass
class LearnerConfig:
    __pydantic_config__ = STRICT
    steps: int = 410
    """Training steps; one step = one batch of rollouts."""
    minibatch_size: int = 0
    """Trajectories per optimizer update; 0: all of the step in one update."""
    epochs: int = 1
    """Passes over the step's trajectories."""
    row_length: int = 16384
    """Tokens of a packed row; at least rollout.max_length."""
    microbatch_rows: int = 8
    """Packed rows per forward/backward pass."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the training steps."""

    def __post_init__(self) -> None:
        _require(self, ">= 1", "steps epochs row_length microbatch_rows")
        _require(self, ">= 0", "minibatch_size")


@dataclass
class SftConfig:
    __pydantic_config__ = STRICT
    init_from: str = ""
    """HuggingFace folder to start from; empty: random parameters of policy.init."""
    demonstrations: str = ""
    """JSONL of demonstrations, or the name of a generator: world."""
    phases: list[SftPhase] = field(default_factory=list)
    """Stages of the cold start, in order."""
    row_length: int = 512
    """Tokens of a packed row."""
    rows: int = 16
    """Packed rows per update."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer of the cold start."""
    output: str = "${run.dir}/sft"
    """HuggingFace folder the trained policy is written to."""

    def __post_init__(self) -> None:
        _require(self, ">= 1", "row_length rows")


@dataclass
class SftPhase:
    __pydantic_config__ = STRICT
    steps: int = 100
    """Optimizer updates."""
    kind: Literal["imperfect", "lookups", "drills"] = "imperfect"
    """Demonstrations of the generator: imperfect: whole trajectories with flaws; lookups: careful one-hop and
    comparison questions; drills: words to copy and names to compare, without search. A JSONL has one kind."""
    loss_on: Literal["sampled", "all"] = "sampled"
    """Tokens with a loss: what the policy would sample, or documents and prompt too."""

    def __post_init__(self) -> None:
        _require(self, ">= 1", "steps")


@dataclass
class WorldConfig:
    __pydantic_config__ = STRICT
    dir: str = ""
    """Folder the generated encyclopedia is written to; empty: none is made."""
    seed: int = 0
    """Seed of the world; it does not depend on run.seed."""
    people: int = 160
    """Fictional persons."""
    cities: int = 50
    """Fictional cities."""
    works: int = 40
    """Fictional books."""
    companies: int = 50
    """Fictional companies."""
    train_questions: int = 2000
    """Questions written to data.train."""
    eval_questions: int = 200
    """Held-out questions."""
    one_hop: float = 0.25
    """Share of questions that one passage answers."""
    two_hop: float = 0.5
    """Share of questions that need a passage to find the next."""
    comparison: float = 0.25
    """Shares of the question types; they are normalised."""

    def __post_init__(self) -> None:
        _require(self, ">= 1", "people cities companies works train_questions eval_questions")
        _require(self, ">= 0", "one_hop two_hop comparison")


@dataclass
class CheckpointConfig:
    __pydantic_config__ = STRICT
    every: int = 50
    """Steps between full checkpoints; one is written at the last step too. 0: at the last step only."""
    keep: int = 2
    """Full checkpoints kept."""
    resume: bool = True
    """Go on from the newest full checkpoint in run.dir, if there is one."""
    snapshot_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the policy snapshots that samplers load."""
    snapshots_kept: int = 2
    """Policy snapshots kept."""

    def __post_init__(self) -> None:
        _require(self, ">= 0", "every")
        _require(self, ">= 1", "keep snapshots_kept")


@dataclass
class EvaluateConfig:
    __pydantic_config__ = STRICT
    policy: str = ""
    """HuggingFace folder to evaluate; empty: policy.path."""
    every: int = 0
    """Training steps between evaluations; 0: none during training."""
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    """One pass over the evaluation questions for each."""
    samples: int = 1
    """Trajectories per question at temperatures above 0."""
    output: str = "${run.dir}/evaluation.json"
    """JSON file of the scores."""

    def __post_init__(self) -> None:
        _require(self, ">= 0", "every")
        _require(self, ">= 1", "samples")


@dataclass
class ExportConfig:
    __pydantic_config__ = STRICT
    source: str = ""
    """Checkpoint or snapshot to export; empty: the newest full checkpoint of run.dir."""
    output: str = "${run.dir}/hf"
    """HuggingFace folder to write."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the exported weights."""


@dataclass
class LogConfig:
    __pydantic_config__ = STRICT
    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""
    rollouts: bool = True
    """Keep every trajectory as rollouts/step_N.jsonl."""
    progress: bool = True
    """Show a line a step, and a bar where standard error is a terminal."""


@dataclass
class Config:
    """A whole run. `python -m calibadv_jax.train --config FILE --dry-run` prints it resolved."""

    __pydantic_config__ = STRICT
    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    data: DataConfig = field(default_factory=DataConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.learner.row_length < self.rollout.max_length:
            raise ValueError(
                f"learner.row_length is {self.learner.row_length}, but a trajectory may have"
                f" rollout.max_length = {self.rollout.max_length} tokens: raise the one or lower the other"
            )
        if self.rollout.max_staleness and self.sampler.name != "vllm":
            raise ValueError(
                f"rollout.max_staleness is {self.rollout.max_staleness}, but sampler.name={self.sampler.name}"
                " samples on the learner's own devices: set it to 0, or sampler.name=vllm"
            )
        truncated = self.rollout.top_p < 1 or self.rollout.top_k > 0
        uses_sampler = self.loss.importance_cap > 0 or self.loss.old_logprobs == "sampler"
        if truncated and uses_sampler and self.sampler.name == "vllm":
            raise ValueError(
                "vLLM reports log-probabilities after top_p and top_k, which the learner can not recompute:"
                " set rollout.top_p=1 and rollout.top_k=0, or loss.importance_cap=0 and"
                " loss.old_logprobs=recompute"
            )


def known_keys(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted name of every key -> its type, sections included."""
    keys: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(section).items():
        if name.startswith("__"):
            continue
        keys[prefix + name] = kind
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            keys |= known_keys(kind, f"{prefix}{name}.")
    return keys


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies ``key.path=value`` overrides.

    Raises:
        UserError: missing file, bad YAML, unknown key (with the nearest known one), bad value.
    """
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such config file; the shipped ones are in configs/")
    for override in overrides:
        if "=" not in override:
            raise UserError(f"override {override!r} is not of the form key.path=value")
    # Defaults come first, so that an interpolation may name a key which the file leaves alone.
    defaults = OmegaConf.create(dataclasses.asdict(Config()))
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise UserError(f"{path}: expected a mapping of sections, got a list")
        given = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)))
        _refuse_unknown(OmegaConf.to_container(given), path)
        merged = OmegaConf.to_container(OmegaConf.merge(defaults, given), resolve=True)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    return _validate(merged, path)


def _refuse_unknown(given: Any, path: Path) -> None:
    keys = known_keys()

    def walk(node: Any, prefix: str) -> None:
        for name, value in node.items():
            dotted = f"{prefix}{name}"
            if dotted not in keys:
                near = difflib.get_close_matches(dotted, keys, n=1, cutoff=0.5) or [
                    key for key in keys if key.rsplit(".", 1)[-1] == name
                ]
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UserError(f"{path}: unknown key {dotted!r}{hint}")
            if dataclasses.is_dataclass(keys[dotted]) and isinstance(value, dict):
                walk(value, f"{dotted}.")

    walk(given, "")


def _validate(merged: Any, path: Path) -> Config:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Config).validate_python(merged)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc'])) or 'config'}: {item['msg'].removeprefix('Value error, ')}"
            + ("" if isinstance(item["input"], dict | types.NoneType) else f" (got {item['input']!r})")
            for item in error.errors()
        ]
        raise UserError(f"{path}: {'; '.join(lines)}") from error


def dump_config(config: Config) -> str:
    """The resolved config as YAML, every key written out."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
