"""Every YAML key, typed and documented: a dataclass a section, checked by pydantic.

`load_config` reads a file and the command line's overrides, `dump_config` writes a config out,
and `parse_config` reads that again.
"""

from calibadv_jax.config.keys import counterpart, known_keys
from calibadv_jax.config.load import dump_config, load_config, parse_config
from calibadv_jax.config.root import Config
from calibadv_jax.config.sections.credit import AdvantageConfig, JudgeConfig, RewardConfig
from calibadv_jax.config.sections.data import ColumnsConfig, DataConfig, PromptConfig, WorldConfig
from calibadv_jax.config.sections.evaluate import EvaluateConfig
from calibadv_jax.config.sections.guards import GuardsConfig
from calibadv_jax.config.sections.learner import (
    Aggregation,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    OptimizerConfig,
)
from calibadv_jax.config.sections.policy import DistributedConfig, LoraConfig, MeshConfig, PolicyConfig
from calibadv_jax.config.sections.retriever import RetrieverConfig
from calibadv_jax.config.sections.rollout import RolloutConfig, SamplerConfig
from calibadv_jax.config.sections.run import CheckpointConfig, ExportConfig, LogConfig, RunConfig
from calibadv_jax.config.sections.sft import SftConfig, SftPhase
from calibadv_jax.config.sections.tools import McpConfig, ToolConfig

__all__ = [
    "AdvantageConfig",
    "Aggregation",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "ColumnsConfig",
    "DataConfig",
    "DistributedConfig",
    "EvaluateConfig",
    "ExportConfig",
    "GuardsConfig",
    "JudgeConfig",
    "LearnerConfig",
    "LogConfig",
    "LoraConfig",
    "LossConfig",
    "McpConfig",
    "MeshConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "PromptConfig",
    "RetrieverConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplerConfig",
    "SftConfig",
    "SftPhase",
    "ToolConfig",
    "WorldConfig",
    "counterpart",
    "dump_config",
    "known_keys",
    "load_config",
    "parse_config",
]
